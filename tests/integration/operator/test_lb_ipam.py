"""LB-IPAM: a service retains its addresses, and one that cannot be shared is assigned once."""

from __future__ import annotations

from functools import partial
from ipaddress import ip_address
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cells.kubernetes.objects.kind import LabelSelector
from cells.operator.lb_ipam.allocation import AllocationRequest, incompatible, plan, request_of
from cells.operator.lb_ipam.pools import AddressPool, Plan, PoolRange, ServicePatch, address_pools
from cells.operator.leader import LeaderHive
from cells.operator.objects import CLUSTER_SERVICES, LOAD_BALANCER_POOLS, ClusterObjects, LoadBalancerPool
from lifecycle import Hive, Table
from lifecycle.testing import eventually
from tests.support.apiserver import ApiServer
from tests.support.apiserver.errors import Resource
from tests.support.examples import scaled
from tests.support.operator import Operators
from tests.support.operator.running import POOL
from tests.support.steps import counted_steps

SERVICES = Resource("", "services")


def pool(name: str, first: str, last: str, **more: Any) -> AddressPool:
    values = {"selector": None, "disabled": False, **more}
    return AddressPool(name, (PoolRange(ip_address(first), ip_address(last)),), **values)


def request(name: str, *has: str, **more: Any) -> AllocationRequest:
    values: dict[str, Any] = {
        "uid": name,
        "labels": {},
        "versions": (4,),
        "wanted": (),
        "sharing": "",
        "across": frozenset(),
        "ports": frozenset({(80, "TCP")}),
        "policy": "Cluster",
        "selector": (),
        **more,
    }
    return AllocationRequest(key=("default", name), has=tuple(map(ip_address, has)), **values)


def given_to(found: Plan) -> dict[str, list[str]]:
    return {key[1]: [str(one) for one in grant.addresses] for key, grant in found.grants.items()}


def test_a_service_that_comes_first_takes_nothing_from_one_that_has_it() -> None:
    found = plan([pool("p", "203.0.113.0", "203.0.113.1")], [request("a"), request("m", "203.0.113.0")])
    assert given_to(found) == {"a": ["203.0.113.1"], "m": ["203.0.113.0"]}


@pytest.mark.parametrize(
    ("sharing", "ports", "addresses"), [("", 1, 4000), ("key{}", 1, 4000), ("key", 1, 4000), ("key", 4000, 1)]
)
def test_thousands_of_services_are_planned_before_a_lease_runs_out(
    sharing: str, ports: int, addresses: int
) -> None:
    """All at once, as on the day that the first pool is made; nothing else runs meanwhile."""
    services = [
        request(str(one), sharing=sharing.format(one), ports=frozenset({(80 + one % ports, "TCP")}))
        for one in range(4000)
    ]
    with counted_steps() as steps:
        found = plan([pool("p", "10.0.0.0", "10.0.255.255")], services)
    assert steps.lines < 400 * len(services)
    assert len({address for one in found.grants.values() for address in one.addresses}) == addresses


@pytest.mark.parametrize("selected", [False, True])
def test_thousands_of_services_of_hundreds_of_pools_are_planned_as_fast(selected: bool) -> None:
    """Neither a pool without a free address nor one that selects others costs each service a look."""

    def small(number: int) -> AddressPool:
        net = f"10.0.{number >> 4}.{(number & 15) << 4}", f"10.0.{number >> 4}.{(number & 15) << 4 | 15}"
        selector = LabelSelector(match_labels={"team": str(number)}) if selected else None
        return replace(pool(f"p{number}", *net), selector=selector)

    pools = [small(number) for number in range(400)]
    services = [replace(request(str(one)), labels={"team": str(one % 400)}) for one in range(4000)]
    with counted_steps() as steps:
        found = plan(pools, services)
        again = plan(pools, [replace(one, has=found.grants[one.key].addresses) for one in services])
    assert steps.lines < 400 * len(services)
    assert given_to(again) == given_to(found)
    assert len({address for one in found.grants.values() for address in one.addresses}) == 4000
    assert set(found.used.values()) == ({10} if selected else {16})


def test_a_port_may_be_shared_by_two_protocols() -> None:
    tcp = request("tcp", sharing="dns", ports=frozenset({(53, "TCP")}))
    udp = request("udp", sharing="dns", ports=frozenset({(53, "UDP")}))
    again = request("again", sharing="dns", ports=frozenset({(53, "UDP")}))
    found = plan([pool("p", "203.0.113.0", "203.0.113.7")], [tcp, udp, again])
    assert given_to(found) == {"tcp": ["203.0.113.0"], "udp": ["203.0.113.0"], "again": ["203.0.113.1"]}


