"""Figures of interleaved rounds: median, spread, ratio."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure, with a value for each round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median."""
        return median(self.values)

    def __str__(self) -> str:
        return f"{short(self.median)} [{short(min(self.values))} to {short(max(self.values))}]"


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of ours beside the peer's, of the same rounds; ``target`` is on the ratio.

    ``faster`` rows have peer / ours (higher is better), the others ours / peer (lower is better).
    """

    what: str
    unit: str
    ours: Sample
    peer_name: str
    peer: Sample
    target: float | None
    faster: bool = True

    @property
    def ratios(self) -> tuple[float, ...]:
        """Return the ratio of each round: rounds are interleaved, so the machine's drift cancels out."""
        pairs = zip(self.ours.values, self.peer.values, strict=True)
        return tuple(peer / ours if self.faster else ours / peer for ours, peer in pairs)

    @property
    def reached(self) -> bool:
        """Return whether the median ratio reaches the target."""
        ratio = median(self.ratios)
        if self.target is None:
            return True
        return ratio >= self.target if self.faster else ratio <= self.target

    def cells(self) -> tuple[str, ...]:
        """Return the row as text."""
        sign = "≥" if self.faster else "≤"
        ratio = Sample(self.ratios)
        return (
            self.what,
            self.unit,
            str(self.ours),
            self.peer_name,
            str(self.peer),
            f"{ratio.median:.2f} [{min(ratio.values):.2f} to {max(ratio.values):.2f}]",
            "" if self.target is None else f"{sign} {self.target:g}",
            "" if self.target is None else "yes" if self.reached else "NO",
        )


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of ours without a peer; ``target`` is its upper limit."""

    what: str
    unit: str
    ours: Sample
    target: float | None = None

    @property
    def reached(self) -> bool:
        """Return whether the median reaches the target."""
        return self.target is None or self.ours.median <= self.target

    def cells(self) -> tuple[str, ...]:
        """Return the figure as text."""
        aim = ("", "") if self.target is None else (f"≤ {self.target:g}", "yes" if self.reached else "NO")
        return (self.what, self.unit, str(self.ours), "", "", "", *aim)


HEADER = ("figure", "unit", "ours", "peer", "peer's", "ratio", "target", "reached")


def table(rows: Iterable[Row | Figure]) -> str:
    """Return all rows as one aligned table, medians with [lowest to highest] round."""
    lines = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    text.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(text)


def short(value: float) -> str:
    """Format with three significant digits, no exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if value else "0"
