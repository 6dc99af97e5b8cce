"""L2 announcements of service addresses: one node per address, selected by policies and leases."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, ip_interface
from pathlib import Path
from typing import Any

import anyio
import pytest

from cells import kubernetes
from cells.base.labels import AgentNamespace
from cells.config import AgentConfig
from cells.config import shared as service_settings
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.objects.cilium_pools import CILIUM_L2_ANNOUNCEMENTS
from cells.kubernetes.objects.core import SERVICES
from cells.maps.records.cluster import L2ResponderKey
from cells.node.devices import Device
from cells.services import ServiceName, announcements
from cells.services.announcements import L2Announcement, Responder
from cells.services.announcements.elections import Frame, ResponderKernel, announcement
from cells.services.announcements.policies import announceable, candidates, conditions, read_policy
from cells.services.control.tables import refused_addresses
from cells.services.model.claims import EXTERNAL_IPS, RefusedAddress
from lifecycle import BatchError, Hive, StartError, Table, provide, replace, supply
from lifecycle.testing import eventually, fake
from tests.support import chart
from tests.support.apiserver import ADMIN_TOKEN, ApiServer, User
from tests.support.apiserver.errors import Resource
from tests.support.operator import Operators
from tests.support.operator.running import POOL
from tests.support.rights import rights, unused
from tests.unit.kubernetes.cluster import kubeconfig

pytestmark = pytest.mark.anyio

VIP, EXTERNAL = IPv4Address("192.0.2.80"), IPv4Address("192.0.2.90")
ETH0, ETH1 = (
    Device(number, f"eth{number}", "veth", bytes([10, 0, 0, 0, 0, number]), 1500, up=True,
           addresses=(ip_interface(f"192.168.{number}.7/24"),))
    for number in (2, 3)
)  # fmt: skip
DEVICES = (ETH0, ETH1)
NAMESPACE = "kube-system"
LEASE = "cilium-l2announce-shop-web"
TOKEN = "agent-token"  # of the fake API server


def policy(**spec: Any) -> Any:
    body = {"metadata": {"name": "p"}, "spec": {"loadBalancerIPs": True, **spec}}
    return CILIUM_L2_ANNOUNCEMENTS.decoder.decode(json.dumps(body))


def service(
    name: str = "web",
    *,
    ips: tuple[str, ...] = (str(VIP),),
    mode: str | None = None,
    labels: Mapping[str, str] | None = None,
    **spec: Any,
) -> Any:
    body = {
        "metadata": {"name": name, "namespace": "shop", "labels": {"app": name, **(labels or {})}},
        "spec": {"type": "LoadBalancer", **spec},
        "status": {"loadBalancer": {"ingress": [{"ip": ip, "ipMode": mode} for ip in ips]}},
    }
    return SERVICES.decoder.decode(json.dumps(body))


def places(policies: list[Any], *services: Any, labels: Mapping[str, str] | None = None) -> set[str]:
    """What this node may answer for: service, address and device."""
    found = candidates(policies, (one for one in services if announceable(one, "")), labels or {}, DEVICES)
    return {f"{row.service[1]} {place.ip} {place.device}" for row in found.values() for place in row.places}


def test_a_service_of_another_proxy_is_not_announced() -> None:
    for label in ("service.kubernetes.io/headless", "service.kubernetes.io/service-proxy-name"):
        other = service(labels={label: "other"})
        assert places([policy()], other) == set()
    mine = service(labels={"service.kubernetes.io/service-proxy-name": "mine"})
    assert [announceable(mine, proxy) for proxy in ("mine", "another", "")] == [True, False, False]


def test_load_balancer_and_external_ips_are_announced_as_the_policy_selects() -> None:
    web = service(externalIPs=[str(EXTERNAL)])
    both = {f"web {VIP} eth2", f"web {VIP} eth3"}, {f"web {EXTERNAL} eth2", f"web {EXTERNAL} eth3"}
    assert places([policy()], web) == both[0]
    assert places([policy(loadBalancerIPs=False, externalIPs=True)], web) == both[1]
    assert places([policy(externalIPs=True)], web) == both[0] | both[1]
    assert places([policy(loadBalancerIPs=False)], web) == set()
    assert places([], web) == set()


def test_an_address_that_is_refused_is_not_announced() -> None:
    web = service(externalIPs=[str(EXTERNAL), str(VIP)])
    refused = [RefusedAddress(ServiceName("shop", "web"), EXTERNAL, EXTERNAL_IPS, "is an address of node n1")]
    (row,) = candidates([policy(externalIPs=True)], [web], {}, DEVICES, refused).values()
    assert {place.ip for place in row.places} == {VIP}


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ({"interfaces": ["^eth2$"]}, {"eth2"}),
        ({"interfaces": [r"^\Qeth2\E\z", r"\d\pL"]}, {"eth2"}),
        ({"interfaces": ["3", "nothing"]}, {"eth3"}),
        ({"interfaces": ["^th"]}, set()),
        ({"interfaces": []}, {"eth2", "eth3"}),
        ({"nodeSelector": {"matchLabels": {"rack": "1"}}}, {"eth2", "eth3"}),
        ({"nodeSelector": {"matchExpressions": [{"key": "rack", "operator": "DoesNotExist"}]}}, set()),
        ({"serviceSelector": {"matchLabels": {"app": "web"}}}, {"eth2", "eth3"}),
        ({"serviceSelector": {"matchLabels": {"io.kubernetes.service.namespace": "shop"}}}, {"eth2", "eth3"}),
        ({"serviceSelector": {"matchLabels": {"io.kubernetes.service.name": "other"}}}, set()),
    ],
)
def test_nodes_services_and_devices_are_selected(spec: dict[str, Any], found: set[str]) -> None:
    announced = places([policy(**spec)], service(), labels={"rack": "1"})
    assert announced == {f"web {VIP} {device}" for device in found}


def test_services_of_other_classes_and_addresses_of_ipv6_are_left_alone() -> None:
    assert places([policy()], service(loadBalancerClass="example.com/other")) == set()
    assert places([policy()], service(loadBalancerClass="io.cilium/l2-announcer"))
    assert places([policy()], service(ips=("2001:db8::80",))) == set()
    assert places([policy()], service(ips=())) == set()
    assert places([policy()], service(mode="Proxy")) == set()  # the proxy answers for it
    assert places([policy()], service(mode="VIP"))


@pytest.mark.parametrize(
    ("spec", "kind", "text"),
    [
        ({"interfaces": ["eth[0"]}, "io.cilium/bad-interface-regex", "missing closing ]: `[0`"),
        ({"interfaces": ["(?=eth)"]}, "io.cilium/bad-interface-regex", "unsupported Perl syntax: `(?=`"),
        ({"interfaces": ["eth.*+"]}, "io.cilium/bad-interface-regex", "nested repetition operator: `*+`"),
        ({"nodeSelector": {"matchLabels": {"a": "-b"}}}, "io.cilium/bad-node-selector", "value '-b'"),
        ({"nodeSelector": {"matchLabels": {"a b": "b"}}}, "io.cilium/bad-node-selector", "key 'a b'"),
        (
            {"serviceSelector": {"matchExpressions": [{"key": "a", "operator": "In", "values": []}]}},
            "io.cilium/bad-service-selector",
            "can't be empty",
        ),
        (
            {"serviceSelector": {"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["x"]}]}},
            "io.cilium/bad-service-selector",
            "must be empty",
        ),
    ],
)
def test_an_invalid_announcement_policy_has_a_condition_until_corrected(
    spec: dict[str, Any], kind: str, text: str
) -> None:
    bad = policy(**spec)
    assert places([bad], service()) == set()
    _, faults = read_policy(bad)
    reported = conditions(bad, faults, "2026-01-01T00:00:00Z")
    assert reported is not None
    (one,) = reported
    assert (one["type"], one["status"], one["reason"]) == (kind, "True", "error")
    assert text in one["message"]
    body = {"metadata": {"name": "p", "generation": 2}, "spec": {}, "status": {"conditions": reported}}
    held = CILIUM_L2_ANNOUNCEMENTS.decoder.decode(json.dumps(body))
    assert conditions(held, faults, "2026-01-02T00:00:00Z") is None
    mended = conditions(held, {}, "2026-01-03T00:00:00Z")
    assert mended is not None
    assert [(each["status"], each["message"], each["observedGeneration"]) for each in mended] == [
        ("False", "", 2)
    ]
    assert mended[0]["lastTransitionTime"] == "2026-01-03T00:00:00Z"
    assert conditions(policy(), {}, "2026-01-01T00:00:00Z") is None


class FakeKernel:
    """The programs' map, and a network that may be down."""

    def __init__(self) -> None:
        self.keys: dict[L2ResponderKey, int] = {}
        self.announced: list[tuple[str, str]] = []
        self.moments: list[int] = []
        self.down = False

    def held(self) -> list[L2ResponderKey]:
        return list(self.keys)

    def add(self, key: L2ResponderKey) -> bool:
        new = key not in self.keys
        self.keys.setdefault(key, 0)
        return new

    def delete(self, key: L2ResponderKey) -> None:
        self.keys.pop(key, None)

    def alive(self, moment: int) -> None:
        self.moments.append(moment)

    def announce(self, frames: Mapping[L2ResponderKey, Frame]) -> dict[L2ResponderKey, OSError]:
        if self.down:
            return {key: OSError(100, "Network is down") for key in frames}
        self.announced += [(device, str(ip)) for device, ip, _ in frames.values()]
        return {}

    @property
    def addresses(self) -> set[str]:
        return {str(key.ip) for key in self.keys}


