"""Incremental policy updates equal a computation from scratch, after any events."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cells.policy.compute import Entry, Key, Redirect, SelectorPolicy, endpoint_policy, policies
from cells.policy.compute.endpoint_policy import Filter
from cells.policy.compute.policies import ComputedPolicies, Difference, NamedPodPort, SharedPolicyKey
from cells.policy.compute.repository import Repository, RulesChanged
from cells.policy.compute.selector_cache import SelectorCache
from cells.policy.labels import LabelSet
from cells.policy.rules import Direction, PolicyError, PolicyOptions, RuleSource
from cells.policy.rules.peers import TranslationContext
from cells.policy.selectors import Selector
from tests.support.examples import scaled
from tests.unit.policy.replay import POLICIES, load, names

Whole = dict[tuple[Direction, Key], Entry]

GENERATED = [load(name) for name in names() if name.startswith("generated-")]
OBJECTS: list[Any] = [one for case in GENERATED for one in case["objects"] if one["kind"] in POLICIES]
IDENTITIES = {one["id"]: LabelSet.parse(one["labels"]) for case in GENERATED for one in case["identities"]}
NUMBERS = sorted(IDENTITIES)
CART = 20102
TWIN = 29999
"""Another identity with the same labels: what the same rules select is computed once."""
PORTS = frozenset([NamedPodPort("http", 6, 8080)])

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
        self.repository = Repository(TranslationContext(PolicyOptions()))
        self.cache = SelectorCache()
        self.policies = ComputedPolicies(self.repository, self.cache, proxy)
        self.cache.add_identity(CART, IDENTITIES[CART])
        self.cache.add_identity(TWIN, IDENTITIES[CART])
        self.maps: dict[int, Whole] = {1: {}, 2: {}, 3: {}}
        for endpoint, identity in zip(self.maps, (CART, CART, TWIN), strict=True):
            self.policies.assign(endpoint, SharedPolicyKey(identity, PORTS))
            self.maps[endpoint] |= self.policies.entries(endpoint)

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
                    source = RuleSource(object_["kind"], metadata.get("namespace", ""), metadata["name"])
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
        policies.assign(1, SharedPolicyKey(CART, PORTS))
        return None if policies.error(1) else policies.entries(1)


@settings(deadline=None, max_examples=scaled(60))
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


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computations yield after every second rule, filter and selector."""
    for module in (endpoint_policy, endpoint_policy, policies):
        monkeypatch.setattr(module, "STEP", 2)


@settings(deadline=None, max_examples=scaled(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, len(OBJECTS) - 1), min_size=1, max_size=12), steps, st.integers(1, 9))
def test_rules_identities_and_endpoints_may_change_between_the_steps_of_a_batch(
    small_steps: None, batch: list[int], happens: list[tuple[str, int]], every: int
) -> None:
    node = Node()
    changes = []
    for which in batch:
        try:
            changes.append(node.repository.apply(OBJECTS[which]))
        except PolicyError:
            continue
    if not changes:
        return
    waiting = [(what, which) for what, which in happens if (what, which) != ("come", CART)]
    for number, difference in enumerate(node.policies.following(RulesChanged.combined(changes))):
        if difference is not None:
            node.write(difference)
        elif waiting and not number % every:
            node.step(*waiting.pop())
    anew = node.computed_anew()
    if anew is not None:
        assert node.maps[1] == anew
    assert node.maps[1] == node.maps[2]
    for endpoint in node.maps:
        node.policies.delete_endpoint(endpoint)
    assert list(node.cache.selectors) == []


def test_an_endpoint_that_goes_between_the_steps_of_a_batch_leaves_no_selectors(small_steps: None) -> None:
    node = Node()
    changes = [node.repository.apply(one) for one in OBJECTS[:40] if one["kind"] == "CiliumNetworkPolicy"]
    for number, _ in enumerate(node.policies.following(RulesChanged.combined(changes))):
        if number == 3:
            for endpoint in node.maps:
                node.policies.delete_endpoint(endpoint)
    assert list(node.cache.selectors) == []


@pytest.mark.parametrize("peers", ["the same", "one each"])
def test_many_objects_at_once_cost_by_their_number_not_its_square(peers: str) -> None:
    def calls(count: int) -> int:
        """Function calls that a batch of so many objects takes, all of which select both endpoints."""
        node = Node()
        changes = [node.repository.apply(_allows(number, peers)) for number in range(count)]
        made = 0

        def counting(_frame: object, _event: str, _argument: object) -> None:
            nonlocal made
            made += 1

        sys.setprofile(counting)
        try:
            for difference in node.policies.following(RulesChanged.combined(changes)):
                if difference is not None:
                    node.write(difference)
        finally:
            sys.setprofile(None)
        return made

    assert calls(800) < 5 * calls(200)


def test_a_subject_that_many_rules_have_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    node, compared, matches = Node(), [], Selector.matches

    def counted(self: Selector, labels: LabelSet) -> bool:
        compared.append(self)
        return matches(self, labels)

    changed = RulesChanged.combined(
        [node.repository.apply(_allows(number, "the same")) for number in range(100)]
    )
    monkeypatch.setattr(Selector, "matches", counted)
    assert changed.concerns(IDENTITIES[CART])
    assert len(node.repository.selecting(IDENTITIES[CART])) == 100
    assert len(compared) == 2


def _allows(number: int, peers: str) -> dict[str, Any]:
    app = "frontend" if peers == "the same" else f"a{number}"
    return {
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": f"p{number}", "namespace": "shop"},
        "spec": {"endpointSelector": {}, "ingress": [{"fromEndpoints": [{"matchLabels": {"app": app}}]}]},
    }


def test_an_unused_selector_is_removed() -> None:
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
    difference, _ = node.policies.follow_rules(node.repository.apply(second))
    assert "cannot merge conflicting L7 parsers" in difference.error
    node.write(difference)
    assert node.maps[1] == before
