"""What the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("dashboards/*.md")])


def test_every_case_names_tests_that_exist() -> None:
    """A test that docs/cases.md points to is where it says, for each of the 36 cases."""
    text = (ROOT / "docs" / "cases.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*$", text, re.MULTILINE)
    assert [str(number) for number in range(1, 37)] == rows
    file = ""
    missing = []
    for name, test in re.findall(r"`((?:\w+/)+test_\w+\.py|)(?:::(test_\w+))?`", text):
        file = name or file
        source = TESTS / file
        if not source.is_file() or (test and f"def {test}(" not in source.read_text()):
            missing.append(f"{file}::{test}")
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """Each relative link of a document points to a file of the project."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []
