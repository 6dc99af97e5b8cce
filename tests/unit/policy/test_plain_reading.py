"""Policy map entries match a plain reading of the rules: deny wins, then allow."""

from __future__ import annotations

from ipaddress import ip_address
from itertools import product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cells.cluster.identity.identities import Identity
from cells.policy.compute.map_state import lookup
from cells.policy.compute.policies import DIRECTIONS
from cells.policy.labels import network_labels
from tests.support.examples import scaled
from tests.unit.policy.plain import (
    AT,
    EVERYBODY,
    LABELS,
    PACKETS,
    SUBJECT,
    decides,
    identity_of,
    indexed,
    reads,
    specs,
    world_of,
)


@settings(deadline=None, max_examples=scaled(40))
@given(specs, st.sampled_from((True, True, False)))
def test_map_entries_decide_as_the_rules_do(specs: list[dict[str, Any]], may_leave_open: bool) -> None:
    world, prefixes = world_of(specs, may_leave_open=may_leave_open)
    entries = indexed(world.compute(1, SUBJECT, LABELS[SUBJECT], ("shop", "cart")).entries)
    for direction, peer in product(("ingress", "egress"), EVERYBODY):
        identity = identity_of(peer, prefixes)
        for packet in PACKETS:
            wanted = reads(specs, direction, peer, packet, may_leave_open=may_leave_open)
            seen = decides(entries, identity, direction == "egress", packet)
            assert seen == wanted, (direction, peer, identity, packet, specs)


@settings(deadline=None, max_examples=scaled(40))
@given(specs)
def test_networks_select_pods_beside_their_labels_where_that_is_asked_for(
    specs: list[dict[str, Any]],
) -> None:
    world, _ = world_of(specs)
    networks = {prefix: (1 << 25) - 1 - number for number, prefix in enumerate(world.prefixes)}
    world.update_identities(
        Identity(number, tuple(sorted(map(str, network_labels(prefix)))))
        for prefix, number in networks.items()
    )
    world.compute(1, SUBJECT, LABELS[SUBJECT], ("shop", "cart"))
    for direction, (peer, address) in product(DIRECTIONS, AT.items()):
        entries = world.computed.by_identity(1, direction)
        around = [one for one in networks if ip_address(address) in one]
        network = networks[max(around, key=lambda one: one.prefixlen)] if around else 0
        for packet in PACKETS:
            wanted = reads(specs, direction, peer, packet, address=address)
            seen = lookup(entries, peer, *packet, network).allowed
            assert seen == wanted, (direction, peer, address, packet, specs)
