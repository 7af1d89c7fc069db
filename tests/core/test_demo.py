"""The demo, whole but on a tiny model: what it prints, what it leaves behind, how it ends when something is wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from memreclaim.cli import demo, main
from memreclaim.cli.exit_codes import ExitCode
from memreclaim.engines.reference import ModelConfig, ServedRun, Workload, workload

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cpu

TINY = ModelConfig.tiny()
LAYERS = TINY.num_hidden_layers + TINY.num_nextn_predict_layers


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the demo on the tiny model, with two of its scenarios, and with no settings from outside."""

    def short(config: ModelConfig, seed: int) -> Workload:
        return Workload(workload(config, seed).scenarios[:2])

    monkeypatch.setattr(ModelConfig, "demo", classmethod(lambda _cls: TINY))
    monkeypatch.setattr("memreclaim.engines.reference.workload", short)
    monkeypatch.delenv("MEMRECLAIM", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


def _demo(folder: Path, *more: str) -> int:
    return main(["demo", "--dir", str(folder), "--device", "cpu", *more])


def test_json_is_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object with the documented keys: every layer reclaimed, bytes add up, the pool grew, outputs are the same."""
    assert _demo(tmp_path, "--json") == ExitCode.OK
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert list(found) == [
        "schema_version", "device", "layers", "kept", "gross_bytes", "twin_bytes", "net_bytes", "allocator_freed_bytes",
        "peak_extra_bytes", "kv_pool", "outputs_identical", "rows_served", "seconds",
    ]  # fmt: skip
    assert found["device"] == "cpu"
    assert found["layers"] == {"total": LAYERS, "reclaimed": LAYERS, "kept": 0}
    assert found["kept"] == []
    elements = TINY.o_groups * TINY.o_lora_rank * TINY.group_width
    assert found["gross_bytes"] == LAYERS * 2 * elements
    assert found["twin_bytes"] == LAYERS * (elements + elements // 1024)
    assert found["net_bytes"] == found["gross_bytes"] - found["twin_bytes"]
    assert set(found["kv_pool"]) == {"tokens_before", "tokens_after", "bytes_per_token", "limited_by"}
    assert found["outputs_identical"] is True
    assert set(found["seconds"]) == {"load", "reclaim", "serve_before", "serve_after"}
    assert found["rows_served"]["stock"] > 0


def test_table_shows_layers_memory_and_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A person sees every layer, the three figures and the sentence that matters."""
    assert _demo(tmp_path) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.count("reclaimed") == LAYERS
    assert all(word in out for word in ("gross", "twins", "net", "KV pool"))
    assert "every token and every bit of every score is the same" in out


def test_a_planted_mismatch_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The changed layer stays bf16, is named with its reason, and the exit code says so; outputs stay the same."""
    assert _demo(tmp_path, "--plant-mismatch", "--json") == ExitCode.MISMATCH
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == {"total": LAYERS, "reclaimed": LAYERS - 1, "kept": 1}
    assert found["kept"] == [{"layer": "layers.1.attn.wo_a", "reason": "mismatch", "mismatched_elements": 1}]
    assert found["outputs_identical"] is True
    assert _demo(tmp_path, "--plant-mismatch") == ExitCode.MISMATCH
    assert "1 of" in capsys.readouterr().out


def test_a_planted_mismatch_under_abort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With MEMRECLAIM_ON_MISMATCH=abort the demo ends with one line and code 3."""
    monkeypatch.setenv("MEMRECLAIM_ON_MISMATCH", "abort")
    assert _demo(tmp_path, "--plant-mismatch") == ExitCode.MISMATCH
    assert "memreclaim: error: no exact twin: mismatch, 1 elements differ" in capsys.readouterr().err


def test_differing_outputs_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a bit differed, the demo would say where, and fail."""
    monkeypatch.setattr(
        ServedRun, "first_difference", lambda *_runs: "request 0, token 1: the score of 2 is 3 against 4"
    )
    assert _demo(tmp_path, "--json") == ExitCode.ERROR
    out, err = capsys.readouterr()
    assert json.loads(out)["outputs_identical"] is False
    assert err == "memreclaim: error: outputs differ: request 0, token 1: the score of 2 is 3 against 4\n"


def test_the_checkpoint_is_written_once(tmp_path: Path) -> None:
    """A second run finds the first one's checkpoint; another configuration's has another name."""
    first = demo.ensure_checkpoint(tmp_path, TINY)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert demo.ensure_checkpoint(tmp_path, TINY) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    assert [folder.name for folder in tmp_path.iterdir()] == [first.name]


def test_a_half_written_checkpoint_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that dies leaves no folder of the final name, and the next run starts over."""

    def die(*_arguments: object, **_keywords: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("safetensors.torch.save_file", die)
        with pytest.raises(KeyboardInterrupt):
            demo.ensure_checkpoint(tmp_path, TINY)
    assert list(tmp_path.iterdir()) == []
    assert (demo.ensure_checkpoint(tmp_path, TINY) / "config.json").exists()


def test_a_truncated_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shard that was damaged later is one line on stderr, and no traceback."""
    shard = next(demo.ensure_checkpoint(tmp_path, TINY).glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert _demo(tmp_path) == ExitCode.ERROR
    assert capsys.readouterr().err.startswith(f"memreclaim: error: {shard}: ")


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99", ""])
def test_devices_that_are_not_there(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A device that cannot be used is refused before anything is written."""
    assert main(["demo", "--dir", str(tmp_path), "--device", device]) == ExitCode.ERROR
    assert capsys.readouterr().err.startswith("memreclaim: error: --device: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("variable", "value"), [("MEMRECLAIM_NUMERIC", "fused"), ("MEMRECLAIM_NUMERICS", "fast")])
def test_unknown_settings_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt variable or value ends the demo with one line that names it."""
    monkeypatch.setenv(variable, value)
    assert _demo(tmp_path) == ExitCode.ERROR
    err = capsys.readouterr().err
    assert err.startswith(f"memreclaim: error: {variable}: ")
    assert err.count("\n") == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A --dir that is a file is named."""
    (tmp_path / "file").write_text("")
    assert _demo(tmp_path / "file") == ExitCode.ERROR
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_the_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_CACHE_HOME decides, else ~/.cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.default_folder() == tmp_path / "memreclaim"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo.default_folder() == tmp_path / ".cache" / "memreclaim"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A user with neither HOME nor a line in the password file, as in containers, gets every command all the same."""

    def homeless() -> Path:
        message = "Could not determine home directory."
        raise RuntimeError(message)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", homeless)
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--help"])
    assert ended.value.code == 0
    assert "memreclaim-" in capsys.readouterr().out
