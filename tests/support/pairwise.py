"""Pairwise testing: few rows of choices in which any two compatible choices occur together at least once.

Why: faults of three settings at once are rare; all combinations are thousands, all pairs a dozen rows.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

Row = Mapping[str, str]
"""One value of each dimension."""
Choice = tuple[str, str]
"""A dimension and its value."""
Pair = frozenset[Choice]
_TRIES = 40
"""Candidates for each row, of which the best is chosen."""


def pairs_of(row: Row) -> set[Pair]:
    """Return all pairs of the row."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def covering(dimensions: Mapping[str, Sequence[str]], seed: int = 1) -> list[Row]:
    """Return rows that cover all pairs; the same for the same dimensions and seed."""
    chance = random.Random(seed)  # noqa: S311  # the same rows each time
    missing = {
        frozenset(((one, a), (other, b)))
        for one, other in combinations(dimensions, 2)
        for a in dimensions[one]
        for b in dimensions[other]
    }
    rows: list[Row] = []
    while missing:
        first = min(missing, key=sorted)
        candidates = [_candidate(dimensions, dict(first), missing, chance) for _ in range(_TRIES)]
        rows.append(max(candidates, key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(rows[-1])
    return rows


def _candidate(
    dimensions: Mapping[str, Sequence[str]], chosen: dict[str, str], missing: set[Pair], chance: random.Random
) -> Row:
    """Complete a row; dimension by dimension, choose the value that covers most missing pairs."""
    left = [name for name in dimensions if name not in chosen]
    chance.shuffle(left)
    for name in left:
        values = list(dimensions[name])
        chance.shuffle(values)
        chosen[name] = max(values, key=lambda value: _met(name, value, chosen, missing))
    return {name: chosen[name] for name in dimensions}


def _met(name: str, value: str, chosen: Mapping[str, str], missing: set[Pair]) -> int:
    return sum(frozenset(((name, value), other)) in missing for other in chosen.items())


def without(row: Row, refused: Collection[str], dimensions: Mapping[str, Sequence[str]]) -> Iterator[Row]:
    """Replace a row in which values of these dimensions exclude each other by several rows.

    In each, one of the dimensions has another value: every pair of the row except the refused ones is in one
    of them.
    """
    for name in sorted(refused):
        values = dimensions[name]
        for step in range(1, len(values)):
            yield {**row, name: values[(values.index(row[name]) + step) % len(values)]}


def rotated(rows: Sequence[Row], commit: str, count: int) -> list[Row]:
    """Choose this number of rows by a commit's hash, so that each is chosen in time."""
    first = int(commit[:12] or "0", 16) % len(rows)
    return [rows[(first + at) % len(rows)] for at in range(min(count, len(rows)))]


def commit() -> str:
    """Return the hash of the checked-out commit; empty outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
