"""All samples as one page for a browser.

Needs: Samples.   Gives: page().
"""

import math
from collections.abc import Sequence
from html import escape

from cells.observe.samples.samples import INTERVAL, KEPT, Samples

WIDTH, HEIGHT = 240, 40
_COLOURS = ("#2f6fb3", "#c2781b", "#b3322f")
_PAGE = """\
<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Metrics</title>
<style>
:root {{ color-scheme: light dark; }} body {{ font: 14px system-ui, sans-serif; margin: 1.5rem; }}
table {{ border-collapse: collapse; }} td, th {{ text-align: left; padding: 2px 12px 2px 0; }}
td.labels {{ max-width: 34rem; overflow-wrap: anywhere; opacity: .75; }}
</style>
<h1>Metrics of the last {minutes:.0f} minutes</h1>
<p>A sample every {every:.0f} minutes; of histograms the 50th, 90th and 99th percentile of what came since
the last one.</p>
<table><tr><th>Metric<th>Labels<th>Latest<th>{minutes:.0f} minutes
{rows}
</table></html>
"""


def page(samples: Samples) -> str:
    """It needs no network."""
    rows = []
    for series in samples:
        rings = [samples.newest_first(ring) for ring in series.rings]
        cells = (escape(series.name), escape(series.labels), escape(series.told(ring[0] for ring in rings)))
        name, labels, latest = cells
        rows.append(f'<tr><td>{name}<td class="labels">{labels}<td>{latest}<td>{_lines(rings)}')
    return _PAGE.format(minutes=KEPT * INTERVAL / 60, every=INTERVAL / 60, rows="\n".join(rows))


def _lines(rings: Sequence[Sequence[float]]) -> str:
    every = [sample for ring in rings for sample in ring if not math.isnan(sample)]
    low, high = min(every, default=0.0), max(every, default=0.0)
    drawn = []
    for ring, colour in zip(rings, _COLOURS, strict=False):
        there = [(back, sample) for back, sample in enumerate(ring) if not math.isnan(sample)]
        points = " ".join(f"{_x(back):.1f},{_y(sample, low, high):.1f}" for back, sample in there)
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(drawn)}</svg>'


def _x(back: int) -> float:
    return WIDTH - back * WIDTH / (KEPT - 1)


def _y(value: float, low: float, high: float) -> float:
    share = (value - low) / (high - low) if high > low else 0.5
    return HEIGHT - 2 - share * (HEIGHT - 4)
