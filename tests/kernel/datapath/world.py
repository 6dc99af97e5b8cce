"""A node made of maps alone: pods, identities and policies for programs without interfaces.

BPF_PROG_TEST_RUN takes the interface's place: it passes a packet in, and returns verdict and packet.
"""

import os
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self

import msgspec
from scapy.layers.l2 import Ether
from scapy.packet import Packet

from cells.datapath.generation import load
from cells.datapath.libbpf import LoadedObject
from cells.datapath.settings import PACKAGED_OBJECTS, DatapathSettings
from cells.maps.bpf import TestRun, test_run
from cells.maps.map import Map, create_map
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.endpoints import EndpointConfig, LxcKey, LxcValue, NodeConfig, PolicyEntry, PolicyKey
from cells.maps.records.flows import CtEntry, CtKey, MetricsKey, MetricsValue
from cells.maps.specs import MapSizes, map_specs, policy_spec
from cells.observe.events import Event

OK, SHOT, REDIRECT = 0, 2, 7
INGRESS, EGRESS = 1, 2
IFINDEX = 1  # what BPF_PROG_TEST_RUN takes packets to come from: lo
WORLD, HOST = 2, 1
_SKB = struct.Struct("<8xI24xI152x")  # the mark and the device it came by, in a struct __sk_buff
_COARSE = 6  # CLOCK_MONOTONIC_COARSE of clock_gettime(2), which Python has no name for


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of this node."""

    id: int
    ip: str
    ip6: str
    identity: int
    mac: str
    host_mac: str
    flags: int = 0

    def config(self) -> EndpointConfig:
        """Return its row in hive_endpoints."""
        macs = raw(self.host_mac), raw(self.mac)
        return EndpointConfig(
            IPv4Address(self.ip), self.id, self.identity, *macs, self.flags, IPv6Address(self.ip6)
        )

    def address(self) -> LxcValue:
        """Return its row in cilium_lxc."""
        return LxcValue(1000 + self.id, self.id, raw(self.mac), raw(self.host_mac), self.identity)


A = Pod(10, "10.1.0.10", "fd00:10:1::10", 1000, "0a:00:00:00:10:01", "0a:00:00:00:10:02")
B = Pod(11, "10.1.0.11", "fd00:10:1::11", 1001, "0a:00:00:00:11:01", "0a:00:00:00:11:02")
ROUTER = "10.1.0.1"
ROUTER6, NODE6, OUTSIDE6 = "fd00:10:1::1", "fd00:7::7", "2001:db8::1"
NODE = "192.168.7.7"
OUTSIDE = "198.51.100.1"
NET_MAC = "0a:00:00:00:00:02"

ALLOW_ALL = ((PolicyKey(0, egress=False), PolicyEntry()), (PolicyKey(0, egress=True), PolicyEntry()))


def now() -> int:
    """Return the programs' time in seconds, from the coarse clock, which is up to a tick behind."""
    return int(time.clock_gettime(_COARSE))


def raw(mac: str) -> bytes:
    """Return the six bytes of a MAC in text form."""
    return bytes.fromhex(mac.replace(":", ""))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for a packet."""

    action: int
    packet: Packet
    counted: dict[tuple[int, int], int] = field(default_factory=dict)
    """Packets counted during the run, by reason and direction."""
    ns: int = 0
    mark: int = 0
    """The packet's mark after the program."""

    @property
    def dropped(self) -> tuple[int, int] | None:
        """Return the reason and direction of the drop, or None."""
        if self.action != SHOT:
            return None
        (cause,) = self.counted
        return cause


Listen = Callable[[], list[Event]]
"""Removes and returns the events since the last call."""


