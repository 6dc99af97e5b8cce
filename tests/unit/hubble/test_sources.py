"""Flows and agent events from the agent's tables to the ring."""

from __future__ import annotations

import struct
import subprocess
import sys
from ipaddress import IPv4Address, ip_network
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from msgspec.structs import replace

from cells.cluster.identity.identities import Identity
from cells.cluster.ipcache.rows import IpcacheEntry, Source
from cells.endpoint import Endpoint, State
from cells.hubble.codec import to_json
from cells.hubble.enums import AgentEventType, DebugEventType, FlowVerdict, LostEventSource
from cells.hubble.flow import AgentEvent, DebugEvent, Flow, FlowService, HubbleEvent, LostEvent
from cells.hubble.hubble import HubbleSettings
from cells.hubble.parser import FlowOrigin
from cells.hubble.resolvers import cgroup2_mount, pod_uid
from cells.hubble.sources import origin_of, queue_size
from cells.kubernetes.objects.core import Node, Pod
from cells.kubernetes.objects.kind import DatedMeta, Meta, OwnerReference
from cells.observe.events import (
    LookupRecord,
    Lost,
    Party,
    RequestRecord,
    Sample,
    lookup_sample,
    request_sample,
)
from cells.observe.events import (
    decode as decode_record,
)
from cells.policy.control import PodNetworks, PolicyObject, PolicyView
from cells.policy.labels import network_labels
from cells.policy.rules import RuleSource
from cells.services import Frontend, FrontendKey, ServiceAddress, ServiceName, ServiceType
from cells.services.control import ServedFrontend
from lifecycle import Change
from lifecycle.testing import fake
from tests.support.settings import refused
from tests.unit.hubble.agent import TRACE, Agent
from tests.unit.hubble.recordings import recording
from tests.unit.policy.plain import LABELS, SUBJECT, world_of

ORIGIN = FlowOrigin("node1")


def _endpoint(number: int = 101, name: str = "web-7d4b9c6f5-abcde") -> Endpoint:
    return Endpoint(
        id=number,
        container_id="c",
        container_ifname="eth0",
        ifname="lxc1",
        ifindex=7,
        pod_mac=bytes(6),
        host_mac=bytes(6),
        ipv4=IPv4Address("10.0.0.11"),
        pool="default",
        identity=20001,
        labels=("k8s:app=web",),
        pod_name=name,
        pod_namespace="default",
        pod_uid="u",
        netns_cookie=0,
        state=State.READY,
        created=0.0,
    )


def _change(row: Any, *, key: Any = None, old: Any = None) -> Change[Any, Any]:
    return Change(key if key is not None else getattr(row or old, "id", None), old, row, 1)


def _served(number: int = 4) -> ServedFrontend:
    key = FrontendKey(ServiceAddress(IPv4Address("10.0.1.21"), 53, 17))
    return ServedFrontend(
        number, Frontend(key, ServiceType.CLUSTER_IP, ServiceName("kube-system", "kube-dns"))
    )


def test_a_flow_has_the_names_that_the_agents_tables_have() -> None:
    agent = Agent()
    agent.put(agent.endpoints, _endpoint())
    agent.put(agent.identities, Identity(30001, ("k8s:k8s-app=kube-dns",)))
    pod = IpcacheEntry(
        prefix="10.0.1.21/32",
        identity=30001,
        source=Source.CUSTOM_RESOURCE,
        resource="cep/kube-system/coredns-1",
    )
    agent.put(agent.prefixes, pod)
    owner = OwnerReference(kind="ReplicaSet", name="web-7d4b9c6f5", controller=True)
    labels = {"pod-template-hash": "7d4b9c6f5"}
    meta = Meta("web-7d4b9c6f5-abcde", "default", labels=labels, owner_references=(owner,))
    agent.put(agent.pods, Pod(meta))
    agent.learn("dns.example.com.", "10.0.1.21")
    anyio.run(agent.sources.frontends, [_change(_served(), key=_served().key)])
    agent.sources.process([Sample(1, TRACE)])
    (flow,) = agent.flows()
    assert flow.source is not None
    assert to_json(flow.source) == {
        "ID": 101,
        "identity": 20001,
        "namespace": "default",
        "labels": ["k8s:app=web"],
        "pod_name": "web-7d4b9c6f5-abcde",
        "workloads": [{"name": "web", "kind": "Deployment"}],
    }
    assert flow.destination is not None
    assert (flow.destination.namespace, flow.destination.pod_name) == ("kube-system", "coredns-1")
    assert flow.destination.labels == ("k8s:k8s-app=kube-dns",)
    assert flow.destination_names == ("dns.example.com",)
    assert flow.destination_service == FlowService(name="kube-dns", namespace="kube-system")
    assert flow.node_name == "node1"


