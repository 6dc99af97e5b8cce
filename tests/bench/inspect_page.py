"""The time in which a browser opens the page of ``hive inspect``: for few cells and many, with all arrows."""

from __future__ import annotations

from pathlib import Path

from tests.bench.stats import Figure, Sample
from tests.browser.big_graph import big_graph
from tests.browser.chromium import chromium

SIZES = (50, 500)
"""Numbers of cells; rounds open a page of each, in turn."""
OPENED = "return performance.getEntriesByType('navigation')[0].loadEventEnd"
LAID_OUT = """
const began = performance.now();
document.body.getBoundingClientRect();
return performance.now() - began;
"""


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Return the ms from opening the file until its scripts and the browser have placed every cell."""
    pages = {size: folder / f"inspect-{size}.html" for size in SIZES}
    for size, page in pages.items():
        page.write_text(big_graph(size).html())
    took: dict[int, list[float]] = {size: [] for size in SIZES}
    with chromium(folder / "chromium") as browser:
        for _ in range(rounds):
            for size, page in pages.items():
                browser.get(page.as_uri())
                found: float = browser.execute_script(OPENED) + browser.execute_script(LAID_OUT)
                took[size].append(found)
    return [
        Figure(f"page of hive inspect, {size} cells: opened", "ms", Sample(tuple(took[size])))
        for size in SIZES
    ]
