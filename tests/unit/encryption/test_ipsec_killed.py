"""The agent is killed before each of its changes of XFRM.

No packet leaves in clear text, and the next agent completes the changes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count, product

import pytest

from tests.unit.encryption.esp_pair import FIRST, SECOND, SECRET, EspNode, Pair
from tests.unit.encryption.fakes import FakeXfrm, KilledError

pytestmark = pytest.mark.anyio


async def joined(*, tunnel: bool) -> Pair:
    """Two nodes with a key, which block marked packets before they know each other."""
    pair = Pair(tunnel=tunnel)
    for node in (pair.first, pair.second):
        await node.reconcile({})
        await pair.load(node, FIRST)
    return pair


def clear(pair: Pair) -> list[object]:
    """Return the directions and families in which a marked packet leaves in clear text."""
    found = product(pair.ways(), (3, 4))
    return [(way, spi) for way, spi in found if SECRET in (pair.encrypted(*way, spi) or b"")]


def arrive(pair: Pair, spi: int) -> bool:
    return all(pair.arrives(*way, spi) for way in pair.ways())


async def killed(
    make: Callable[[], Awaitable[Pair]], change: Callable[[Pair], Awaitable[object]]
) -> AsyncIterator[Pair]:
    """Yield pairs with the second node's agent killed before its first change, its second, and so on."""
    for number in count(1):
        pair = await make()
        pair.second.kernel.cut_in = number
        try:
            await change(pair)
        except KilledError:
            pair.second.kernel.cut_in = 0
            yield pair
        else:
            assert number > 1
            return


@pytest.mark.parametrize("tunnel", [False, True])
async def test_a_node_that_is_killed_as_it_joins_sends_nothing_in_clear(tunnel: bool) -> None:
    async def alone() -> Pair:
        pair = Pair(tunnel=tunnel)
        for node in (pair.first, pair.second):
            await node.reconcile({})
        await pair.load(pair.first, FIRST)
        return pair

    async for pair in killed(alone, lambda pair: pair.load(pair.second, FIRST)):
        assert clear(pair) == []
        pair.second.restart()
        await pair.load(pair.second, FIRST)
        assert arrive(pair, 3)


@pytest.mark.parametrize("tunnel", [False, True])
async def test_no_packet_is_lost_to_a_kill_while_keys_are_replaced(tunnel: bool) -> None:
    async def ready() -> Pair:
        return await joined(tunnel=tunnel)

    async for pair in killed(ready, lambda pair: pair.load(pair.second, SECOND)):
        assert arrive(pair, 3), "by the older key, which both have"
        assert clear(pair) == []
        pair.second.restart()
        await pair.load(pair.second, SECOND)
        assert arrive(pair, 3)
        await pair.load(pair.first, SECOND)
        assert arrive(pair, 3)
        assert arrive(pair, 4)


@pytest.mark.parametrize("tunnel", [False, True])
async def test_a_node_that_is_killed_as_another_boots_again_follows_it_later(tunnel: bool) -> None:
    async def booted() -> Pair:
        pair = await joined(tunnel=tunnel)
        pair.first.kernel, pair.first.boot = FakeXfrm(), "33333333-3333-4333-8333-333333333333"
        pair.first.restart()
        await pair.first.reconcile({})
        await pair.load(pair.first, FIRST)
        return pair

    async for pair in killed(booted, lambda pair: pair.reconcile(pair.second)):
        assert clear(pair) == []
        pair.second.restart()
        await pair.load(pair.second, FIRST)
        assert arrive(pair, 3)


@pytest.mark.parametrize("tunnel", [False, True])
async def test_a_node_that_is_killed_as_another_leaves_has_nothing_of_it_later(tunnel: bool) -> None:
    async def ready() -> Pair:
        return await joined(tunnel=tunnel)

    def left(node: EspNode) -> tuple[int, list[bool]]:
        policies = node.kernel.held_policies.values()
        return len(node.kernel.held_states), [one.block for one in policies if one.mark is not None]

    async for pair in killed(ready, lambda pair: pair.second.reconcile({})):
        assert clear(pair) == []
        pair.second.restart()
        pair.second.ring.load(FIRST)
        await pair.second.reconcile({})
        assert clear(pair) == []
        assert left(pair.second) == (0, [True, True])