def test_flows_keep_the_names_of_their_time_when_tables_change() -> None:
    agent = Agent()
    agent.put(agent.endpoints, _endpoint(name="before"))
    agent.learn("old.example.com.", "10.0.1.21")
    agent.sources.process([Sample(1, TRACE)])
    with agent.endpoints.txn() as rows:
        rows.delete(101)
    agent.put(agent.endpoints, _endpoint(name="after"))
    agent.learn("new.example.com.", "10.0.1.21")
    agent.sources.process([Sample(1, TRACE)])
    first, second = agent.flows()
    assert first.source is not None
    assert second.source is not None
    assert (first.source.pod_name, second.source.pod_name) == ("before", "after")
    assert first.destination_names == ("old.example.com",)
    assert second.destination_names == ("new.example.com", "old.example.com")


def test_policies_are_named_where_networks_select_pods() -> None:
    world, _ = world_of([{"egress": [{"toCIDR": ["192.0.2.0/24"]}]}])
    world.repository.use(replace(world.repository.options, cidr_matches_pods=True))
    around = ip_network("192.0.2.0/24")
    network = Identity((1 << 24) + 99, tuple(map(str, network_labels(around))))
    world.update_identities([network])
    world.compute(101, SUBJECT, LABELS[SUBJECT], ("shop", "cart"))
    networks = fake(PodNetworks, around=lambda address: network if address in around else None)
    agent = Agent(PolicyView(world, networks))
    agent.put(agent.endpoints, _endpoint())

    def named(identity: int, address: str) -> list[str]:
        """Of a verdict about a new connection to a port of an address, by an entry of its identity alone."""
        ends = IPv4Address("10.0.0.11").packed + IPv4Address(address).packed
        packet = bytes(12) + b"\x08\x00" + struct.pack(">BBHHHBBH", 0x45, 0, 40, 1, 0, 64, 6, 0) + ends
        packet += struct.pack(">HHIIBBHHH", 40000, 80, 0, 0, 0x50, 2, 0, 0, 0)
        head = struct.pack("<BBHIIHH", 5, 0, 101, 0, len(packet), len(packet), 1)
        body = struct.pack("<IiHBBB3x", identity, 0, 80, 6, 2 | 1 << 3, 0)
        agent.sources.process([Sample(0, head + body + packet)])
        return [one.name for one in agent.flows()[-1].egress_allowed_by]

    assert named(1002, "192.0.2.1") == ["p0"]
    assert named(1002, "198.51.100.7") == [], "no network around it selects pods"
    assert named(6, "192.0.2.1") == [], "networks select no nodes so"


def test_lookups_of_the_dns_proxy_are_flows() -> None:
    agent = Agent()
    record = LookupRecord(
        answer=False,
        time="2023-11-14T22:13:20.123456Z",
        source=Party("10.0.0.11", 40000, 20001, 101, ("k8s:app=web",)),
        destination=Party("10.0.1.21", 53, 30001),
        protocol=17,
        verdict="Forwarded",
        query="example.com.",
        type=1,
    )
    agent.sources.process([Sample(0, lookup_sample(record))])
    (flow,) = agent.flows()
    assert flow.Summary == "DNS Query example.com. A"
    assert flow.uuid


def test_losses_are_events_of_their_queue() -> None:
    agent = Agent()
    agent.sources.process([Lost(7, 3), Sample(1, TRACE), Lost(2)])
    first, _, second = agent.events()
    assert first == LostEvent(source=LostEventSource.PERF_EVENT_RING_BUFFER, num_events_lost=7, cpu=3)
    assert second == LostEvent(source=LostEventSource.OBSERVER_EVENTS_QUEUE, num_events_lost=2, cpu=0)


@pytest.mark.parametrize(
    ("kinds", "types"),
    [((), [1, 4, 5]), (("drop",), [1]), (("trace", "policy-verdict"), [4, 5]), (("agent",), [])],
)
def test_kinds_of_events_that_are_not_asked_for_are_passed_over(
    kinds: tuple[str, ...], types: list[int]
) -> None:
    agent = Agent(hubble_monitor_events=kinds)
    perf = recording("pipeline")["perf_events"]
    agent.sources.process([Sample(1, bytes.fromhex(perf[name])) for name in ("drop", "trace", "verdict")])
    assert [flow.event_type and flow.event_type.type for flow in agent.flows()] == types


