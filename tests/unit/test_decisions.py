"""The list of decisions is whole, and no number is given twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FILES = sorted((DOCS / "decisions").glob("[0-9]*.md"))


def test_each_decision_has_a_number_of_its_own_and_is_in_the_list() -> None:
    listed = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    numbers = [int(file.name[:4]) for file in FILES]

    assert len(numbers) == len(set(numbers))
    for file, number in zip(FILES, numbers, strict=True):
        assert file.read_text(encoding="utf-8").startswith(f"# {number}. "), file.name
        assert f"[{number}]({file.name})" in listed
    assert len(re.findall(r"^\| \[", listed, flags=re.MULTILINE)) == len(FILES)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_every_page_links_to_files_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_file_that_the_design_names_exists() -> None:
    text = (DOCS / "design.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`((?:[\w*]+/)*[\w*]+(?:\.(?:py|cpp)|/))`", text))

    missing = [
        name for name in names
        if not list(ROOT.glob(name)) and not [p for p in ROOT.glob(f"*/{name}") if p.exists()]
    ]  # fmt: skip
    assert len(names) > 40
    assert missing == []
