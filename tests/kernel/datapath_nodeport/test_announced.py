"""ARP replies for announced service addresses, by the device that receives the request."""

from __future__ import annotations

import struct
import time
from ipaddress import IPv4Address

import pytest
from scapy.layers.l2 import ARP, Ether

from cells.maps.records.cluster import AGENT_LIVENESS, L2_RESPONDER_VALUE, L2ResponderKey
from cells.maps.records.flows import DeviceConfig
from tests.kernel.datapath.world import IFINDEX, OK, REDIRECT, raw
from tests.kernel.datapath_nodeport.world import CLIENT, CLIENT_MAC, OWN_MAC, NodePortWorld

VIP = "192.168.7.80"
KEY = L2ResponderKey(IPv4Address(VIP), IFINDEX)
ASKED = ARP(op="who-has", hwsrc=CLIENT_MAC, psrc=CLIENT[4], pdst=VIP)
TO_ALL = "ff:ff:ff:ff:ff:ff"


def announces(world: NodePortWorld, milliseconds: int = 15000, *, silent: float = 0.0) -> None:
    """The agent has announced the address, and was last alive that many seconds ago."""
    row = DeviceConfig(raw(OWN_MAC), announces=milliseconds)
    world.maps["hive_devices"].update(struct.pack("<I", IFINDEX), row.pack())
    world.maps["cilium_l2_responder_v4"].update(KEY.pack(), bytes(8))
    alive = time.monotonic_ns() - int(silent * 1e9)
    world.maps["cilium_runtime_config"].update(struct.pack("<I", AGENT_LIVENESS), struct.pack("<Q", alive))


def answered(world: NodePortWorld) -> int:
    held = world.maps["cilium_l2_responder_v4"].lookup(KEY.pack())
    assert held is not None
    return int(L2_RESPONDER_VALUE.unpack(held)[0])


@pytest.mark.parametrize("to", [TO_ALL, OWN_MAC])
def test_an_arp_request_for_an_announced_address_is_answered_with_the_device_mac(
    world: NodePortWorld, to: str
) -> None:
    announces(world)
    outcome = world.device_gets(Ether(src=CLIENT_MAC, dst=to) / ASKED)
    assert outcome.action == REDIRECT
    reply = outcome.packet
    assert (reply.src, reply.dst) == (OWN_MAC, CLIENT_MAC)
    assert (reply[ARP].op, reply[ARP].hwsrc, reply[ARP].psrc) == (2, OWN_MAC, VIP)
    assert (reply[ARP].hwdst, reply[ARP].pdst) == (CLIENT_MAC, CLIENT[4])
    assert answered(world) == 1


def test_an_arp_probe_for_an_announced_address_is_answered(world: NodePortWorld) -> None:
    """RFC 5227 section 2.1.1: a probe has no sender; the owner of the address answers."""
    announces(world)
    probe = ARP(op="who-has", hwsrc=CLIENT_MAC, psrc="0.0.0.0", pdst=VIP)
    assert world.device_gets(Ether(src=CLIENT_MAC, dst=TO_ALL) / probe).action == REDIRECT


@pytest.mark.parametrize(
    "packet",
    [
        Ether(src=CLIENT_MAC, dst=TO_ALL) / ARP(op="who-has", psrc=CLIENT[4], pdst="192.168.7.81"),
        Ether(src=CLIENT_MAC, dst=TO_ALL) / ARP(op="is-at", psrc=CLIENT[4], pdst=VIP),
        Ether(src=CLIENT_MAC, dst=TO_ALL) / ARP(op="who-has", hwsrc=CLIENT_MAC, psrc=VIP, pdst=VIP),
        Ether(src=CLIENT_MAC, dst="0a:00:00:00:00:77") / ASKED,
        Ether(src=CLIENT_MAC, dst=TO_ALL, type=0x0806) / b"\0\1\10\0\6\4\0\1",
    ],
    ids=[
        "another address",
        "an answer",
        "another node's announcement",
        "to another address",
        "half a question",
    ],
)
def test_other_arp_requests_go_to_the_stack(world: NodePortWorld, packet: Ether) -> None:
    announces(world)
    before = bytes(packet)
    outcome = world.device_gets(packet)
    assert outcome.action == OK
    assert bytes(outcome.packet)[: len(before)] == before
    assert answered(world) == 0


def test_a_node_with_an_agent_silent_past_its_lease_stops_answering_arp(
    world: NodePortWorld,
) -> None:
    question = Ether(src=CLIENT_MAC, dst=TO_ALL) / ASKED
    announces(world, 15000, silent=14)
    assert world.device_gets(question).action == REDIRECT
    announces(world, 15000, silent=16)
    assert world.device_gets(question).action == OK
    announces(world, 0)
    assert world.device_gets(question).action == OK


def test_an_address_is_answered_for_on_its_device_alone(world: NodePortWorld) -> None:
    announces(world)
    world.maps["cilium_l2_responder_v4"].delete(KEY.pack())
    elsewhere = L2ResponderKey(KEY.ip, IFINDEX + 1)
    world.maps["cilium_l2_responder_v4"].update(elsewhere.pack(), bytes(8))
    assert world.device_gets(Ether(src=CLIENT_MAC, dst=TO_ALL) / ASKED).action == OK
