"""Policies kept up to date entry by entry are those computed from nothing, whatever happened in between."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cells.policy.compute import Entry, Key, Redirect, Repository, SelectorCache
from cells.policy.compute.filters import Filter
from cells.policy.compute.policies import ComputedPolicies, Difference, NamedPort, PolicyKey
from cells.policy.compute.selector_policy import SelectorPolicy
from cells.policy.labels import LabelSet
from cells.policy.rules import Direction, PolicyError, PolicyOptions, Source, World
from tests.unit.policy.replay import POLICIES, load, names

Whole = dict[tuple[Direction, Key], Entry]

GENERATED = [load(name) for name in names() if name.startswith("generated-")]
OBJECTS: list[Any] = [one for case in GENERATED for one in case["objects"] if one["kind"] in POLICIES]
IDENTITIES = {one["id"]: LabelSet.parse(one["labels"]) for case in GENERATED for one in case["identities"]}
NUMBERS = sorted(IDENTITIES)
CART = 20102
PORTS = frozenset([NamedPort("http", 6, 8080)])

steps = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), st.integers(0, len(OBJECTS) - 1)),
        st.tuples(st.just("delete"), st.integers(0, len(OBJECTS) - 1)),
        st.tuples(st.just("come"), st.sampled_from(NUMBERS)),
        st.tuples(st.just("go"), st.sampled_from([one for one in NUMBERS if one != CART])),
    ),
    max_size=14,
)


def proxy(filter_: Filter, policy: SelectorPolicy) -> Redirect | None:
    name = policy.listener.name if policy.listener is not None else f"{policy.parser}-{filter_.direction}"
    return Redirect(10000, 10000 + len(name), name)


class Node:
    """Endpoints 1 and 2 share an identity; what their maps hold follows from differences alone."""

    def __init__(self) -> None:
        self.repository = Repository(World(PolicyOptions()))
        self.cache = SelectorCache()
        self.policies = ComputedPolicies(self.repository, self.cache, proxy)
        self.cache.add_identity(CART, IDENTITIES[CART])
        self.maps: dict[int, Whole] = {1: {}, 2: {}}
        for endpoint in self.maps:
            self.write(self.policies.upsert_endpoint(endpoint, PolicyKey(CART, PORTS)))

    def write(self, difference: Difference) -> None:
        for endpoint in difference.endpoints:
            for direction, entries in difference.entries.items():
                for key, entry in entries.items():
                    if entry is None:
                        del self.maps[endpoint][direction, key]
                    else:
                        assert self.maps[endpoint].get((direction, key)) != entry, "written without a change"
                        self.maps[endpoint][direction, key] = entry

    def step(self, what: str, which: int) -> None:
        if what in ("apply", "delete"):
            object_ = OBJECTS[which]
            metadata = object_["metadata"]
            try:
                if what == "apply":
                    changed = self.repository.apply(object_)
                else:
                    source = Source(object_["kind"], metadata.get("namespace", ""), metadata["name"])
                    changed = self.repository.delete(source)
            except PolicyError:
                return
            differences = self.policies.follow_rules(changed)
        elif what == "come":
            differences = self.policies.add_identity(which, IDENTITIES[which])
        else:
            differences = self.policies.remove_identity(which)
        for difference in differences:
            self.write(difference)

    def computed_anew(self) -> Whole | None:
        cache = SelectorCache()
        for identity, labels in self.cache.identities.items():
            cache.add_identity(identity, labels)
        policies = ComputedPolicies(self.repository, cache, proxy)
        difference = policies.upsert_endpoint(1, PolicyKey(CART, PORTS))
        return None if difference.error else policies.entries(1)


@settings(deadline=None, max_examples=60)
@given(steps)
def test_whatever_happens_maps_hold_what_would_be_computed_anew(happens: list[tuple[str, int]]) -> None:
    node = Node()
    for what, which in happens:
        if what == "come" and which == CART:
            continue
        node.step(what, which)
        anew = node.computed_anew()
        if anew is not None:
            assert node.maps[1] == anew
        assert node.maps[1] == node.maps[2]


def test_a_selector_nobody_uses_is_forgotten() -> None:
    node = Node()
    for which in range(len(OBJECTS)):
        node.step("apply", which)
    for which in range(len(OBJECTS)):
        node.step("delete", which)
    for endpoint in node.maps:
        node.policies.delete_endpoint(endpoint)
    assert list(node.cache.selectors) == []


def test_rules_that_cannot_both_hold_leave_the_policy_as_it_was() -> None:
    case = load("l7-conflict-http-kafka")
    node = Node()
    first, second = case["objects"]
    for difference in node.policies.follow_rules(node.repository.apply(first)):
        node.write(difference)
    before = dict(node.maps[1])
    (difference,) = node.policies.follow_rules(node.repository.apply(second))
    assert "cannot merge conflicting L7 parsers" in difference.error
    node.write(difference)
    assert node.maps[1] == before
