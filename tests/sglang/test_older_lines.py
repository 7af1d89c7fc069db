"""The kernel-module line and the einsum line, by small fakes; and engines that are neither."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import sglang_older
from sglang_older import DRAFT_EINSUM, EINSUM, KERNEL_MODULE

from memreclaim import engines
from memreclaim.engines.sglang import drift, lines

if TYPE_CHECKING:
    from pathlib import Path

REPOSITORY_PATHS = os.pathsep.join(path for path in sys.path if path)


@pytest.mark.cpu
@pytest.mark.parametrize(("source", "name"), [(KERNEL_MODULE, "kernel-module"), (EINSUM, "einsum")])
@pytest.mark.parametrize("version", ["0.5.20", "0.5.22.post1", "0.0.0+dev.dsv41"])
def test_older_lines_are_known_by_their_structure(tmp_path: Path, version: str, source: str, name: str) -> None:
    """A release before 0.5.23, or a dsv41 build, whose dispatch and readers are of a known kind."""
    root = sglang_older.write(tmp_path, version, source)

    assert lines.examine(root, version) == lines.Line(version, name, ())


@pytest.mark.cpu
@pytest.mark.parametrize("version", ["0.5.24", "0.6.0", "1.0", "", "nightly"])
def test_an_unknown_version_is_off(tmp_path: Path, version: str) -> None:
    """Whatever its code looks like."""
    root = sglang_older.write(tmp_path, "0.5.20", EINSUM)
    line = lines.examine(root, version)

    assert not line.supported
    assert "is not known" in line.problems[0]


CHANGES = {
    "dispatch renamed": (EINSUM.replace("_apply_wo_a_bf16_matmul", "_apply"), "is gone"),
    "parameters swapped": (
        EINSUM.replace("(o, wo_a, is_decode=False)", "(wo_a, o, is_decode=False)"),
        "takes (wo_a, o",
    ),
    "a parameter that must be given": (
        EINSUM.replace("(o, wo_a, is_decode=False)", "(o, wo_a, is_decode, layer)"),
        "without a default",
    ),
    "a kernel of its own": (
        EINSUM + "\n    def other(self, o):\n        return my_kernel(o, self.wo_a.weight)\n",
        "MQALayer.other hands wo_a.weight on",
    ),
    "raw memory": (
        EINSUM + "\n    def other(self):\n        return self.wo_a.weight.data_ptr()\n",
        "MQALayer.other uses wo_a.weight.data_ptr",
    ),
}


@pytest.mark.cpu
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_changed_reader_is_off_and_the_line_says_what_changed(tmp_path: Path, change: str) -> None:
    """Before anything is imported, let alone dropped."""
    source, expected = CHANGES[change]
    root = sglang_older.write(tmp_path, "0.5.20", source)

    problems = lines.examine(root, "0.5.20").problems

    assert len(problems) == 1
    assert expected in problems[0]


@pytest.mark.cpu
def test_readers_are_found_by_attribute_and_by_string() -> None:
    """``getattr(self, "wo_a")`` and a parameter's name are readers too; comments and docstrings are none."""
    import ast

    source = """
def one(self):
    return self.wo_a
def two(self):
    return getattr(self, "wo_a")
def three(names):
    return names["layers.0.attn.wo_a.weight"]
def none(self):
    # wo_a
    return self.wo_b
"""
    assert drift.readers(ast.parse(source)) == ["one", "two", "three"]


