"""Pages with examples: every block is written or run, in order, and must print what it shows."""

from pathlib import Path

import pytest

from tests.support.pages import ROOT, blocks, play, shell


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("page", "only_shown"),
    [
        ("tutorial.md", set[str]()),
        ("wiring.md", set[str]()),
        ("running.md", set[str]()),
        ("testing.md", set[str]()),
        ("comparison.md", {"go"}),
    ],
    ids=["tutorial", "wiring", "running", "testing", "comparison"],
)
def test_everything_runs_and_prints_what_it_shows(page: str, only_shown: set[str], tmp_path: Path) -> None:
    path = ROOT / "docs" / page
    found = list(blocks(path.read_text(encoding="utf-8")))
    assert {block.language for block in found} == {"python", "console"} | only_shown
    found = [block for block in found if block.language not in only_shown]
    with shell(tmp_path) as process:
        for block in found:
            if block.language == "python":
                assert block.file is not None, f"line {block.line}: say which file this is"
                (tmp_path / block.file).write_text(block.text, encoding="utf-8")
            else:
                play(path, block, process)