class World:
    """A node with two pods, A and B, allow-all policies and a router address, and networks outside."""

    sizes = MapSizes(ct_tcp=4096, ct_any=4096, policy=256)
    placeholders: frozenset[str] = frozenset()
    """Maps that no cell of the node uses."""

    def __init__(
        self, settings: DatapathSettings | None = None, data: bytes | None = None, *more: Map
    ) -> None:
        """Load the packaged object, or ``data``, with ``more`` maps of its own."""
        self.maps: dict[str, Map] = {}
        for spec in map_specs(self.sizes, preallocate=False, cpus=os.cpu_count() or 1).values():
            spare = spec.name in self.placeholders
            self.maps[spec.name] = create_map(msgspec.structs.replace(spec, max_entries=1) if spare else spec)
        self.policies = {pod.id: create_map(policy_spec(pod.id, 256)) for pod in (A, B)}
        for pod_id, policy in self.policies.items():
            self.maps["hive_policies"].update(struct.pack("<I", pod_id), struct.pack("<I", policy.fd))
        data = data or (PACKAGED_OBJECTS / "datapath.o").read_bytes()
        self.loaded: LoadedObject
        self.loaded, self.constants = load(
            data, "datapath.o", [*self.maps.values(), *more], 7, settings or DatapathSettings()
        )
        self.programs = self.loaded.programs()
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.loaded.close()
        for table in (*self.maps.values(), *self.policies.values()):
            table.close()

    def reset(self) -> None:
        """Remove connections and counts; restore the two pods and their allow-all policies."""
        self.began = now()
        for name in (
            "cilium_ct4_global",
            "cilium_ct_any4_global",
            "cilium_ct6_global",
            "cilium_ct_any6_global",
            "cilium_ipv4_frag_datagrams",
            "cilium_ipv6_frag_datagrams",
            "cilium_metrics",
            "cilium_snat_v4_external",
            "cilium_snat_v6_external",
            "cilium_ipmasq_v4",
            "cilium_ipmasq_v6",
            "hive_devices",
            "cilium_lxc",
            "cilium_ipcache",
            "cilium_tunnel_map",
            "cilium_node_map_v2",
            "cilium_l2_responder_v4",
            "cilium_egress_gw_policy_v4",
            "hive_policy_prefixes",
            *(name for name in self.maps if name.startswith("cilium_lb")),
        ):
            self.maps[name].clear()
        for pod in (A, B):
            for ip in (pod.ip, pod.ip6):
                self.maps["cilium_lxc"].update(LxcKey(ip_address(ip)).pack(), pod.address().pack())
                self.identify(ip, pod.identity)
            link = struct.pack("<I", pod.address().ifindex)
            self.maps["hive_endpoints"].update(link, pod.config().pack())
            self.allow(pod, ALLOW_ALL)
        for ip in (ROUTER, NODE, ROUTER6, NODE6):
            self.maps["cilium_lxc"].update(LxcKey(ip_address(ip)).pack(), LxcValue(flags=1).pack())
            self.identify(ip, HOST)
        self.report()

    def report(self, flags: int = 0, aggregation: int = 0, host_endpoint: int = 0) -> None:
        """Configure which events the programs send, and which endpoint's policy the node has."""
        node = NodeConfig(
            *(IPv4Address(ROUTER), 2, raw("0a:00:00:00:00:01"), 3, raw(NET_MAC), IPv4Network("10.1.0.0/16")),
            *(flags, IPv6Address(ROUTER6), IPv6Network("fd00:10:1::/64"), aggregation, host_endpoint),
        )
        self.maps["hive_node"].update(bytes(4), node.pack())

    def identify(self, network: str, identity: int) -> None:
        """Write the identity of a network to the ipcache."""
        self.maps["cilium_ipcache"].update(
            IpcacheKey.of(ip_network(network)).pack(), IpcacheValue(identity).pack()
        )
        self.bump(0)

    def name_network(self, network: str, number: int) -> None:
        """Add a network that policies select pods by."""
        self.maps["hive_policy_prefixes"].update(
            IpcacheKey.of(ip_network(network)).pack(), struct.pack("<I", number)
        )
        self.bump(0)

    def bump(self, index: int) -> None:
        """Start a new policy epoch of an endpoint, or with 0 of the node."""
        epochs, key = self.maps["hive_epoch"], struct.pack("<I", index)
        (epoch,) = struct.unpack("<Q", epochs.lookup(key) or bytes(8))
        epochs.update(key, struct.pack("<Q", epoch + 1))

    def allow(
        self, pod: Pod, policy: Iterable[tuple[PolicyKey, PolicyEntry]], *, without_epochs: bool = False
    ) -> None:
        """Set the pod's whole policy; with ``without_epochs`` no epoch is advanced."""
        self._write_policy(pod, policy)
        if not without_epochs:
            self.bump(pod.id)

    def _write_policy(self, pod: Pod, policy: Iterable[tuple[PolicyKey, PolicyEntry]]) -> None:
        self.policies[pod.id].clear()
        for key, entry in policy:
            self.policies[pod.id].update(key.pack(), entry.pack(key))

    def policy_use(self, pod: Pod) -> dict[PolicyKey, int]:
        """Return the packets that each entry of the pod's policy decided."""
        return {PolicyKey.unpack(k): PolicyEntry.unpack(v).packets for k, v in self.policies[pod.id].items()}

    def pod_sends(self, pod: Pod, packet: Packet | bytes, *, repeat: int = 1) -> Outcome:
        """Send a packet from the pod on the link that every run uses."""
        self._give_link(pod)
        return self._run("hive_from_pod", packet, repeat)

    def pod_gets(self, pod: Pod | None, packet: Packet | bytes, *, repeat: int = 1, mark: int = 0) -> Outcome:
        """Send a packet to the pod by the host's end of that link; None: the link has no owner."""
        self._give_link(pod)
        return self._run("hive_to_pod", packet, repeat, mark)

    def _give_link(self, pod: Pod | None) -> None:
        """Make the link the pod's, or remove its owner."""
        key, links = struct.pack("<I", IFINDEX), self.maps["hive_endpoints"]
        row = pod.config().pack() if pod is not None else None
        if row == links.lookup(key):
            return
        if row is None:
            links.delete(key)
        else:
            links.update(key, row)
        for each in (A, B):
            self.bump(each.id)

    def host_sends(
        self, packet: Packet | bytes, *, repeat: int = 1, mark: int = 0, device: int = 0
    ) -> Outcome:
        """Send a packet from the host through cilium_host, or one received from ``device``."""
        return self._run("hive_from_host", packet, repeat, mark, device)

    def reaches_host(self, packet: Packet) -> Outcome:
        """Receive a packet on cilium_host or cilium_net."""
        return self._run("hive_to_host", packet, 1)

    def device_sends(self, packet: Packet | bytes, *, repeat: int = 1) -> Outcome:
        """Send a packet from the node by the device that every run uses."""
        return self._run("hive_to_device", packet, repeat)

    def device_gets(self, packet: Packet | bytes, *, repeat: int = 1) -> Outcome:
        """Receive a packet from that device."""
        return self._run("hive_from_device", packet, repeat)

    def _run(
        self, program: str, packet: Packet | bytes, repeat: int, mark: int = 0, device: int = 0
    ) -> Outcome:
        before = self.counts()
        given = _SKB.pack(mark, device)
        run: TestRun = test_run(self.programs[program], bytes(packet), repeat=repeat, ctx_in=given)
        counted = {cause: n - before.get(cause, 0) for cause, n in self.counts().items()}
        counted = {cause: n for cause, n in counted.items() if n}
        mark, _ = _SKB.unpack(run.ctx_out[: _SKB.size])
        return Outcome(run.retval, Ether(run.packet), counted, run.duration_ns, mark)

    def counts(self) -> dict[tuple[int, int], int]:
        """Return the packets in cilium_metrics, by reason and direction."""
        rows = {MetricsKey.unpack(k): MetricsValue.unpack(v) for k, v in self.maps["cilium_metrics"].items()}
        return {(key.reason, key.direction): value.packets for key, value in rows.items()}

    def connections(self, *, tcp: bool = True, version: int = 4) -> dict[CtKey, CtEntry]:
        """Return the conntrack entries."""
        table = self.maps[f"cilium_ct{version}_global" if tcp else f"cilium_ct_any{version}_global"]
        return {CtKey.unpack(k): CtEntry.unpack(v) for k, v in table.items()}

    def age(self, seconds: int) -> None:
        """Move the times of every conntrack entry back; all other fields stay."""
        for name in (
            "cilium_ct4_global",
            "cilium_ct_any4_global",
            "cilium_ct6_global",
            "cilium_ct_any6_global",
        ):
            table = self.maps[name]
            for key, value in list(table.items()):
                entry = CtEntry.unpack(value)
                older = max(entry.lifetime - seconds, 0)
                table.update(key, msgspec.structs.replace(entry, lifetime=older).pack())
