"""Makes an SVG of each drawing beside this file: `python docs/pictures/draw.py` (Debian's graphviz).

Colours come from style.css, so that a picture follows the light or dark setting of its reader. The SVG files
are checked in, as GitHub and the site show them without a build.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent


def drawn(source: Path) -> str:
    """The SVG of a drawing. Raises CalledProcessError if dot refuses it."""
    svg = subprocess.run(["dot", "-Tsvg", source], capture_output=True, text=True, check=True).stdout
    style = (HERE / "style.css").read_text(encoding="utf-8")
    svg = re.sub(r' (?:fill|stroke)="(?!none)[^"]*"', "", svg)  # the style sheet decides
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg width="[\d.]+pt" height="[\d.]+pt"', '<svg role="img"', svg)
    title = source.read_text(encoding="utf-8").partition("\n")[0].removeprefix("// ")
    svg = re.sub(r"<title>.*?</title>\n?", "", svg)
    return re.sub(
        r"(<svg[^>]*>)",
        rf"\1\n<title>{title}</title>\n<style>\n{style}</style>",
        svg,
        count=1,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.dot")):
        path.with_suffix(".svg").write_text(drawn(path), encoding="utf-8")
