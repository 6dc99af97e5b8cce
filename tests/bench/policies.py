"""Policies: the cost of one changed object and of one new identity, up to the entries of 100 endpoints.

The peer is a computation of all policies from nothing, in the same rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cells.cluster.identity.identities import Identity
from cells.policy import PolicySettings
from cells.policy.control import RulePolicy
from cells.policy.maps import EndpointPolicy, NodePolicy
from cells.policy.rules import PolicyOptions
from lifecycle import Change
from tests.bench.stats import Figure, Row, Sample

ENDPOINTS = 100
SIZES = ((1, 100), (100, 10_000), (1_000, 10_000))
"""Policies, identities."""
FIRST = 1_000
CHANGES = 50


def measure(folder: Path, rounds: int) -> list[Row | Figure]:
    """Measure both, for each size."""
    del folder
    figures: list[Row | Figure] = []
    for policies, identities in SIZES:
        world = a_world(policies, identities)
        objects, comes, whole = [], [], []
        for turn in range(rounds):
            objects.append(_each(partial(_change, world, policies, identities), turn))
            comes.append(_each(partial(_come_and_go, world, identities), turn))
            began = time.perf_counter()
            a_world(policies, identities)
            whole.append((time.perf_counter() - began) * 1e3)
        size = f"{policies:,} policies, {identities:,} identities"
        peer = "all from nothing"
        rows = (("an object changes", objects), ("an identity comes and goes", comes))
        figures += [
            Row(f"{what}: {size}", "ms", Sample(tuple(found)), peer, Sample(tuple(whole)), None)
            for what, found in rows
        ]
    return figures


def a_world(policies: int, identities: int) -> RulePolicy:
    """Create policies, each for one of 100 endpoints and one of several peers."""
    world = RulePolicy(NodePolicy(PolicySettings()), PolicyOptions())
    world.update_identities(Identity(FIRST + number, _labels(number)) for number in range(identities))
    for number in range(ENDPOINTS):
        world.compute(number + 1, FIRST + number, _labels(number))
    for number in range(policies):
        world.apply(_object(number, number * 7, identities))
    return world


def _each(change: Callable[[int], object], turn: int) -> float:
    """Return the ms of one of many changes."""
    began = time.perf_counter()
    for number in range(CHANGES):
        change(turn * CHANGES + number)
    return (time.perf_counter() - began) / CHANGES * 1e3


def _change(world: RulePolicy, policies: int, identities: int, turn: int) -> None:
    world.apply(_object(turn % policies, turn + 5, identities))


def _come_and_go(world: RulePolicy, identities: int, turn: int) -> None:
    number = FIRST + identities + turn
    world.update_identities([Identity(number, _labels(turn % identities))])
    removed(world, number)


def removed(world: RulePolicy, identity: int) -> list[EndpointPolicy]:
    """Remove one identity and return the changed policies; it is one slice and needs no event loop."""
    try:
        world.follow_identities([Change(identity, None, None, 1)]).send(None)
    except StopIteration as end:
        rows: list[EndpointPolicy] = end.value
        return rows
    raise AssertionError("one identity takes more than a slice")


def _labels(number: int) -> tuple[str, ...]:
    return (
        f"k8s:app=a{number}",
        "k8s:io.cilium.k8s.policy.cluster=default",
        "k8s:io.kubernetes.pod.namespace=shop",
    )


def _object(number: int, peer: int, identities: int) -> dict[str, Any]:
    peers = [{"matchLabels": {"app": f"a{peer % identities}"}}]
    ports = [{"ports": [{"port": "8080", "protocol": "TCP"}]}]
    return {
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": f"p{number}", "namespace": "shop"},
        "spec": {
            "endpointSelector": {"matchLabels": {"app": f"a{number % ENDPOINTS}"}},
            "ingress": [{"fromEndpoints": peers, "toPorts": ports}],
        },
    }