FROM_THE_AGENT = {"l7": "flow 129", "agent": "agent", "agent-unknown": ""}
"""Events that an agent of Cilium hands on in a form of its own, and how the ring shows them."""


def _shown(event: HubbleEvent) -> str:
    if isinstance(event, Flow):
        assert event.event_type is not None
        verdict = FlowVerdict(event.verdict).name
        return f"flow {event.event_type.type}/{event.event_type.sub_type} {verdict}"
    if isinstance(event, LostEvent):
        source = LostEventSource(event.source).name
        return f"lost {source} {event.num_events_lost} cpu {event.cpu or 0}"
    assert isinstance(event, DebugEvent)
    return f"debug {DebugEventType(event.type).name}"


@pytest.mark.parametrize(
    "case",
    [case for case in recording("pipeline")["cases"] if not case["events_before_start"]],
    ids=lambda case: case["name"],
)
def test_records_of_the_datapath_are_in_the_ring_as_recorded(case: dict[str, Any]) -> None:
    agent = Agent(hubble_monitor_events=tuple(case["hubble_monitor_events"] or ()))
    perf = recording("pipeline")["perf_events"]
    agent.sources.process(
        Lost(7, 3) if name == "perf-lost" else Sample(1, bytes.fromhex(perf[name]))
        for name in case["events_after_start"]
        if name not in FROM_THE_AGENT
    )
    own = tuple(prefix for prefix in FROM_THE_AGENT.values() if prefix)
    shown = [each for each in case["ring"] or () if not each.startswith(own)]
    if case["hubble_monitor_events"]:  # Cilium hides losses then; ours are reported whatever is asked for
        shown.append("lost PERF_EVENT_RING_BUFFER 7 cpu 3")
    assert [_shown(event) for event in agent.events()] == shown


def test_endpoints_prefixes_and_services_that_come_and_go_are_agent_events() -> None:
    agent = Agent()
    entry = IpcacheEntry(prefix="10.0.1.0/24", identity=6, source=Source.KUBERNETES, resource="node/n2")

    async def report() -> None:
        await agent.sources.endpoints([_change(_endpoint()), _change(None, key=101, old=_endpoint())])
        await agent.sources.prefixes([_change(entry), _change(None, key=entry.prefix, old=entry)])
        served = _served()
        await agent.sources.frontends([_change(served, key=served.key)])
        await agent.sources.frontends([_change(None, key=served.key, old=served)])

    anyio.run(report)
    events = [event for event in agent.events() if isinstance(event, AgentEvent)]
    assert [AgentEventType(event.type).name for event in events] == [
        "ENDPOINT_CREATED",
        "ENDPOINT_DELETED",
        "IPCACHE_UPSERTED",
        "IPCACHE_DELETED",
        "SERVICE_UPSERTED",
        "SERVICE_DELETED",
    ]
    assert events[0].endpoint_update is not None
    assert events[0].endpoint_update.pod_name == "web-7d4b9c6f5-abcde"
    assert events[5].service_delete is not None
    assert events[5].service_delete.id == 4


def test_a_deleted_policy_is_an_event_with_the_labels_of_its_rules() -> None:
    world, _ = world_of([{"egress": [{"toCIDR": ["192.0.2.0/24"]}]}])
    agent, key = Agent(PolicyView(world, None)), ("CiliumNetworkPolicy", "shop", "p0")
    row = PolicyObject(kind=key[0], namespace=key[1], name=key[2], valid=True, message="")
    unwritten = replace(row, name="other", valid=False, refused=True)

    async def report() -> None:
        await agent.sources.policies([_change(row, key=key), _change(unwritten, key=(*key[:2], "other"))])
        world.repository.delete(RuleSource(*key))
        await agent.sources.policies([_change(None, key=key, old=row)])
        await agent.sources.policies([_change(None, key=(*key[:2], "other"), old=unwritten)])

    anyio.run(report)
    made, deleted = (event for event in agent.events() if isinstance(event, AgentEvent))
    assert made.policy_update is not None
    assert deleted.policy_update is not None
    assert AgentEventType(deleted.type) is AgentEventType.POLICY_DELETED
    assert deleted.policy_update.rule_count == made.policy_update.rule_count == 1
    assert deleted.policy_update.labels == made.policy_update.labels != ()


