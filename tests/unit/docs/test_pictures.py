"""Each picture matches its checked-in source, and supports light and dark mode."""

import html
import re
from pathlib import Path

import pytest

PICTURES = Path(__file__).parents[3] / "docs" / "pictures"


@pytest.mark.parametrize("source", sorted(PICTURES.glob("*.dot")), ids=lambda path: path.stem)
def test_a_picture_shows_what_its_source_names(source: Path) -> None:
    drawn = html.unescape(source.with_suffix(".svg").read_text(encoding="utf-8"))
    labels = re.findall(r'label="([^"]+)"', source.read_text(encoding="utf-8"))
    lines = {line for label in labels for line in label.split("\\n")}
    shown = set(re.findall(r"<text[^>]*>([^<]*)</text>", drawn))
    assert lines == shown, "run: python docs/pictures/draw.py"
    assert "prefers-color-scheme: dark" in drawn