async def test_a_failed_l2_announcement_is_retried_and_none_is_sent_twice() -> None:
    kernel = FakeKernel()
    target = Responder(kernel)
    key = L2ResponderKey(VIP, 2)
    row = L2Announcement(VIP, 2, "eth2", "0a:00:00:00:00:02", ("shop/web",))
    kernel.down = True
    with pytest.raises(BatchError) as failed:
        await target.put({key: row})
    assert "192.0.2.80 cannot be announced on eth2" in str(failed.value.failures[key])
    assert not target.matches(row, (await target.observe())[key]), "a sweep finds it wanting"
    kernel.down = False
    await target.put({key: row})
    assert target.matches(row, (await target.observe())[key])
    await target.put({key: row})
    assert kernel.announced == [("eth2", str(VIP))]


async def test_an_address_of_an_earlier_agent_is_announced_again() -> None:
    """Another node may have had it since, and its MAC is in the neighbours' tables."""
    kernel = FakeKernel()
    key = L2ResponderKey(VIP, 2)
    kernel.keys = {key: 7}
    row = L2Announcement(VIP, 2, "eth2", "0a:00:00:00:00:02", ("shop/web",))
    target = Responder(kernel)
    assert not target.matches(row, (await target.observe())[key])
    await target.put({key: row})
    assert kernel.announced == [("eth2", str(VIP))]
    assert target.matches(row, (await target.observe())[key])


