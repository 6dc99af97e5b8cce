"""The documentation is correct: its code runs, and its links resolve."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

import pytest

from docs.site.api_reference import COMMANDS, FRAMEWORK
from lifecycle import Cell, Hive

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {ROOT / "docs" / path for path in (*COMMANDS, FRAMEWORK)}
"""Pages of the site that are made of the code when it is built, and are in no repository."""
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_of_the_docs_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    paths = {target: (page.parent / target).resolve() for target in targets if "://" not in target}
    assert [target for target, path in paths.items() if path not in GENERATED and not path.exists()] == []


def anchors(page: Path) -> set[str]:
    """What a link may name of a page: its headings as GitHub writes them, and what HTML names."""
    text = page.read_text(encoding="utf-8")
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in re.findall(
        r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    ):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower()).replace(" ", "-")
        again = (f"{slug}-{number}" for number in count(1))
        found.add(slug if slug not in found else next(one for one in again if one not in found))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings_that_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    missing = []
    for path, anchor in links:
        target = page.parent / path if path else page
        if target.suffix == ".md" and anchor not in anchors(target):
            missing.append(f"{path}#{anchor}")
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:cells|lifecycle|cmd|tests|configs|docs)/[\w./-]+)`", page.read_text(encoding="utf-8")
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.anyio
@pytest.mark.parametrize("page", ["README.md", "docs/lifecycle/cells.md"])
async def test_the_cell_of_the_guide_greets(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    guide = (ROOT / page).read_text(encoding="utf-8")
    code = re.search(r"```python\n(from lifecycle.*?)```", guide, re.DOTALL)
    name = re.search(r'main\(Hive\(cell, name="(\w+)"\)\)', guide)
    assert code is not None
    assert name is not None
    names: dict[str, object] = {"__name__": "guide"}
    exec(compile(code[1], page, "exec"), names)  # noqa: S102 - our own page
    cell = names["cell"]
    assert isinstance(cell, Cell)
    async with Hive(cell, name=name[1], settings={"greeted": "Ada"}).started():
        # The log may be printed there too, if a test before this one has set structlog up.
        assert "hello, Ada" in capsys.readouterr().out.splitlines()
