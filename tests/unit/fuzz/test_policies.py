"""Damaged policy objects of every kind are accepted or rejected whole; others stay in force."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any, Final

from cells.cluster.identity.identities import Identity
from cells.policy import PolicySettings
from cells.policy.compute import PolicyConflictError
from cells.policy.control import RulePolicy
from cells.policy.maps import NodePolicy
from cells.policy.rules import PolicyError, PolicyOptions
from lifecycle import HiveError
from tests.unit.policy.replay import POLICIES, load, names

CASES: Final = 4000
CORPUS: Final = [one for name in names() for one in load(name).get("objects", ()) if one["kind"] in POLICIES]
ODD: Final[tuple[Any, ...]] = (
    *(
        None,
        True,
        0,
        -1,
        1 << 70,
        1.5,
        "",
        "*",
        "\0",
        "☃",
        "-1",
        "65536",
        "0x50",
        "any:",
        ":",
        "=",
        "a" * 5000,
    ),
    *("10.0.0.0/33", "::/0", "0.0.0.0/0", "(", "[a", "**", "..", "reserved:host", "ANY", "In", "Exists"),
    *([], {}, [None], [[]], {"": ""}, {"matchLabels": {"a": "b"}}, {"matchLabels": None}, [{}], ["a"]),
)
GOOD: Final = {
    "kind": "CiliumNetworkPolicy",
    "metadata": {"name": "good", "namespace": "shop"},
    "spec": {
        "endpointSelector": {},
        "ingress": [{"fromEndpoints": [{}], "toPorts": [{"ports": [{"port": "80", "protocol": "TCP"}]}]}],
    },
}
LABELS: Final = (
    "k8s:app=cart",
    "k8s:io.cilium.k8s.policy.cluster=default",
    "k8s:io.kubernetes.pod.namespace=shop",
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in it but names and namespaces, which the API server sees to."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        if (*path, key) not in {("kind",), ("metadata",), ("apiVersion",)}:
            yield (*path, key)
            yield from places(each, (*path, key))


def damage(random: Random, object_: dict[str, Any]) -> None:
    """Replace a value, take it out, double it, or put another one's there."""
    *way, last = random.choice(list(places(object_)) or [("spec",)])
    holder: Any = object_
    for key in way:
        holder = holder[key]
    match random.randrange(4):
        case 0:
            holder.pop(last, None) if isinstance(holder, dict) else holder.pop(last)
        case 1 if isinstance(holder, list):
            holder.append(deepcopy(holder[last]))
        case 2:
            other = random.choice(CORPUS)
            *away, end = random.choice(list(places(other)) or [("kind",)])
            found: Any = other
            for key in (*away, end):
                found = found[key]
            holder[last] = deepcopy(found)
        case _:
            holder[last] = deepcopy(random.choice(ODD))


def a_node() -> RulePolicy:
    """An endpoint, a peer, and one good policy."""
    world = RulePolicy(NodePolicy(PolicySettings()), PolicyOptions(enable_ipv6=True))
    world.update_identities(
        [Identity(1001, LABELS), Identity(1002, ("k8s:io.kubernetes.pod.namespace=shop",))]
    )
    world.compute(1, 1001, LABELS)
    world.apply(GOOD)
    return world


def test_a_damaged_policy_is_taken_in_or_refused_with_its_path() -> None:
    world, taken, refused = a_node(), 0, 0
    for seed in range(CASES):
        random = Random(seed)  # noqa: S311  (a fixed sequence)
        object_ = deepcopy(random.choice(CORPUS))
        for _ in range(random.randint(1, 3)):
            damage(random, object_)
        before = world.revision
        try:
            world.apply(object_)
        except PolicyError as error:
            refused += 1
            spoken = str(error)
        except Exception as error:
            raise AssertionError(f"{seed}: {json.dumps(object_)[:2000]}") from error
        else:
            taken += 1
            spoken = ""
        assert "\n" not in spoken, seed
        assert not spoken or world.revision == before, seed
        if seed % 200 == 0:  # what has piled up may contradict itself: a clean node
            in_force(world)
            world = a_node()
    assert taken > CASES / 10
    assert refused > CASES / 10


def in_force(world: RulePolicy) -> None:
    """The good policy is, unless rules that were let in cannot hold beside it."""
    try:
        row = world.compute(1, 1001, LABELS)
    except (HiveError, PolicyConflictError):
        return
    assert row.ingress_enforced