def test_an_address_asked_for_that_cannot_be_shared_is_refused_with_the_reason() -> None:
    wanted = (ip_address("203.0.113.3"),)
    one, other = (request(name, wanted=wanted, sharing="k") for name in ("one", "other"))
    found = plan([pool("p", "203.0.113.0", "203.0.113.7")], [one, other])
    grant = found.grants["default", "other"]
    assert (grant.reason, grant.addresses) == ("already_allocated_incompatible_service", ())
    assert grant.message.endswith("is already allocated to an incompatible service. Reason: same port")


def test_sharing_across_namespaces_needs_both_sides() -> None:
    here = request("here", sharing="k", across=frozenset({"other"}))
    there = replace(request("there", sharing="k", ports=frozenset({(81, "TCP")})), key=("other", "there"))
    assert incompatible(here, there) == "different and not permitted namespace"
    assert incompatible(here, replace(there, across=frozenset({"*"}))) == ""


OTHER_PODS = "compatible ExternalTrafficPolicy local but selecting different set of pods"


@pytest.mark.parametrize(
    ("holder", "asks", "reason", "message"),
    [
        ({}, {}, "already_allocated", "The IP '203.0.113.3' is already allocated to another service"),
        ({"sharing": "k"}, {}, "already_allocated", "to another service"),
        ({}, {"sharing": "k"}, "already_allocated_incompatible_service", "Reason: different sharing key"),
        (
            {"sharing": "k", "policy": "Local"},
            {"sharing": "k"},
            "already_allocated_incompatible_service",
            "Reason: different ExternalTrafficPolicy",
        ),
        (
            {"sharing": "k", "policy": "Local", "selector": (("app", "a"),)},
            {"sharing": "k", "policy": "Local", "selector": (("app", "b"),)},
            "already_allocated_incompatible_service",
            OTHER_PODS,
        ),
        (
            {"sharing": "k", "policy": "Local"},
            {"sharing": "k", "policy": "Local"},
            "already_allocated_incompatible_service",
            OTHER_PODS,
        ),
    ],
)
def test_the_reason_why_an_address_is_not_shared_is_cilium_s(
    holder: dict[str, Any], asks: dict[str, Any], reason: str, message: str
) -> None:
    wanted = (ip_address("203.0.113.3"),)
    first = request("holder", wanted=wanted, **holder)
    second = request("asks", wanted=wanted, ports=frozenset({(81, "TCP")}), **asks)
    grant = plan([pool("p", "203.0.113.0", "203.0.113.7")], [first, second]).grants[second.key]
    assert (grant.reason, grant.addresses) == (reason, ())
    assert grant.message.endswith(message)


def test_a_requested_address_of_a_pool_for_other_services_is_a_selector_mismatch() -> None:
    red = pool("red", "203.0.113.0", "203.0.113.7", selector=LabelSelector(match_labels={"color": "red"}))
    one = request("one", wanted=(ip_address("203.0.113.3"),))
    grant = plan([red], [one]).grants[one.key]
    assert (grant.reason, grant.message) == (
        "pool_selector_mismatch",
        "The pool with the CIDR containing '203.0.113.3', doesn't select this service",
    )
    (disabled,) = plan([replace(red, disabled=True)], [one]).grants.values()
    assert disabled.reason == "no_pool"


def test_reserved_addresses_are_retained_and_not_allocated() -> None:
    net = [ip_address(f"203.0.113.{one}") for one in range(4)]
    reserving = replace(
        pool("p", "203.0.113.0", "203.0.113.3"),
        ranges=(PoolRange(net[0], net[3], frozenset({net[0], net[3]})),),
    )
    asks, keeps = request("asks", wanted=(net[0],)), request("keeps", "203.0.113.3")
    found = plan([reserving], [asks, keeps])
    assert given_to(found) == {"asks": [], "keeps": ["203.0.113.3"]}
    assert found.grants[asks.key].reason == "already_allocated"
    assert (found.used["p"], found.available(reserving)) == (1, 2)


def test_a_service_that_is_no_longer_compatible_moves_away_from_those_that_share_its_address() -> None:
    pools = [pool("p", "203.0.113.0", "203.0.113.7")]
    first = request("first", "203.0.113.0", sharing="other")
    second = request("second", "203.0.113.0", sharing="k", ports=frozenset({(81, "TCP")}))
    found = plan(pools, [first, second], changed={first.key})
    assert given_to(found) == {"first": ["203.0.113.1"], "second": ["203.0.113.0"]}


