"""Random claims of services, pods and users: the frontend table equals a plain model."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cells.services import (
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    ServiceAddress,
    ServiceName,
    ServiceType,
)
from cells.services.model.claims import Claims, frontends
from cells.services.model.redirect import (
    host_port_name,
    pod_claimant,
    redirect_claimant,
    redirect_name,
)
from tests.support.steps import counted_steps
from tests.unit.fuzz.inputs import bounded

KEYS = [FrontendKey(ServiceAddress(ip_address("10.96.0.1"), port, 6)) for port in (80, 81, 82)]
BACKENDS = [ServiceAddress(ip_address(f"10.0.0.{at}"), 8080, 6) for at in (1, 2, 3)]
POLICY = ServiceName("shop", "near")
OWNERS = {
    ServiceName("shop", "web"): (ServiceType.CLUSTER_IP, ServiceName("shop", "web")),
    ServiceName("shop", "api"): (ServiceType.EXTERNAL_IPS, ServiceName("shop", "api")),
    ServiceName("other", "web"): (ServiceType.LOAD_BALANCER, ServiceName("other", "web")),
    pod_claimant("shop", "web"): (ServiceType.HOST_PORT, host_port_name("shop", "web", 80)),
    redirect_claimant(POLICY): (ServiceType.LOCAL_REDIRECT, redirect_name(POLICY)),
}
MANUAL = (ServiceType.CLUSTER_IP, ServiceName("shop", "web"))
"""A manual frontend may have the name of a service."""

keys, owners = st.sampled_from(KEYS), st.sampled_from(list(OWNERS))
backends = st.lists(st.sampled_from(BACKENDS), unique=True).map(tuple)
steps = st.one_of(
    st.tuples(st.just("replace"), owners, st.dictionaries(keys, backends)),
    st.tuples(st.just("override"), keys, backends | st.none()),
    st.tuples(st.just("clear"), keys, st.none()),
    st.tuples(st.just("state"), st.sampled_from(BACKENDS), st.sampled_from(BackendState)),
)


def frontend(of: tuple[ServiceType, ServiceName], key: FrontendKey, addresses: Any) -> Frontend:
    type_, name = of
    return Frontend(key, type_, name, tuple(Backend(each) for each in addresses))


class Model:
    """All claims and settings; what is served is worked out anew each time."""

    def __init__(self) -> None:
        self.claims: dict[FrontendKey, dict[ServiceName, Frontend]] = {key: {} for key in KEYS}
        self.manual: dict[FrontendKey, Frontend | None] = {}
        self.states: dict[ServiceAddress, BackendState] = {}

    def step(self, what: str, of: Any, value: Any) -> None:
        if what == "replace":
            for key, claims in self.claims.items():
                new = frontend(OWNERS[of], key, value[key]) if key in value else None
                if claims.get(of) == new:
                    continue
                self.manual.pop(key, None)
                if new is None:
                    del claims[of]
                else:
                    claims[of] = new
        elif what == "override":
            self.manual[of] = frontend(MANUAL, of, value) if value is not None else None
        elif what == "clear":
            self.manual.pop(of, None)
        elif any(of in addresses for addresses in self.used()):
            self.states[of] = value
        if what != "state":
            retained = {each for addresses in self.used() for each in addresses}
            self.states = {each: state for each, state in self.states.items() if each in retained}

    def used(self) -> list[list[ServiceAddress]]:
        return [
            [one.address for one in found.backends] for key in KEYS if (found := self.plain(key)) is not None
        ]

    def plain(self, key: FrontendKey) -> Frontend | None:
        return self.manual[key] if key in self.manual else self.first(key)

    def first(self, key: FrontendKey) -> Frontend | None:
        """Cluster addresses before those outside, host ports last, else the oldest."""
        claims = list(self.claims[key].values())
        inside = any(one.type is ServiceType.CLUSTER_IP for one in claims)
        order = [ServiceType.LOCAL_REDIRECT, ServiceType.CLUSTER_IP] if inside else []
        for type_ in order:
            claims.sort(key=lambda one: one.type is not type_)
            if claims[0].type is type_:
                return claims[0]
        last = (ServiceType.LOCAL_REDIRECT, ServiceType.HOST_PORT)
        claims.sort(key=lambda one: last.index(one.type) + 1 if one.type in last else 0)
        return claims[0] if claims else None

    def served(self) -> dict[FrontendKey, Frontend]:
        found = {}
        for key in KEYS:
            if (one := self.plain(key)) is not None:
                shown = [
                    msgspec.structs.replace(each, state=self.states[each.address], manual=True)
                    if each.address in self.states
                    else each
                    for each in one.backends
                ]
                found[key] = msgspec.structs.replace(one, backends=tuple(shown))
        return found

    def contested(self) -> dict[FrontendKey, tuple[ServiceName, ...]]:
        found = {}
        for key, claims in self.claims.items():
            served = self.first(key)
            if served is not None and len(claims) > 1 and served.type is not ServiceType.LOCAL_REDIRECT:
                others = (one.service for one in claims.values() if one is not served)
                found[key] = (served.service, *others)
        return found


def do(claims: Claims, what: str, of: Any, value: Any) -> None:
    match what:
        case "replace":
            claims.replace(of, [frontend(OWNERS[of], key, each) for key, each in value.items()])
        case "override":
            claims.override(of, frontend(MANUAL, of, value) if value is not None else None)
        case "clear":
            claims.clear_override(of)
        case _:
            claims.set_state(of, value)


@bounded(1000)
@given(st.lists(st.lists(steps, max_size=5), max_size=8))
def test_the_table_follows_from_all_claims_whatever_is_changed_together(batches: list[Any]) -> None:
    table = frontends()
    claims, model = Claims(table), Model()
    for batch in batches:
        with claims:
            for step in batch:
                do(claims, *step)
                model.step(*step)
        assert {one.key: one for one in table.all()} == model.served()
        assert claims.contested == model.contested()


@bounded(100)
@given(st.lists(steps, max_size=12))
def test_without_a_block_each_change_appears_at_once(script: list[Any]) -> None:
    table = frontends()
    claims, model = Claims(table), Model()
    for step in script:
        do(claims, *step)
        model.step(*step)
        assert {one.key: one for one in table.all()} == model.served()


@bounded(100)
@given(st.lists(steps, max_size=12), st.lists(steps, max_size=12))
def test_after_a_failure_nothing_stays_that_is_claimed_no_more(before: list[Any], after: list[Any]) -> None:
    table = frontends()
    failed = Claims(table)
    for step in before:
        do(failed, *step)
    claims, model = Claims(table), Model()
    with claims:
        claims.clear()
        for step in after:
            do(claims, *step)
            model.step(*step)
    assert {one.key: one for one in table.all()} == model.served()


def steps_to_claim_again(count: int, *, with_state: bool) -> int:
    """Lines executed until services with ten backends each have claimed their frontends again."""
    claims = Claims(frontends())
    addresses = [ServiceAddress(ip_address("10.0.0.1") + at, 8080, 6) for at in range(10 * count)]
    of = {}
    for number in range(count):
        name = ServiceName("shop", f"web-{number}")
        key = FrontendKey(ServiceAddress(ip_address("10.96.0.1") + number, 80, 6))
        own = addresses[10 * number : 10 * number + 10]
        of[name] = [frontend((ServiceType.CLUSTER_IP, name), key, own)]
        claims.replace(name, of[name])
    if with_state:
        claims.set_state(addresses[-1], BackendState.MAINTENANCE)
    with counted_steps() as steps, claims:
        for name, claimed in of.items():
            claims.replace(name, claimed)
    return steps.lines


def test_a_state_that_was_set_manually_does_not_slow_down_changes_of_other_services() -> None:
    without = steps_to_claim_again(300, with_state=False)
    assert steps_to_claim_again(300, with_state=True) < 2 * without