def test_flows_have_the_labels_of_their_node() -> None:
    agent = Agent()
    node = Node(DatedMeta("node1", labels={"zone": "a"}))
    anyio.run(agent.sources.nodes, [_change(node, key=node.key)])
    agent.sources.process([Sample(1, TRACE)])
    assert agent.flows()[0].node_labels == ("zone=a",)


@pytest.mark.parametrize(("cluster", "name"), [("default", "n1"), ("west", "west/n1")])
def test_a_node_of_another_cluster_than_default_is_named_with_it(cluster: str, name: str) -> None:
    config = SimpleNamespace(cluster_name=cluster, node_name="n1")
    assert origin_of(cast("Any", config)).node_name == name


def test_the_queue_has_a_size_by_processors() -> None:
    assert queue_size(HubbleSettings(hubble_event_queue_size=5)) == 5
    assert 1024 <= queue_size(HubbleSettings()) <= 16384


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"hubble_event_buffer_capacity": 100}, "invalid capacity: must be one less than"),
        ({"hubble_monitor_events": ("nope",)}, "unknown monitor event type: nope"),
        ({"hubble_event_queue_size": -1}, "expected at least 0"),
    ],
)
def test_inconsistent_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    assert text in refused(HubbleSettings, **settings)


@pytest.mark.parametrize(
    ("path", "uid"),
    [
        (
            "/sys/fs/cgroup/kubepods/burstable/pod11111111-2222-3333-4444-555555555555/abc",
            "11111111-2222-3333-4444-555555555555",
        ),
        (
            "/x/kubepods.slice/kubepods-pod11111111_2222_3333_4444_555555555555.slice/cri-abc.scope",
            "11111111-2222-3333-4444-555555555555",
        ),
        ("/system.slice/podman.service", ""),
        ("", ""),
    ],
)
def test_a_control_group_is_of_the_pod_in_its_path(path: str, uid: str) -> None:
    assert pod_uid(path) == uid


def test_the_mount_of_control_groups_is_found() -> None:
    line = "31 23 0:27 / {} rw,relatime - {} none rw"
    mounts = "\n".join([line.format("/sys/fs/cgroup/cpu", "cgroup"), line.format("/run/cg", "cgroup2")])
    assert cgroup2_mount(mounts) == "/run/cg"
    assert cgroup2_mount("") == ""


def test_an_agent_without_hubble_loads_none_of_what_reads_and_serves_events() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, cells.agent; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    heavy = (
        "cells.hubble." + name
        for name in ("observer", "ring", "codec", "parser", "filters", "rpc.grpc", "rpc.services")
    )
    assert not {*heavy, "h2", "hpack", "re2"} & set(done.stdout.split())


def test_past_requests_are_redacted_as_their_flows_are() -> None:
    client, server = Party("10.0.0.11", 40000, 20001, 101), Party("10.0.1.21", 80, 30001)
    request = RequestRecord(
        answer=False,
        time="2026-11-28T08:00:00Z",
        ingress=False,
        source=client,
        destination=server,
        verdict="Forwarded",
        method="GET",
        url="http://user:secret@shop/cart?token=1",
        protocol="HTTP/1.1",
        headers={"Authorization": ["Bearer 1"], "Accept": ["*/*"]},
    )
    plain = replace(request, url="http://shop/cart")

    def held(record: RequestRecord, **settings: Any) -> Any:
        agent = Agent(hubble_monitor_events=("l7",), **settings)
        agent.sources.process([Sample(3, request_sample(record))])
        ring = agent.sources.observer.ring
        found = ring.record(ring.begin)
        assert isinstance(found, Sample)
        assert found.cpu == 3
        return decode_record(found.data)

    assert held(plain) == plain
    assert held(request) == replace(request, url="http://user:HUBBLE_REDACTED@shop/cart?token=1")
    hidden = held(
        request,
        hubble_redact_enabled=True,
        hubble_redact_http_urlquery=True,
        hubble_redact_http_headers_deny=("authorization",),
    )
    assert hidden.url == "http://user:HUBBLE_REDACTED@shop/cart"
    assert hidden.headers == {"Authorization": ["HUBBLE_REDACTED"], "Accept": ["*/*"]}
