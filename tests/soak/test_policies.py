"""With many rules and identities, real policy maps equal those computed from scratch."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from cells.cluster.identity.identities import Identity
from cells.policy.rules import RuleSource
from tests.bench.policy_maps import FIRST, Node, for_everybody, labels, node, rule

pytestmark = pytest.mark.timeout(3600)

RULES, IDENTITIES, CHURNED, ALIVE = 10_000, 1_000, 50_000, 2_000
EVERYBODYS = 20
"""One in so many has rules in all endpoints' policies; the others in those of their group."""


def test_ten_thousand_rules_come_and_go() -> None:
    with node(0, IDENTITIES) as live:
        for number in range(RULES):
            live.apply(rule(number))
        with node(RULES, IDENTITIES) as anew:
            same(live, anew)
        for number in range(RULES):
            source = RuleSource("CiliumNetworkPolicy", "shop", f"p{number}")
            live.policies.change(live.world.delete(source), "deleted")
        with node(0, IDENTITIES) as anew:
            same(live, anew)


def test_fifty_thousand_identities_come_and_go() -> None:
    random, alive = Random(7), deque[Identity]()  # noqa: S311  (a fixed sequence)
    with node(1_000, IDENTITIES) as live:
        live.apply(for_everybody(1))
        for turn in range(CHURNED):
            number = FIRST + IDENTITIES + turn
            came = Identity(number, labels(random.randrange(IDENTITIES), everybodys=not turn % EVERYBODYS))
            live.add_identity(came)
            alive.append(came)
            if len(alive) > ALIVE:
                live.forget(alive.popleft())
        with node(1_000, IDENTITIES) as anew:
            anew.apply(for_everybody(1))
            for one in alive:
                anew.add_identity(one)
            same(live, anew)


def same(live: Node, anew: Node) -> None:
    """What the kernel has in both."""
    for number, slot in live.maps.slots.items():
        there, wanted = slot.dump(), anew.maps.slots[number].dump()
        assert there.keys() == wanted.keys()
        assert all(entry.same_verdict(wanted[key]) for key, entry in there.items())
