"""The command line: what goes where, which exit code, and that bad input never shows a traceback."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoint_files import SCALE, WEIGHT, codes, scales, write_folder

from memreclaim import cli
from memreclaim.cli import COMMANDS, main
from memreclaim.cli.exit_codes import ExitCode
from memreclaim.cli.screen import Screen, printable

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cpu

FILE = "model.safetensors"
ANSI = re.compile(r"\x1b\[")


@pytest.fixture
def exact(tmp_path: Path) -> str:
    """A checkpoint of one exact tensor."""
    return str(write_folder(tmp_path / "exact", {FILE: {WEIGHT: codes(), SCALE: scales()}}))


@pytest.fixture
def inexact(tmp_path: Path) -> str:
    """A checkpoint of one tensor with a NaN code."""
    kind, raw = codes()
    raw[5, 6] = 0x7F
    return str(write_folder(tmp_path / "inexact", {FILE: {WEIGHT: (kind, raw), SCALE: scales()}}))


def test_survey_json_is_the_contract(exact: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Stdout is one JSON object with the documented keys, stderr is silent."""
    assert main(["survey", exact, "--tp", "2", "--json"]) == ExitCode.OK
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert list(found) == ["schema_version", "checkpoint", "tensors", "per_rank"]
    assert list(found["per_rank"]) == ["tp", "gross_bytes", "twin_bytes", "net_bytes", "kv_tokens"]
    assert set(found["tensors"][0]) == {
        "name", "shape", "dtype", "block", "exact", "mismatched_elements", "gross_bytes", "twin_bytes", "net_bytes",
    }  # fmt: skip
    assert found["checkpoint"] == exact
    assert found["per_rank"]["gross_bytes"] == 128 * 128


def test_survey_table_groups_what_is_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers of one kind share a line, and figures are in megabytes."""
    shards = {
        FILE: {
            f"layers.{n}.attn.wo_a.{part}": stored
            for n in range(12)
            for part, stored in (("weight", codes()), ("scale", scales()))
        }
    }
    assert main(["survey", str(write_folder(tmp_path / "c", shards))]) == ExitCode.OK
    out = capsys.readouterr().out
    assert re.search(r"12 │ layers\.\*\.attn\.wo_a\.weight │ 128x128 │ F8_E4M3 │ 32x32 │ exact", out)
    assert re.search(r"gross, bf16 given back\W+0\.4 MB", out)


def test_survey_says_by_exit_code_that_a_layer_does_not_match(inexact: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3, and the table names the tensor and how many elements have no twin."""
    assert main(["survey", inexact]) == ExitCode.MISMATCH
    assert "kept, 1 elements have no exact twin" in capsys.readouterr().out


BAD_ARGUMENTS = (
    [],
    ["nonsense"],
    ["survey"],
    ["survey", "x", "--tp", "0"],
    ["survey", "x", "--tp", "-1"],
    ["survey", "x", "--tp", "1.5"],
    ["survey", "x", "--tp", "\N{SUPERSCRIPT TWO}"],
    ["doctor", "--engine", "nonsense"],
    ["--print-completion", "nonsense"],
)


@pytest.mark.parametrize("argv", BAD_ARGUMENTS, ids=" ".join)
def test_usage_errors_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments that make no sense end with argparse's usage message and code 2."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == ExitCode.USAGE
    assert capsys.readouterr().err.startswith("usage: memreclaim")


def _truncate(folder: Path) -> None:
    os.truncate(folder / FILE, 300)


def _absurd_header(folder: Path) -> None:
    with (folder / FILE).open("r+b") as file:
        file.write(b"\xff" * 8)


def _nan_scales(folder: Path) -> None:
    write_folder(folder, {FILE: {WEIGHT: codes(), SCALE: ("F8_E8M0", np.full((4, 4), 255, np.uint8))}})


def _no_scale(folder: Path) -> None:
    write_folder(folder, {FILE: {WEIGHT: codes()}})


def _wrong_dtype(folder: Path) -> None:
    write_folder(folder, {FILE: {WEIGHT: ("F32", np.zeros((128, 128), np.float32))}})


