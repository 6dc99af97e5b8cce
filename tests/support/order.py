"""The order of tests: unit tests are shuffled by a seed; files of a tier stay together."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

SHUFFLED = ("unit", "integration")
"""Tiers with tests that share no node: they pass in any order."""


def tier_of(nodeid: str) -> str:
    """Return the tier of a test, such as ``unit``."""
    place = nodeid.split("::", maxsplit=1)[0].split("/")
    return place[1] if place[0] == "tests" and len(place) > 2 else place[0]


def shuffled(items: Iterable[pytest.Item], seed: int) -> list[pytest.Item]:
    """Shuffle the files, and the tests of each; tests that share a fixture of a file stay together."""
    chance = random.Random(seed)  # noqa: S311  # an order, no secret
    tiers: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        file = item.nodeid.split("::", maxsplit=1)[0]
        tiers.setdefault(tier_of(file), {}).setdefault(file, []).append(item)
    found: list[pytest.Item] = []
    for tier, files in tiers.items():
        groups = list(files.values())
        if tier in SHUFFLED:
            chance.shuffle(groups)
            for group in groups:
                chance.shuffle(group)
        found += [item for group in groups for item in group]
    return found
