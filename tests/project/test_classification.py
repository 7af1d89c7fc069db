"""Every test says what it needs, and one that does not stops the run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.cpu

CONFTEST = Path(__file__).parent.parent / "conftest.py"


def _run(pytester: pytest.Pytester, marks: str) -> pytest.RunResult:
    """Run pytest, with this project's conftest, on one file of one passing test that has the given marks."""
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers =\n    cpu: one kind\n    gpu: one kind\n    integration: one kind\n")
    pytester.makepyfile(f"import pytest\n{marks}\ndef test_one():\n    assert True\n")
    return pytester.runpytest_inprocess("-p", "no:cacheprovider")


@pytest.mark.parametrize("mark", ["cpu", "integration"])
@pytest.mark.parametrize("place", ["pytestmark = ", "@"])
def test_a_classified_test_runs(pytester: pytest.Pytester, mark: str, place: str) -> None:
    """One mark is right, on the module as well as on the test."""
    _run(pytester, f"{place}pytest.mark.{mark}").assert_outcomes(passed=1)


@pytest.mark.parametrize("marks", ["", "pytestmark = [pytest.mark.cpu, pytest.mark.gpu]"])
def test_an_unclassified_test_stops_the_run(pytester: pytest.Pytester, marks: str) -> None:
    """No mark, or two kinds at once, is a usage error that names the test."""
    done = _run(pytester, marks)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*exactly one of the marks cpu, gpu, integration*::test_one*"])


def test_a_gpu_test_is_skipped_with_a_reason(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch finds no GPU, the skip says so."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = _run(pytester, "pytestmark = pytest.mark.gpu")
    done.assert_outcomes(skipped=1)