@pytest.mark.cpu
def test_a_fingerprint_is_of_code_and_not_of_its_looks() -> None:
    """Comments, blank lines and docstrings may change; a constant and a default may not."""
    import ast

    def fingerprint(source: str) -> str:
        (function,) = (node for _, node in drift.functions(ast.parse(source)))
        return drift.fingerprint_of(function)

    plain = fingerprint("def f(a, b=1):\n    return a + b\n")

    assert fingerprint('def f(a,  b = 1):\n    """Add."""\n\n    # both\n    return (a + b)\n') == plain
    assert fingerprint("def f(a, b=2):\n    return a + b\n") != plain
    assert fingerprint("def f(a, b=1):\n    return a - b\n") != plain


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return w.a", "return w.b", "srt/a.py: f has changed"),
        ("def f(w):", "def f(w, x=1):", "srt/a.py: f takes (w, x=1), not (w)"),
        ("def f(w):", "def g(w):", "srt/a.py: f is gone"),
        ("def g():\n    pass", "def g(s):\n    return s.wo_a", "srt/a.py: g reads wo_a and is not known"),
        ("def f(w):", "def f(w:", "srt/a.py does not parse"),
    ],
)
def test_drift_names_file_function_and_change(tmp_path: Path, old: str, new: str, expected: str) -> None:
    """One line for each thing that changed in a file on record; an untouched or reformatted one leaves none."""
    file = tmp_path / "srt/a.py"
    file.parent.mkdir()
    source = "def f(w):\n    return w.a\ndef g():\n    pass\n"
    file.write_text(source)
    known = drift.record(tmp_path, {"srt/a.py": ("f",)})
    assert drift.look(tmp_path, known) == []
    file.write_text("# patched elsewhere\n" + source)
    assert drift.look(tmp_path, known) == []

    file.write_text(source.replace(old, new))

    assert drift.look(tmp_path, known)[0].startswith(expected)


@pytest.mark.cpu
def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    """A module that moved is a change as well."""
    (tmp_path / "a.py").write_text("def f(): pass\n")
    known = drift.record(tmp_path, {"a.py": ("f",)})
    (tmp_path / "a.py").unlink()

    assert drift.look(tmp_path, known) == ["a.py is gone"]


@pytest.mark.integration
@pytest.mark.parametrize("source", [KERNEL_MODULE, EINSUM], ids=["kernel-module", "einsum"])
def test_launch_brings_the_hooks_into_a_spawned_worker(tmp_path: Path, source: str) -> None:
    """Target and draft of an engine without a plug-in framework are reclaimed, and their forwards keep their bits."""
    sglang_older.write(tmp_path, "0.5.20", source)
    chained = tmp_path / "chained"
    chained.mkdir()
    (chained / "sitecustomize.py").write_text("import os; print('chained', os.getpid(), flush=True)\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(chained), str(tmp_path), REPOSITORY_PATHS])}

    done = subprocess.run(
        [sys.executable, "-m", "memreclaim", "launch", "--", sys.executable, "-m", "sglang.launch_server"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines_of = done.stdout.splitlines()
    assert [line for line in lines_of if line.startswith(("target", "draft"))] == ["target Tag True", "draft Tag True"]
    assert len({line for line in lines_of if line.startswith("chained")}) >= 2


@pytest.mark.integration
def test_without_launch_the_same_engine_is_untouched(tmp_path: Path) -> None:
    """The control: MEMRECLAIM alone does nothing to an engine without the framework."""
    sglang_older.write(tmp_path, "0.5.20", EINSUM)
    env = {**os.environ, "MEMRECLAIM": "on", "PYTHONPATH": os.pathsep.join([str(tmp_path), REPOSITORY_PATHS])}

    done = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    assert done.stdout.splitlines() == ["target Parameter True", "draft Parameter True"]


@pytest.mark.cpu
def test_the_draft_of_the_fakes_reads_by_an_einsum_of_its_own() -> None:
    """The fake is what it claims to be."""
    assert "_apply_wo_a_bf16_matmul" not in DRAFT_EINSUM


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("source", "supported", "words"),
    [
        (EINSUM, True, "einsum line"),
        (EINSUM.replace("is_decode=False", "is_decode, layer"), False, "without a default"),
    ],
    ids=["known", "changed"],
)
def test_the_list_of_engines_says_what_the_adapter_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, supported: bool, words: str
) -> None:
    """An older line that is switched on is supported, and one with a changed reader is not, whatever its version."""
    root = sglang_older.write(tmp_path, "0.5.20", source)
    monkeypatch.setattr(drift, "package_root", lambda: root)
    monkeypatch.setattr(lines.metadata, "version", lambda _name: "0.5.20")

    found = next(one for one in engines.found() if one.name == "sglang")

    assert (found.version, found.installed, found.supported) == ("0.5.20", True, supported)
    assert words in found.note