@pytest.mark.parametrize(
    ("families", "policy", "versions"),
    [
        (("IPv6",), "SingleStack", (6,)),
        (("IPv4", "IPv6"), "PreferDualStack", (4,)),
        (("IPv6", "IPv4"), "RequireDualStack", (4,)),
        (("IPv6", "IPv4"), "", (6,)),
        (None, "", (4,)),
    ],
)
def test_a_single_family_is_requested_even_if_the_cluster_does_not_have_it(
    families: tuple[str, ...] | None, policy: str, versions: tuple[int, ...]
) -> None:
    spec = {"type": "LoadBalancer", "ipFamilies": families, "ipFamilyPolicy": policy}
    found = CLUSTER_SERVICES.convert({"metadata": {"name": "s", "namespace": "default"}, "spec": spec})
    assert request_of(found, [4]).versions == versions


def test_a_pool_in_conflict_puts_no_other_in_conflict() -> None:
    def made(name: str, at: int, *blocks: str) -> LoadBalancerPool:
        metadata = {"name": name, "creationTimestamp": f"2026-01-01T00:00:0{at}Z"}
        return LOAD_BALANCER_POOLS.convert(
            {"metadata": metadata, "spec": {"blocks": [{"cidr": one} for one in blocks]}}
        )

    pools = [made("a", 1, "10.0.0.0/24"), made("b", 2, "10.0.0.0/16"), made("c", 3, "10.0.1.0/24")]
    found, broken = address_pools(reversed(pools))
    assert broken == {}
    assert [(one.name, bool(one.conflict)) for one in found] == [("a", False), ("b", True), ("c", False)]
    assert found[1].conflict.endswith("overlaps range '10.0.0.0 - 10.0.0.255' from IP Pool 'a'")


ASKS = st.lists(
    st.tuples(
        st.sampled_from(["", "x", "y"]),
        st.sampled_from([80, 81]),
        st.sampled_from([(), ("203.0.113.1",), ("203.0.113.9",)]),
        st.sampled_from([(), ("203.0.113.1",), ("203.0.113.2",), ("192.0.2.1",)]),
    ),
    max_size=7,
)


@settings(max_examples=scaled(80), deadline=None)
@given(ASKS)
def test_services_share_an_address_by_sharing_key_and_a_second_plan_changes_nothing(
    asks: list[tuple[str, int, tuple[str, ...], tuple[str, ...]]],
) -> None:
    pools = [pool("p", "203.0.113.0", "203.0.113.2")]
    requests = [
        request(
            f"s{number}",
            *has,
            sharing=sharing,
            ports=frozenset({(port, "TCP")}),
            wanted=tuple(map(ip_address, wanted)),
        )
        for number, (sharing, port, wanted, has) in enumerate(asks)
    ]
    found = plan(pools, requests)
    by_key = {one.key: one for one in requests}
    holders = [(address, by_key[key]) for key, grant in found.grants.items() for address in grant.addresses]
    for number, (address, one) in enumerate(holders):
        assert int(pools[0].ranges[0].first) <= int(address) <= int(pools[0].ranges[0].last)
        for other_address, other in holders[number + 1 :]:
            assert address != other_address or incompatible(one, other) == ""
    again = plan(pools, [replace(one, has=found.grants[one.key].addresses) for one in requests])
    assert given_to(again) == given_to(found)
    assert found.used["p"] == len({address for address, _ in holders}) if holders else True