def test_the_frame_is_an_announcement() -> None:
    """RFC 5227 section 2.3: sender and target are the address itself."""
    frame = announcement(VIP, bytes.fromhex("0a0000000002"))
    assert frame.hex() == (
        "ffffffffffff0a00000000020806" + "0001080006040001" + "0a0000000002c0000250" + "000000000000c0000250"
    )


# Elections


@asynccontextmanager
async def agent(
    url: str, folder: Path, name: str, kernel: FakeKernel, *, token: str = ADMIN_TOKEN, **more: str
) -> AsyncIterator[Hive]:
    """The announcements of a node, at a fake API server."""
    known = fake(AgentConfig, node_name=name, ipv4=True)

    def devices() -> Table[int, Device]:
        found: Table[int, Device] = Table("devices", key=lambda row: row.ifindex)
        with found.txn() as rows:
            rows.put(ETH0)
        return found

    hive = Hive(
        kubernetes.cell,
        service_settings.cell,
        announcements.cell,
        supply(AgentNamespace(NAMESPACE)),
        replace(AgentConfig, known),
        provide(devices, refused_addresses),
        replace(ResponderKernel, kernel),
        settings={
            "k8s-kubeconfig-path": kubeconfig(folder, url, token),
            "k8s-client-qps": "0",
            "enable-l2-announcements": "true",
            "l2-announcements-lease-duration": "4s",
            "l2-announcements-renew-deadline": "2s",
            "l2-announcements-retry-period": "50ms",
            "agent-liveness-update-interval": "50ms",
            **{key.replace("_", "-"): value for key, value in more.items()},
        },
    )
    async with hive.started():
        yield hive


