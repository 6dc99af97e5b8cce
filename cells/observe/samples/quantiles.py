"""Quantiles of histograms, and numbers as people read them.

Needs: nothing.   Gives: quantile(), quantiles(), pretty(), unit_of().
Source: Prometheus, histogram_quantile(): within a bucket values are taken to be spread evenly.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

QUANTILES: Final = (0.5, 0.9, 0.99)
_UNITS: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SMALL_UNITS: Final = ((1e-9, "p", 1e12), (1e-6, "n", 1e9), (1e-3, "µ", 1e6), (1.0, "m", 1e3))


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """The value below which `share` of the values lie; 0 without values.

    `counts` are of each bucket alone; the last is the one above all bounds, for which its lower bound is
    reported.
    """
    total = sum(counts)
    if total == 0 or not bounds:
        return 0.0
    wanted = share * total
    edges = pairwise((0.0, *bounds))
    for (low, high), reached, count in zip(edges, accumulate(counts), counts, strict=False):
        if reached >= wanted and count:
            return low + (high - low) * (wanted - (reached - count)) / count
    return bounds[-1]


def quantiles(bounds: Sequence[float], counts: Sequence[int]) -> tuple[float, float, float]:
    """The 50th, 90th and 99th percentile."""
    half, most, nearly_all = (quantile(bounds, counts, share) for share in QUANTILES)
    return half, most, nearly_all


def unit_of(value: float) -> tuple[str, float]:
    """The prefix of a unit that keeps `value` short, and what to multiply by for it."""
    size = abs(value)
    if size == 0.0:
        return "", 1.0
    for least, unit in _UNITS:
        if size > least:
            return unit, 1 / least
    for below, unit, factor in _SMALL_UNITS:
        if size < below:
            return unit, factor
    return "", 1.0


def pretty(value: float, suffix: str = "") -> str:
    """Four digits that tell, with the prefix of a unit: 1.5m, 23.4k."""
    unit, factor = unit_of(value)
    return f"{value * factor:.4g}{unit}{suffix}"
