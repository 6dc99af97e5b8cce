"""The fake API server answers as a recorded real one, exchange by exchange, except for its words."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.support.counts import Count
from tests.unit.apiserver.replay import Result, Scenario, replay, scenarios

ALL = scenarios()
PLAYED = [one for one in ALL if not one.excluded()]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result]]:
    """Every scenario played, all at the same time: most of them wait for watches to end."""

    async def play() -> dict[str, list[Result]]:
        played = await asyncio.gather(*(_played(one) for one in PLAYED))
        return dict(zip((one.name for one in PLAYED), played, strict=True))

    return asyncio.run(play())


async def _played(scenario: Scenario) -> list[Result]:
    async with asyncio.timeout(100):
        return await replay(scenario)


@pytest.mark.parametrize("name", [one.name for one in PLAYED])
def test_every_exchange_is_answered_as_recorded(results: dict[str, list[Result]], name: str) -> None:
    different = [f"{one.id}: {one.why}" for one in results[name] if one.outcome == "different"]
    assert not different, "\n".join(different)


def test_most_of_what_was_recorded_is_replayed(results: dict[str, list[Result]], count: Count) -> None:
    reasons: Counter[str] = Counter()
    for scenario in ALL:
        if reason := scenario.excluded():
            reasons[reason] += len([one for one in scenario.steps if "request" in one])
    outcomes = Counter(one.outcome for played in results.values() for one in played)
    reasons.update(one.why for played in results.values() for one in played if one.outcome == "excluded")
    total = sum(outcomes.values()) + sum(reasons.values()) - outcomes["excluded"]
    count(
        "recorded exchanges with an API server",
        {"the same": outcomes["same"], **{f"not: {reason}": number for reason, number in reasons.items()}},
    )
    assert outcomes["same"] >= 0.7 * total