ALPHA = "cilium.io/v2alpha1"
LEASES, SERVICE = Resource("coordination.k8s.io", "leases"), Resource("", "services")
POLICIES = Resource("cilium.io", "ciliuml2announcementpolicies")
RANGE = "192.0.2.80/32"
OBJECTS: list[dict[str, Any]] = [
    {
        "apiVersion": ALPHA,
        "kind": "CiliumLoadBalancerIPPool",
        "metadata": {"name": "pool"},
        "spec": {"blocks": [{"cidr": RANGE}]},
    },
    {
        "apiVersion": ALPHA,
        "kind": "CiliumL2AnnouncementPolicy",
        "metadata": {"name": "all"},
        "spec": {"loadBalancerIPs": True, "nodeSelector": {"matchLabels": {"edge": "yes"}}},
    },
    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}},
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]},
    },
]


def node(name: str, **labels: str) -> dict[str, Any]:
    kind = {"apiVersion": "cilium.io/v2", "kind": "CiliumNode"}
    return {**kind, "metadata": {"name": name, "labels": labels}, "spec": {}}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    """With an operator that has given the service its address."""
    account = User("system:serviceaccount:kube-system:cilium")
    one = ApiServer({ADMIN_TOKEN: User("admin", ("system:masters",)), TOKEN: account})
    one.crd_delay = 0
    async with one.serving():
        async with Operators(one, tmp_path).running({**POOL, "nodes-gc-interval": "0s"}):
            one.definitions.fresh.clear()  # its storage is ready at once
            for body in (*OBJECTS, node("a", edge="yes"), node("b", edge="yes"), node("inner")):
                one.add(body)
            await eventually(lambda: given(one) == [str(VIP)], 30)
        one.requests.clear()
        yield one


def given(server: ApiServer) -> list[str]:
    found = server.store.get(SERVICE, ("shop", "web")) or {}
    ingress = found.get("status", {}).get("loadBalancer", {}).get("ingress") or []
    return [each["ip"] for each in ingress]


def holder(server: ApiServer) -> str | None:
    found = server.store.get(LEASES, (NAMESPACE, LEASE))
    return found["spec"].get("holderIdentity") if found else None


def url(server: ApiServer) -> str:
    return f"http://127.0.0.1:{server.port}"


async def test_one_selected_node_answers_arp_and_another_takes_over_when_it_stops(
    server: ApiServer, tmp_path: Path
) -> None:
    kernels = {name: FakeKernel() for name in ("a", "b", "inner")}
    ends = {name: anyio.Event() for name in kernels}

    async def run(name: str) -> None:
        async with agent(url(server), tmp_path, name, kernels[name]):
            await ends[name].wait()

    async with anyio.create_task_group() as group:
        for name in kernels:
            group.start_soon(run, name)
        await _takes_over(server, kernels, ends)
        for end in ends.values():
            end.set()


async def _takes_over(
    server: ApiServer, kernels: dict[str, FakeKernel], ends: dict[str, anyio.Event]
) -> None:

    def answering() -> set[str]:
        return {name for name, kernel in kernels.items() if kernel.addresses == {str(VIP)}}

    await eventually(lambda: len(answering()) == 1, 30)
    (first,) = answering()
    (second,) = {"a", "b"} - {first}
    assert holder(server) == first
    await eventually(lambda: kernels[first].announced == [("eth2", str(VIP))])
    await eventually(lambda: kernels[second].moments != [])
    assert kernels[second].keys == {}

    ends[first].set()
    await eventually(lambda: kernels[second].addresses == {str(VIP)}, 30)
    assert kernels[first].moments[-1] == 0, "the programs answer no more: another node may from now on"
    await eventually(lambda: kernels[second].announced == [("eth2", str(VIP))])
    assert holder(server) == second
    assert kernels["inner"].keys == {}


async def test_replaced_times_of_leases_are_logged(
    server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = FakeKernel()
    times = {"l2_announcements_lease_duration": "2s", "l2_announcements_renew_deadline": "5s"}
    async with agent(url(server), tmp_path, "a", kernel, **times):
        await eventually(lambda: holder(server) == "a", 30)
        assert server.store.get(LEASES, (NAMESPACE, LEASE))["spec"]["leaseDurationSeconds"] == 2  # type: ignore[index]
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "cannot have this time" in one]
    assert "deadline" in line


