"""Churn of three times as many identities as numbers: none leaks, numbers are reused late."""

from __future__ import annotations

import gc
from collections import deque

from cells.cluster.identity.identities import Identities, NodeAllocator, identity_table

NUMBERS = range(256, 6_000)
MANY = 20_000
AT_ONCE = 50


def objects() -> int:
    """How many there are that the collector knows."""
    gc.collect()
    return len(gc.get_objects())


def test_numbers_of_this_node_are_used_again_late_and_leave_nothing() -> None:
    known = Identities(identity_table(), NodeAllocator(NUMBERS))
    lowest = len(known.table)
    alive: deque[int] = deque()
    released: dict[int, int] = {}
    soonest, early = MANY, 0
    for turn in range(MANY):
        if turn == MANY // 4:
            early = objects()
        found = known.acquire_now((f"k8s:app={turn}", "k8s:io.kubernetes.pod.namespace=default"))
        assert found is not None
        if found.id in released:
            soonest = min(soonest, turn - released.pop(found.id))
        alive.append(found.id)
        if len(alive) > AT_ONCE:
            vanished = alive.popleft()
            known.release(vanished)
            released[vanished] = turn
    assert soonest >= len(NUMBERS) - AT_ONCE - 1
    assert len(known.table) == lowest + AT_ONCE
    assert objects() - early < 1000
    for number in alive:
        known.release(number)
    assert (len(known.table), len(known.used)) == (lowest, 0)


def test_numbers_that_the_cluster_gives_and_takes_leave_nothing() -> None:
    known = Identities(identity_table(), NodeAllocator(NUMBERS))
    lowest, early = len(known.table), 0
    for turn in range(MANY):
        if turn == MANY // 4:
            early = objects()
        number = NUMBERS.start + turn % len(NUMBERS)
        known.learn(number, (f"k8s:app={turn}",))
        if turn >= AT_ONCE:
            known.forget(NUMBERS.start + (turn - AT_ONCE) % len(NUMBERS))
    assert len(known.table) == lowest + AT_ONCE
    assert objects() - early < 1000