def _missing_shard(folder: Path) -> None:
    (folder / FILE).unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_truncate, FILE),
        (_absurd_header, FILE),
        (_nan_scales, FILE),
        (_no_scale, FILE),
        (_wrong_dtype, FILE),
        (_missing_shard, FILE),
        (_broken_config, "config.json"),
    ],
)
def test_bad_checkpoints_are_one_line_on_stderr(
    exact: str, damage: object, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, nothing on stdout, and one line on stderr that names the file."""
    from pathlib import Path

    assert callable(damage)
    damage(Path(exact))
    assert main(["survey", exact, "--json"]) == ExitCode.ERROR
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"memreclaim: error: {exact}/{named}: ")


def test_a_missing_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that is not there is said so."""
    assert main(["survey", str(tmp_path / "nowhere")]) == ExitCode.ERROR
    assert capsys.readouterr().err == f"memreclaim: error: {tmp_path}/nowhere: no such file or folder\n"


def test_names_in_files_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters and markup in a tensor's name are printed as text."""
    name = "\x1b[31m[bold]layers.0.attn.wo_a.weight"
    folder = write_folder(tmp_path / "c", {FILE: {name: codes()}})
    assert main(["survey", str(folder)]) == ExitCode.ERROR
    assert "\\x1b[31m[bold]layers.0.attn.wo_a.weight is F8_E4M3" in capsys.readouterr().err
    scale_name = name.replace(".weight", ".scale")
    folder = write_folder(tmp_path / "d", {FILE: {name: codes(), scale_name: scales()}})
    assert main(["survey", str(folder)]) == ExitCode.OK
    out = capsys.readouterr().out
    assert not ANSI.search(out)
    assert "[bold]layers" in out


def test_printable_leaves_words_alone() -> None:
    """Only what is not printable is escaped."""
    assert printable("wo_a é \x07\n") == "wo_a é \\x07\\n"


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command that is offered answers --help and shows --json and the exit codes."""
    for name in COMMANDS:
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        out = capsys.readouterr().out
        assert caught.value.code == 0
        assert "--json" in out
        assert "3 a layer did not match" in re.sub(r"\s+", " ", out)


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_the_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A completion script is printed for each shell, and needs no command."""
    with pytest.raises(SystemExit) as caught:
        main(["--print-completion", shell])
    assert caught.value.code in (0, None)
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_completion_without_shtab_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the extra is not installed, one line names it."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as caught:
        main(["--print-completion", "bash"])
    assert caught.value.code == ExitCode.ERROR
    assert "memreclaim[completion]" in capsys.readouterr().err


def test_a_reader_that_left_is_no_traceback(exact: str) -> None:
    """`memreclaim survey … | head -0` ends quietly."""
    script = f"{sys.executable} -m memreclaim survey {exact} --json | true"
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize(("closed", "code", "told"), [(1, ExitCode.ERROR, "stdout is closed"), (2, ExitCode.OK, "")])
def test_closed_streams_are_no_traceback(exact: str, closed: int, code: int, told: str) -> None:
    """Without a stdout one line says so; without a stderr the result is printed all the same."""
    command = [sys.executable, "-m", "memreclaim", "survey", exact]
    shell = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *command]
    ended = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (code, bool(told))
    assert told in ended.stderr
    assert bool(ended.stdout) == (closed != 1)


def test_help_and_survey_load_no_torch(exact: str) -> None:
    """Help, completion and the survey of a usual checkpoint answer without importing torch."""
    program = (
        "import sys; from memreclaim.cli import build_parser, main; build_parser().format_help(); "
        f"main(['survey', {exact!r}]); print(sorted({{'torch', 'triton', 'prometheus_client'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_progress_bar_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Progress calls are accepted and print nothing when stderr is no terminal."""
    with Screen(as_json=False).progress("reading") as progress:
        progress("step", 1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_colours_only_on_a_terminal_that_wants_them(exact: str, variables: dict[str, str]) -> None:
    """On a terminal the table is coloured and a bar runs on it, unless NO_COLOR asks for none."""
    out = _in_terminal([sys.executable, "-m", "memreclaim", "survey", exact], {"TERM": "xterm-256color", **variables})
    assert "exact" in out
    assert bool(re.search(r"\x1b\[3\dm", out)) == ("NO_COLOR" not in variables)


def _in_terminal(command: list[str], variables: dict[str, str]) -> str:
    """What a program prints on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | variables
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        output = b""
        while data := _read(ours):
            output += data
    os.close(ours)
    assert process.returncode == 0
    return output.decode()


def _read(terminal: int) -> bytes:
    """The next bytes; none when the other side is closed, which Linux reports as an error."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


def test_not_exact_under_abort_is_a_mismatch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer that does not match ends a command with code 3 when the settings say abort."""
    from memreclaim.errors import NotExact
    from memreclaim.states import Reason

    class Refusing:
        """A command in which a layer has no twin."""

        @staticmethod
        def run(*_arguments: object) -> ExitCode:
            """Refuse."""
            raise NotExact(Reason.MISMATCH)

    parser = cli.build_parser()
    monkeypatch.setattr(cli, "build_parser", lambda: parser)
    monkeypatch.setattr(cli, "_command", lambda _name: Refusing)
    assert main(["doctor"]) == ExitCode.MISMATCH
    assert capsys.readouterr().err == "memreclaim: error: no exact twin: mismatch\n"