async def test_a_node_that_cannot_renew_its_lease_answers_no_more(server: ApiServer, tmp_path: Path) -> None:
    kernel = FakeKernel()
    async with agent(url(server), tmp_path, "a", kernel):
        await eventually(lambda: kernel.addresses == {str(VIP)}, 30)
        server.store.put(LEASES, (NAMESPACE, LEASE), taken(server, "somebody-else"))
        await eventually(lambda: kernel.keys == {}, 30)
        server.store.put(LEASES, (NAMESPACE, LEASE), taken(server, ""))
        await eventually(lambda: kernel.addresses == {str(VIP)}, 30)
        await eventually(lambda: len(kernel.announced) == 2)


def taken(server: ApiServer, by: str) -> dict[str, Any]:
    live = server.store.get(LEASES, (NAMESPACE, LEASE))
    assert live is not None
    return {**live, "spec": {**live["spec"], "holderIdentity": by}}


async def test_an_address_without_a_matching_policy_releases_its_lease(
    server: ApiServer, tmp_path: Path
) -> None:
    kernel = FakeKernel()
    async with agent(url(server), tmp_path, "a", kernel) as hive:
        await eventually(lambda: kernel.addresses == {str(VIP)}, 30)
        live = server.store.get(POLICIES, ("", "all"))
        assert live is not None
        server.store.put(POLICIES, ("", "all"), {**live, "spec": {"interfaces": ["eth["]}})
        await eventually(lambda: kernel.keys == {}, 30)
        await eventually(lambda: holder(server) == "", 30)

        def condition_types() -> list[str]:
            found = server.store.get(POLICIES, ("", "all")) or {}
            return [one["type"] for one in found.get("status", {}).get("conditions", ())]

        await eventually(lambda: condition_types() == ["io.cilium/bad-interface-regex"], 30)
        await hive.get(announcements.Elections).collect()
        assert holder(server) is None, "nobody needs the lease any more"


async def test_addresses_of_an_earlier_agent_stay_announced_until_their_lease_is_checked(
    server: ApiServer, tmp_path: Path
) -> None:
    kernel = FakeKernel()
    kernel.keys = {L2ResponderKey(VIP, 2): 7, L2ResponderKey(EXTERNAL, 2): 1}
    async with agent(url(server), tmp_path, "a", kernel):
        await eventually(lambda: kernel.addresses == {str(VIP)}, 30)
        await eventually(lambda: kernel.moments != [])
        await eventually(lambda: kernel.announced == [("eth2", str(VIP))])
    assert kernel.keys == {L2ResponderKey(VIP, 2): 7}, "taken over with its count"


def roles(*, announced: bool) -> list[dict[str, Any]]:
    """The agents', as the chart renders them."""
    found = chart.objects({"l2announcements": {"enabled": announced}}).values()
    return [
        one
        for one in found
        if one["apiVersion"].startswith("rbac.") and "operator" not in one["metadata"]["name"]
    ]


async def test_the_chart_s_rights_for_announcements_suffice_and_all_are_used(
    server: ApiServer, tmp_path: Path
) -> None:
    own = roles(announced=True)
    more = set(rights(own)) - set(rights(roles(announced=False)))
    assert len(more) == 6
    for one in own:
        server.add(one)
    kernel = FakeKernel()
    async with agent(url(server), tmp_path, "a", kernel, token=TOKEN) as hive:
        await eventually(lambda: kernel.addresses == {str(VIP)}, 30)
        live = server.store.get(POLICIES, ("", "all"))
        assert live is not None
        server.store.put(POLICIES, ("", "all"), {**live, "spec": {"interfaces": ["eth["]}})
        await eventually(lambda: holder(server) == "", 30)
        await hive.get(announcements.Elections).collect()
        await eventually(lambda: "status" in (server.store.get(POLICIES, ("", "all")) or {}), 30)
        calls = hive.get(KubernetesAPI).calls
        assert calls is not None
        assert {status for _, _, status in calls.returned} & {"401", "403"} == set()
    assert unused(own, server.requests) & more == set()


async def test_without_an_api_server_l2_announcements_degrade_health(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="nodes elect the one that answers by Leases"):
        async with agent(
            "", tmp_path, "a", FakeKernel(), manifests_dir=str(tmp_path), k8s_kubeconfig_path=""
        ):
            pass
