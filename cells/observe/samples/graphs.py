"""Graphs of sampled metrics: an HTML page, and line graphs in text.

Used by the shell commands ``metrics/html`` and ``metrics/plot``.
"""

import math
import textwrap
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Final

from cells.observe.samples import INTERVAL, RETAINED, Samples, unit_of

LINE_WIDTH, LINE_HEIGHT = 240, 40
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
    """Return an HTML page that loads nothing from the network."""
    rows = []
    for series in samples:
        rings = [samples.newest_first(ring) for ring in series.rings]
        cells = (
            escape(series.name),
            escape(series.labels),
            escape(series.format_samples(ring[0] for ring in rings)),
        )
        name, labels, latest = cells
        rows.append(f'<tr><td>{name}<td class="labels">{labels}<td>{latest}<td>{_lines(rings)}')
    return _PAGE.format(minutes=RETAINED * INTERVAL / 60, every=INTERVAL / 60, rows="\n".join(rows))


def _lines(rings: Sequence[Sequence[float]]) -> str:
    every = [sample for ring in rings for sample in ring if not math.isnan(sample)]
    low, high = min(every, default=0.0), max(every, default=0.0)
    drawn = []
    for ring, colour in zip(rings, _COLOURS, strict=False):
        present = [(back, sample) for back, sample in enumerate(ring) if not math.isnan(sample)]
        points = " ".join(f"{_x(back):.1f},{_y(sample, low, high):.1f}" for back, sample in present)
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
    return f'<svg width="{LINE_WIDTH}" height="{LINE_HEIGHT}" role="img">{"".join(drawn)}</svg>'


def _x(back: int) -> float:
    return LINE_WIDTH - back * LINE_WIDTH / (RETAINED - 1)


def _y(value: float, low: float, high: float) -> float:
    fraction = (value - low) / (high - low) if high > low else 0.5
    return LINE_HEIGHT - 2 - fraction * (LINE_HEIGHT - 4)


# A line graph in text, of dots in braille characters.

WIDTH, HEIGHT = 80, 10
LEFT, BOTTOM = 11, 7
"""The column and the row of the canvas where the plot's corner is."""
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - 1, HEIGHT - 3
ACROSS, UPWARDS = PLOT_WIDTH * 2, PLOT_HEIGHT * 4
"""A character has two dots across and four upwards."""
_BLANK: Final = 0x2800
_DOTS: Final = ((0x1, 0x2, 0x4, 0x40), (0x8, 0x10, 0x20, 0x80))
"""Dots by column, from the top down. Source: Unicode, block Braille Patterns."""


def plot(title: str, labels: str, samples: Sequence[float], minutes: float, suffix: str = "") -> list[str]:
    """Draw the samples, oldest first, over a number of minutes; NaN leaves a gap."""
    present = [one for one in samples if not math.isnan(one)]
    low, high = min(present, default=0.0), max(present, default=0.0)
    canvas = _frame(low, high, minutes, suffix)
    for x in range(ACROSS):
        value = _at(samples, x)
        if not math.isnan(value):
            fraction = (value - low) / (high - low) if high > low else 0.0
            _dot(canvas, x, min(UPWARDS - 1, int(fraction * UPWARDS)))
    indent = " " * LEFT
    head = [indent + title.center(PLOT_WIDTH).rstrip()]
    head += [
        indent + f"[ {line} ]".center(PLOT_WIDTH).rstrip() for line in textwrap.wrap(labels, PLOT_WIDTH - 4)
    ]
    return [*head, *("".join(row).rstrip() for row in canvas)]


def per_second(samples: Sequence[float]) -> list[float]:
    """Return the rates of a counter between samples, oldest first; NaN for the first one."""
    return [math.nan, *((now - before) / INTERVAL for before, now in pairwise(samples))]


def _at(samples: Sequence[float], x: int) -> float:
    """Return the value at a column of dots, interpolated between two samples."""
    where = x / (ACROSS - 1) * (len(samples) - 1)
    index = int(where)
    before = samples[index]
    after = samples[index + 1] if index + 1 < len(samples) else math.nan
    return before if math.isnan(after) else before + (after - before) * (where - index)


def _dot(canvas: list[list[str]], x: int, y: int) -> None:
    row, column = BOTTOM - y // 4, LEFT + x // 2
    before = ord(canvas[row][column])
    canvas[row][column] = chr(before | _DOTS[x % 2][3 - y % 4])


def _frame(low: float, high: float, minutes: float, suffix: str) -> list[list[str]]:
    """Return a canvas with the frame and the labels of the axes."""
    unit, factor = unit_of(high)
    canvas = [[" "] * WIDTH for _ in range(HEIGHT)]

    def write(row: int, column: int, text: str) -> None:
        canvas[row][column : column + len(text)] = text

    def number(value: float) -> str:
        return f"{value * factor:.1f}{unit}{suffix}"

    write(0, LEFT - 1, "┌" + "─" * PLOT_WIDTH + "┐")
    for row in range(1, BOTTOM + 1):
        write(row, LEFT - 1, "│" + chr(_BLANK) * PLOT_WIDTH + "│")
    for row, value in ((1, high), ((1 + BOTTOM) // 2, (low + high) / 2), (BOTTOM, low)):
        write(row, 0, f"{number(value):>9} ┤")
    write(BOTTOM + 1, LEFT - 1, "└" + "─" * PLOT_WIDTH + "┘")
    middle = LEFT + PLOT_WIDTH // 2
    for column, text, start in (
        (LEFT + 3, f"-{minutes:.0f}min", LEFT),
        (middle, f"-{minutes / 2:.0f}min", middle - 3),
        (WIDTH - 3, "now", WIDTH - 4),
    ):
        write(BOTTOM + 1, column, "┬")
        write(BOTTOM + 2, start, text)
    return canvas