SHARERS = st.lists(
    st.tuples(
        st.sampled_from(["", "x", "y"]),
        st.sets(st.sampled_from([80, 81, 82]), min_size=1, max_size=2),
        st.sampled_from([(), ("203.0.113.9",), ("203.0.113.1",)]),
        st.sampled_from(["Cluster", "Local"]),
        st.sampled_from([(), ("*",)]),
        st.sampled_from(["a", "b"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=scaled(100), deadline=None)
@given(SHARERS)
def test_a_service_shares_the_first_address_that_it_is_compatible_with(
    asks: list[tuple[str, set[int], tuple[str, ...], str, tuple[str, ...], str]],
) -> None:
    """The last one, beside a look at every holder of every address, in the order they were given."""
    pools = [pool("upper", "203.0.113.8", "203.0.113.15"), pool("lower", "203.0.113.0", "203.0.113.5")]
    requests = [
        replace(
            request(
                f"s{number}",
                sharing=sharing,
                ports=frozenset((port, "TCP") for port in ports),
                wanted=tuple(map(ip_address, wanted)),
                policy=policy,
                across=frozenset(across),
            ),
            key=(namespace, f"s{number}"),
        )
        for number, (sharing, ports, wanted, policy, across, namespace) in enumerate(asks)
    ]
    *earlier, last = requests
    last = replace(last, wanted=())
    holders: dict[Any, list[AllocationRequest]] = {}
    before = plan(pools, earlier)
    for one in earlier:
        for address in before.grants[one.key].addresses:
            holders.setdefault(address, []).append(one)
    compatible = [
        address for address, among in holders.items() if not any(incompatible(last, one) for one in among)
    ]
    (got,) = plan(pools, [*earlier, last]).grants[last.key].addresses or (None,)
    if compatible:
        assert got == compatible[0]
    else:
        assert got not in holders


def service(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"type": "LoadBalancer", "ports": [{"port": 80}], **spec},
    }


@pytest.mark.anyio
async def test_addresses_outlive_restarts_and_another_s_services_are_left_alone(
    server: ApiServer, operators: Operators
) -> None:
    def addresses() -> dict[str, list[str]]:
        found = server.store.of(SERVICES).objects.values()
        listed = {one["metadata"]["name"]: one["status"]["loadBalancer"].get("ingress") for one in found}
        return {name: [one["ip"] for one in ingress] for name, ingress in listed.items() if ingress}

    async with operators.running({**POOL, "enable-l2-announcements": "true"}):
        server.add(
            {
                "apiVersion": "cilium.io/v2alpha1",
                "kind": "CiliumLoadBalancerIPPool",
                "metadata": {"name": "p"},
                "spec": {"blocks": [{"cidr": "203.0.113.0/28"}]},
            }
        )
        server.add(service("m"))
        await eventually(lambda: addresses() == {"m": ["203.0.113.0"]}, 30)
    server.add(service("a"))
    server.add(service("l2", loadBalancerClass="io.cilium/l2-announcer"))
    server.add(service("foreign", loadBalancerClass="example.com/lb"))
    proxied = service("proxied")
    proxied["metadata"]["labels"] = {"service.kubernetes.io/service-proxy-name": "another"}
    server.add(proxied)
    headless = service("headless")
    headless["metadata"]["labels"] = {"service.kubernetes.io/headless": ""}
    server.add(headless)
    async with operators.running({**POOL, "enable-l2-announcements": "true"}):
        wanted = {"m": ["203.0.113.0"], "a": ["203.0.113.1"], "l2": ["203.0.113.2"]}
        await eventually(lambda: addresses() == wanted, 30)
        for name in ("foreign", "proxied", "headless"):
            assert not server.store.of(SERVICES).objects["default", name]["status"].get("conditions")
    async with operators.running({**POOL, "k8s-service-proxy-name": "another"}):
        await eventually(lambda: addresses().get("proxied") is not None, 30)


@pytest.mark.anyio
async def test_without_protocol_differentiation_a_port_of_an_address_is_given_once(
    server: ApiServer, operators: Operators
) -> None:
    def seen(name: str) -> tuple[list[str], str]:
        """The addresses of a service, and the reason of its condition."""
        status = server.store.of(SERVICES).objects["default", name].get("status", {})
        ingress = status.get("loadBalancer", {}).get("ingress") or ()
        reasons = [one["reason"] for one in status.get("conditions") or ()]
        return [one["ip"] for one in ingress], "".join(reasons)

    def answered(name: str) -> bool:
        return seen(name)[1] != ""

    asked = {"lbipam.cilium.io/ips": "203.0.113.0"}
    async with operators.running({**POOL, "bpf-lb-proto-diff": "false"}):
        server.add(
            {
                "apiVersion": "cilium.io/v2alpha1",
                "kind": "CiliumLoadBalancerIPPool",
                "metadata": {"name": "p"},
                "spec": {"blocks": [{"cidr": "203.0.113.0/28"}]},
            }
        )
        for name, port, more in (
            ("tcp", {"port": 53, "protocol": "TCP"}, {}),
            ("udp", {"port": 53, "protocol": "UDP"}, {}),
            ("asks", {"port": 53, "protocol": "SCTP"}, asked),
            ("other", {"port": 80, "protocol": "UDP"}, {}),
        ):
            one = service(name, ports=[port])
            one["metadata"]["annotations"] = {"lbipam.cilium.io/sharing-key": "dns", **more}
            server.add(one)
            await eventually(partial(answered, name), 30)
    assert seen("tcp") == (["203.0.113.0"], "satisfied")
    assert seen("udp") == (["203.0.113.1"], "satisfied")
    assert seen("asks") == ([], "already_allocated_incompatible_service")
    assert seen("other") == (["203.0.113.0"], "satisfied")


@pytest.mark.anyio
async def test_without_the_last_pool_addresses_go_and_other_controllers_may_give_some(
    server: ApiServer, operators: Operators
) -> None:
    """Cilium's LB-IPAM is dormant until there is a pool, also after the last one has been deleted."""
    pools = Resource("cilium.io", "ciliumloadbalancerippools")

    def seen(name: str) -> tuple[list[str], list[str]]:
        """The addresses of a service, and the reasons of its conditions."""
        status = server.store.of(SERVICES).objects["default", name].get("status") or {}
        ingress = (status.get("loadBalancer") or {}).get("ingress") or ()
        return [one["ip"] for one in ingress], [one["reason"] for one in status.get("conditions") or ()]

    def give(name: str, address: str) -> None:
        live = server.store.of(SERVICES).objects["default", name]
        status = {**(live.get("status") or {}), "loadBalancer": {"ingress": [{"ip": address}]}}
        server.store.put(SERVICES, ("default", name), {**live, "status": status})

    def make_pool() -> None:
        spec = {"blocks": [{"cidr": "203.0.113.0/28"}]}
        kind = {"apiVersion": "cilium.io/v2alpha1", "kind": "CiliumLoadBalancerIPPool"}
        server.add({**kind, "metadata": {"name": "p"}, "spec": spec})

    async with operators.running(POOL) as hive:
        make_pool()
        for name in ("one", "two", "three"):
            server.add(service(name))
        names = ("one", "two", "three")
        await eventually(lambda: all(seen(name)[1] == ["satisfied"] for name in names), 30)
        server.store.delete(pools, ("", "p"))
        await eventually(lambda: all(seen(name) == ([], ["no_pool"]) for name in names), 30)
        give("one", "192.0.2.1")
        server.add(service("late"))
        give("late", "192.0.2.2")
        await _passed(hive, server)
        assert seen("one") == (["192.0.2.1"], ["no_pool"])
        assert seen("late") == (["192.0.2.2"], [])
        make_pool()
        await eventually(lambda: all(seen(name)[1] == ["satisfied"] for name in (*names, "late")), 30)


@pytest.mark.anyio
async def test_a_changed_sharing_key_moves_the_service_that_it_is_of(
    server: ApiServer, operators: Operators
) -> None:
    key = "lbipam.cilium.io/sharing-key"

    def addresses() -> dict[str, list[str]]:
        found = server.store.of(SERVICES).objects.values()
        listed = {one["metadata"]["name"]: one["status"]["loadBalancer"].get("ingress") for one in found}
        return {name: [one["ip"] for one in ingress] for name, ingress in listed.items() if ingress}

    async with operators.running(POOL), operators.client() as client:
        spec = {"blocks": [{"cidr": "203.0.113.0/28"}]}
        kind = {"apiVersion": "cilium.io/v2alpha1", "kind": "CiliumLoadBalancerIPPool"}
        server.add({**kind, "metadata": {"name": "p"}, "spec": spec})
        for name, port in (("first", 80), ("second", 81)):
            one = service(name, ports=[{"port": port}])
            one["metadata"]["annotations"] = {key: "k"}
            server.add(one)
        await eventually(lambda: len(addresses()) == 2, 30)
        assert addresses() == {"first": ["203.0.113.0"], "second": ["203.0.113.0"]}
        change = {"metadata": {"annotations": {key: "other"}}}
        await client.patch(CLUSTER_SERVICES, "first", change, "default")
        await eventually(lambda: addresses() == {"first": ["203.0.113.1"], "second": ["203.0.113.0"]}, 30)


async def _passed(hive: Hive, server: ApiServer) -> None:
    """Return when LB-IPAM has seen all services; assert that it has nothing to write."""
    inner = hive.get(LeaderHive).current
    assert inner is not None
    server.add(service("marker", type="ClusterIP"))
    seen = inner.get(ClusterObjects).table(CLUSTER_SERVICES)
    await eventually(lambda: seen.get(("default", "marker")) is not None, 30)
    await anyio.wait_all_tasks_blocked()
    assert not inner.get(Table[tuple[str, str], ServicePatch]).all()
