"""Documentation pages with examples: every block is written or run in order and prints what it shows."""

from pathlib import Path

import pytest

from tests.support.pages import ROOT, blocks, play, shell


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("page", "others"),
    [
        ("tutorial.md", set[str]()),
        ("settings.md", set[str]()),
        ("shell.md", {"text"}),
        ("wiring.md", set[str]()),
        ("running.md", set[str]()),
        ("testing.md", set[str]()),
        ("tables.md", set[str]()),
        ("comparison.md", {"go"}),
        ("recipes.md", set[str]()),
        ("production.md", {"ini"}),
    ],
    ids=[
        "tutorial",
        "settings",
        "shell",
        "wiring",
        "running",
        "testing",
        "tables",
        "comparison",
        "recipes",
        "production",
    ],
)
def test_commands_of_the_pages_print_the_documented_output(
    page: str, others: set[str], tmp_path: Path
) -> None:
    path = ROOT / "docs/lifecycle" / page
    found = list(blocks(path.read_text(encoding="utf-8")))
    assert {block.language for block in found} == {"python", "console"} | others
    found = [block for block in found if block.language not in {"go", "ini"}]  # only shown
    with shell(tmp_path) as process:
        for block in found:
            if block.language in {"python", "text"}:
                assert block.file is not None, f"line {block.line}: say which file this is"
                (tmp_path / block.file).parent.mkdir(exist_ok=True)
                (tmp_path / block.file).write_text(block.text, encoding="utf-8")
            else:
                play(path, block, process)
