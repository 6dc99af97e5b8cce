"""Egress gateway entries for policies, pods and nodes, as recorded of Cilium's agents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv4Interface, ip_interface
from typing import Any, Final

import anyio
import msgspec
import pytest

from cells.cluster.identity.identities import Identity
from cells.cluster.ipcache.rows import IpcacheEntry, Source
from cells.cluster.nodes.node import ClusterNode, NodeIP
from cells.kubernetes.objects.cilium_endpoint import CILIUM_ENDPOINTS
from cells.kubernetes.objects.cilium_node import CILIUM_NODES
from cells.kubernetes.objects.cilium_policy import CILIUM_EGRESS_GATEWAYS, CiliumEgressGatewayPolicy
from cells.kubernetes.resources import Resources
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import EgressKey, EgressValue
from cells.maps.target import record
from cells.masquerade import Masquerade
from cells.masquerade.egress_gateway import EgressGateways, GatewayDevices, GatewayPods
from cells.masquerade.egress_policies import (
    EgressPolicy,
    GatewayLinks,
    GatewayPod,
    entries,
    gateways,
    read_policy,
)
from cells.node.devices import Device
from cells.node.sysctl import Sysctls
from cells.tunnel.settings import EgressGatewayUse
from lifecycle import Hive, ReadTable, StartError, Table, invoke, module, provide, supply
from lifecycle.testing import eventually
from tests.support.fake_map import SPECS, FakeMap
from tests.support.recordings import recordings

DEVICES: Final = [
    Device(number, name, "veth", bytes(6), 1500, up=True, addresses=tuple(map(ip_interface, addresses)))
    for number, (name, *addresses) in enumerate(
        (
            ("egw1", "192.168.101.1/24", "192.168.101.2/24"),
            ("egw2", "192.168.102.1/24"),
            ("noip0",),
            ("uplink0", "172.16.0.5/24"),
        ),
        start=2,
    )
]
"""Of the namespace that was recorded in."""
LINKS: Final = GatewayLinks(DEVICES, default=5)

NOT_AS_RECORDED: Final = {
    "excluded_same_as_destination": "Cilium alternates between two entries at each reconciliation;"
    " here the excluded CIDR wins",
    "gateway_egressip_v6_seen_from_n2": "Cilium writes and deletes an entry at each reconciliation;"
    " here the gateway drops packets without an egress address",
    "endpoint_no_uid": "objects of an API server have UIDs; our endpoints are identified by name",
    "parse_no_name": "objects of an API server have names",
    "parse_gateway_without_selector": "the API server refuses it, and so does our decoder",
    "node_ip_label_cache_after_change": "Cilium still maps a node's former address to its labels; we do not",
}
"""Recordings of faults of Cilium, or of objects that no API server sends."""


def rows(of: Iterable[Mapping[str, str]]) -> dict[tuple[str, str], tuple[str, str]]:
    """What a map has, by source and network."""
    return {(row["source_ip"], row["destination_cidr"]): (row["egress_ip"], row["gateway_ip"]) for row in of}


class Recorded:
    """The events of a recording, up to one of them."""

    def __init__(self, local: str) -> None:
        self._local = local
        self.policies: dict[str, EgressPolicy] = {}
        self.nodes: dict[str, ClusterNode] = {}
        self.pods: dict[str, list[GatewayPod]] = {}
        self.map: dict[tuple[str, str], tuple[str, str]] = {}
        self.interfaces: set[str] = set()
        self.synced = False

    def take(self, event: Mapping[str, Any]) -> str:
        """An event before a reconciliation; what is wrong with its object."""
        one, raw = event.get("object", {}), json.dumps(event.get("object", {}))
        match event["op"]:
            case "synced":
                self.synced = True
            case "seed_map":
                self.map |= rows([one])
            case "node_upsert":
                self.nodes[one["metadata"]["name"]] = self.node(raw)
            case "node_delete":
                self.nodes.pop(one["metadata"]["name"], None)
            case "endpoint_upsert":
                self.pod(raw, event.get("identity_labels"))
            case "endpoint_delete":
                self.pods.pop(f"{one['metadata'].get('namespace')}/{one['metadata']['name']}", None)
            case "policy_delete":
                self.policies.pop(one["metadata"]["name"], None)
            case "policy_upsert":
                try:
                    found: CiliumEgressGatewayPolicy = CILIUM_EGRESS_GATEWAYS.decoder.decode(raw)
                    self.policies[found.name] = read_policy(found)
                except (ValueError, msgspec.ValidationError) as error:
                    return str(error)
            case other:
                raise AssertionError(other)
        return ""

    def node(self, raw: str) -> ClusterNode:
        found = CILIUM_NODES.decoder.decode(raw)
        source = Source.LOCAL if found.name == self._local else Source.CUSTOM_RESOURCE
        addresses = tuple(NodeIP(each.type, ip_interface(each.ip).ip) for each in found.spec.addresses or ())
        return ClusterNode(
            cluster="kind", name=found.name, source=source, addresses=addresses, labels=found.labels
        )

    def pod(self, raw: str, labels: list[str] | None) -> None:
        found = CILIUM_ENDPOINTS.decoder.decode(raw)
        if labels is None or found.status.networking is None:
            return
        pairs = found.status.networking.addressing or ()
        ips = [IPv4Address(each.ipv4) for each in pairs if each.ipv4]
        node = IPv4Address(found.status.networking.node)
        self.pods["/".join(found.key)] = [GatewayPod(ip, tuple(labels), node) for ip in ips]

    def reconcile(self) -> None:
        if not self.synced:
            return
        chosen = gateways(self.policies.values(), self.nodes.values(), LINKS)
        labels = {
            IPv4Address(int(each.ip)): node.labels
            for node in self.nodes.values()
            for each in node.addresses
            if each.ip.version == 4
        }
        pods = [pod for several in self.pods.values() for pod in several]
        found = entries(self.policies.values(), chosen, pods, labels).values()
        self.map = {
            (str(one.key.source), str(one.key.destination)): (
                str(one.value.egress_ip),
                str(one.value.gateway_ip),
            )
            for one in found
        }
        self.interfaces = {each.interface for each in chosen.values() if each.interface}


def test_entries_are_those_that_were_recorded() -> None:
    folder = recordings("egress")
    names = sorted(path.stem for path in folder.glob("*.json"))
    assert len(names) == 67
    assert set(names) >= NOT_AS_RECORDED.keys()
    wrong: dict[str, object] = {}
    for name in names:
        recording = json.loads((folder / f"{name}.json").read_text())
        recorded = Recorded(recording["local_node"])
        for number, event in enumerate(recording["events"]):
            if event["op"] != "reconcile":
                fault = recorded.take(event)
                if event["op"].startswith("policy") and bool(fault) != bool(event.get("error")):
                    wrong[name] = (number, fault, event.get("error"))
                continue
            recorded.reconcile()
            expected = rows(event.get("map_after") or ())
            if recorded.map != expected:
                wrong[name] = (number, recorded.map, expected)
            loosened = {each.split(".")[3] for each in event.get("sysctls") or ()}
            after = event.get("policies_after") or ()
            here = {each["interface"] for each in after if each["local_node_is_gateway"]}
            if recorded.interfaces != here or not loosened <= recorded.interfaces:
                wrong[name] = (number, recorded.interfaces, here, loosened)
    assert wrong.keys() == NOT_AS_RECORDED.keys(), {
        name: what for name, what in wrong.items() if name not in NOT_AS_RECORDED
    }


def test_pods_of_other_clusters_are_not_selected() -> None:
    ipcache: Table[str, IpcacheEntry] = Table("ipcache", key=lambda row: row.prefix)
    identities: Table[int, Identity] = Table("identities", key=lambda row: row.id)
    nodes: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
    remote = IpcacheEntry(
        prefix="10.9.0.1/32", identity=2 << 16 | 4711, source=Source.CLUSTERMESH, resource="pod-of-b//x"
    )
    own = IpcacheEntry(
        prefix="10.0.2.1/32", identity=4711, source=Source.CUSTOM_RESOURCE, resource="cep/default/a"
    )
    with ipcache.txn() as addresses:
        addresses.put(own)
        addresses.put(remote)
    with identities.txn() as known:
        for identity in (own.identity, remote.identity):
            known.put(Identity(identity, ("k8s:app=a",)))
    selected = GatewayPods(ipcache, identities, nodes).selected([read_policy(object_of())])
    assert [str(pod.address) for pod in selected] == ["10.0.2.1"]


def part(kind: type[object], **attributes: object) -> Any:
    """An object of the class with these attributes alone."""
    found = object.__new__(kind)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


class RecordedSysctls(Sysctls):
    """What is asked of the kernel."""

    def __init__(self) -> None:
        self.retained: dict[str, str] = {}

    def enforce(self, settings: Mapping[str, str]) -> None:
        self.retained |= settings

    def release(self, names: Iterable[str]) -> None:
        for name in names:
            del self.retained[name]


def object_of(**spec: Any) -> CiliumEgressGatewayPolicy:
    whole = {
        "selectors": [{"podSelector": {"matchLabels": {"app": "a"}}}],
        "destinationCIDRs": ["198.51.100.0/24"],
        "egressGateway": {"nodeSelector": {"matchLabels": {"gw": "yes"}}, "interface": "egw1"},
        **spec,
    }
    body = {"metadata": {"name": "leave"}, "spec": whole}
    found: CiliumEgressGatewayPolicy = CILIUM_EGRESS_GATEWAYS.decoder.decode(json.dumps(body))
    return found


@pytest.mark.anyio
async def test_the_map_follows_once_all_is_known_and_what_is_new_comes_before_what_goes() -> None:
    policies: Table[Any, Any] = Table("policies", key=lambda row: row.name)
    pods: Table[str, IpcacheEntry] = Table("ipcache", key=lambda row: row.prefix)
    nodes: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
    identities: Table[int, Identity] = Table("identities", key=lambda row: row.id)
    devices: Table[int, Device] = Table("devices", key=lambda row: row.ifindex)
    first = policies.initializer("reflector")
    known = EgressKey(IPv4Address("10.0.1.11"), IPv4Interface("198.51.100.0/24"))
    stale = EgressKey(IPv4Address("10.0.9.9"), IPv4Interface("198.51.100.0/24"))
    here = ClusterNode(
        cluster="kind",
        name="n1",
        source=Source.LOCAL,
        addresses=(NodeIP("InternalIP", IPv4Address("192.168.1.1")),),
        labels={"gw": "yes"},
    )
    held: FakeMap[EgressKey, EgressValue] = FakeMap(
        SPECS["egress_gateway4"], record(EgressKey), record(EgressValue)
    )
    held.rows[stale] = EgressValue(IPv4Address(0), IPv4Address("192.168.1.9"))
    known_first: tuple[tuple[Table[Any, Any], list[Any]], ...] = (
        (pods, [IpcacheEntry(prefix="10.0.1.11/32", identity=4711, source=Source.LOCAL, resource="ep//1")]),
        (identities, [Identity(4711, ("k8s:app=a",))]),
        (nodes, [here]),
        (devices, DEVICES),
    )
    for table, rows in known_first:
        with table.txn() as txn:
            for row in rows:
                txn.put(row)
    maps = part(Maps, egress_gateway4=held, use=lambda *_: None)
    sysctls = RecordedSysctls()
    hive = Hive(
        module(
            "egress-gateway",
            "As in the agent",
            provide(EgressGateways, GatewayPods, GatewayDevices),
            invoke(EgressGateways),
        ),
        supply(EgressGatewayUse(served=True, every=0.01)),
        supply(maps, Maps),
        supply(part(Resources, table=lambda _: policies)),
        supply(part(Masquerade, ipv4=True)),
        supply(sysctls, Sysctls),
        supply(pods, Table[str, IpcacheEntry]),
        supply(identities, Table[int, Identity]),
        supply(nodes, ReadTable[str, ClusterNode]),
        supply(devices, Table[int, Device]),
    )
    async with hive.started():
        with policies.txn() as txn:
            txn.put(object_of())
        await anyio.wait_all_tasks_blocked()
        assert set(held.rows) == {stale}, "a list that is not complete removes nothing"
        first.done()
        await eventually(lambda: set(held.rows) == {known})
        assert held.rows[known].egress_ip == IPv4Address("192.168.101.1")
        assert [what for what, _ in held.writes] == ["update", "delete"]
        assert sysctls.retained == {"net/ipv4/conf/egw1/rp_filter": "2"}
        with policies.txn() as txn:
            txn.put(object_of(destinationCIDRs=["nowhere"]))
        await eventually(lambda: any("nowhere" in one.message for one in hive.health.snapshot()))
        assert set(held.rows) == {known}, "a change that is none leaves the policy as it was"
        with devices.txn() as rows_of_devices:
            rows_of_devices.delete(2)
        await eventually(lambda: held.rows[known].egress_ip == IPv4Address(0))
        assert sysctls.retained == {}
        held.writes.clear()
        with policies.txn() as txn:
            txn.put(object_of(destinationCIDRs=["198.51.100.7/24"]))
        await eventually(lambda: held.writes)
        written = EgressKey(known.source, IPv4Interface("198.51.100.7/24"))
        assert held.writes == [("update", str(written))], "one entry of the trie, as the policy writes it"
        with policies.txn() as txn:
            txn.delete("leave")
        await eventually(lambda: not held.rows)


@pytest.mark.anyio
async def test_gateways_need_masquerading() -> None:
    hive = Hive(
        provide(EgressGateways, GatewayPods, GatewayDevices),
        invoke(EgressGateways),
        supply(EgressGatewayUse(served=True, every=1)),
        supply(part(Maps, use=lambda *_: None)),
        supply(part(Resources, table=lambda _: Table("policies", key=lambda row: row))),
        supply(part(Masquerade, ipv4=False)),
        supply(RecordedSysctls(), Sysctls),
        supply(Table("ipcache", key=lambda row: row.prefix), Table[str, IpcacheEntry]),
        supply(Table("identities", key=lambda row: row.id), Table[int, Identity]),
        supply(Table("nodes", key=lambda row: row.name), ReadTable[str, ClusterNode]),
        supply(Table("devices", key=lambda row: row.ifindex), Table[int, Device]),
    )
    with pytest.raises(StartError, match="set enable-ipv4=true and enable-ipv4-masquerade=true"):
        async with hive.started():
            pass
