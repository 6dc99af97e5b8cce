"""Two pods on a node that serves clients outside, with a route to every address."""

from __future__ import annotations

import struct
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

from scapy.layers.l2 import Ether
from scapy.packet import Packet

from cells.datapath.generation import load
from cells.datapath.programs import XDP_ENTRIES
from cells.datapath.settings import DatapathSettings
from cells.maps.bpf import test_run
from cells.maps.records.endpoints import LxcKey
from cells.maps.records.flows import NODEPORT_ON, NODEPORT_XDP, DeviceConfig, NodePortConfig
from tests.kernel.datapath.packets import tcp, udp
from tests.kernel.datapath.world import (
    IFINDEX,
    NODE,
    NODE6,
    REDIRECT,
    SHOT,
    Outcome,
    Pod,
    World,
    raw,
)
from tests.kernel.datapath_overlay.recorder import Recorder, Route, recorded_object
from tests.kernel.datapath_services.services import Services

CLIENT = {4: "198.51.100.1", 6: "2001:db8::1"}
SERVICE = {4: "192.168.7.7", 6: "fd00:7::7"}
ELSEWHERE = {4: "10.2.0.{}", 6: "fd00:10:2::{}"}
DIRECT = {4: NODE, 6: NODE6}
NODE_PORT = 30080
CLIENT_MAC, OWN_MAC, HOP = "0a:00:00:00:00:08", "0a:00:00:00:00:09", "0a:00:00:00:00:0a"
SETTINGS = DatapathSettings(enable_sctp=True)
ROUTE = Route(0, IFINDEX, raw(OWN_MAC), raw(HOP))


class NodePortWorld(World):
    """The world with clients outside."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        super().__init__(SETTINGS, recorded_object(), self.recorder.map)
        self.services = Services(self.maps)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.recorder.map.close()

    def reset(self) -> None:
        """Reset; clients outside are served at this node's address."""
        super().reset()
        self.services = Services(self.maps)
        self.maps["hive_devices"].update(struct.pack("<I", IFINDEX), DeviceConfig(raw(OWN_MAC)).pack())
        self.serve_outside()
        self.recorder.nothing(ROUTE)

    def serve_outside(self, flags: int = 0) -> None:
        """Enable service for clients outside; ``flags``: which remote backends answer directly."""
        facts = NodePortConfig(NODEPORT_ON | flags, IPv4Address(NODE), IPv6Address(NODE6))
        self.maps["hive_nodeport"].update(bytes(4), facts.pack())

    @staticmethod
    def moved(pod: Pod, ip: str) -> Pod:
        """Return the pod with another address."""
        return replace(pod, ip6=ip) if ":" in ip else replace(pod, ip=ip)

    def row_of(self, pod: Pod, ip: str) -> tuple[bytes, bytes]:
        """Return key and value of cilium_lxc for an address of the pod."""
        return LxcKey(ip_address(ip)).pack(), pod.address().pack()

    @staticmethod
    def framed(packet: Packet) -> Packet:
        """Return the frame as received by the device."""
        return Ether(src=CLIENT_MAC, dst=OWN_MAC) / packet

    def client_sends(self, packet: Packet) -> Outcome:
        """Receive a packet from outside by the device."""
        return self.device_gets(self.framed(packet))

    def comes_back(self, packet: Packet) -> Outcome:
        """Receive a packet from another node by the device."""
        return self.device_gets(Ether(src=HOP, dst=OWN_MAC) / packet)


XDP_DROP, XDP_PASS, XDP_TX, XDP_REDIRECT = 1, 2, 3, 4


class InDriver(NamedTuple):
    """The result for a packet in the driver."""

    verdict: int
    metadata: int
    """Metadata in front of the packet for the tc program."""
    packet: bytes


class DriverWorld(NodePortWorld):
    """The world with a program in the device's driver, which runs first."""

    def __init__(self) -> None:
        super().__init__()
        data, tables = recorded_object("recorded_xdp"), [*self.maps.values(), self.recorder.map]
        self.driver, _ = load(data, "xdp.o", tables, 7, SETTINGS, programs=XDP_ENTRIES.keys())

    def __exit__(self, *_: object) -> None:
        self.driver.close()
        super().__exit__()

    def serve_outside(self, flags: int = 0) -> None:
        """Enable service for clients outside; ``flags``: which remote backends answer directly."""
        super().serve_outside(flags | NODEPORT_XDP)

    def device_gets(self, packet: Packet | bytes, *, repeat: int = 1) -> Outcome:
        """Run the driver's program, then the tc program on what it passes."""
        before, run = self.counts(), self.in_driver(bytes(packet))
        if run.verdict == XDP_PASS:
            self.recorder.handed(run.metadata)
            try:
                return super().device_gets(run.packet, repeat=repeat)
            finally:
                self.recorder.handed(0)
        counted = {cause: n - before.get(cause, 0) for cause, n in self.counts().items()}
        counted = {cause: n for cause, n in counted.items() if n}
        return Outcome(SHOT if run.verdict == XDP_DROP else REDIRECT, Ether(run.packet), counted)

    def in_driver(self, frame: bytes) -> InDriver:
        """Run the driver's program on the packet."""
        context = struct.pack("<6I", 0, len(frame), 0, IFINDEX, 0, 0)
        run = test_run(self.driver.programs()["hive_xdp"], frame, ctx_in=context)
        data, _, meta = struct.unpack_from("<3I", run.ctx_out)
        metadata = struct.unpack("<I", run.packet[: data - meta])[0] if data > meta else 0
        return InDriver(run.retval, metadata, run.packet[data - meta :])


def segment(kind: str, source: str, destination: str, sport: int, dport: int, flags: str = "S") -> Packet:
    """Return a packet of either protocol."""
    if kind == "tcp":
        return tcp(source, destination, flags, sport=sport, dport=dport)
    return udp(source, destination, sport=sport, dport=dport)
