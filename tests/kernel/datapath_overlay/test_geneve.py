"""The tunnel as Geneve (RFC 8926): tunnel keys that programs set and read, as packets.

The device is a fake, as the kernel may lack one: it encapsulates and decapsulates frames as the kernel does
by each packet's tunnel key.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from scapy.contrib.geneve import GENEVE
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from cells.tunnel.settings import PORTS, TunnelSettings
from tests.kernel.datapath.packets import from_pod, ip, udp
from tests.kernel.datapath.world import EGRESS, NODE, OK, REDIRECT, A, Pod
from tests.kernel.datapath_overlay.recorder import Redirected, Tunnelled
from tests.kernel.datapath_overlay.world import (
    IFINDEX,
    OTHER_NODE,
    OTHER_NODE6,
    OWN6,
    REMOTE,
    REMOTE6,
    REMOTE_IDENTITY,
    STRANGER,
    OverlayWorld,
)

pytestmark = pytest.mark.kernel

PORT = PORTS["geneve"]
TRANSPARENT_ETHERNET = 0x6558
INNER = pytest.mark.parametrize(
    ("pod", "other"), [(A.ip, REMOTE), (A.ip6, REMOTE6)], ids=["ipv4 inside", "ipv6 inside"]
)
UNDERLAY = pytest.mark.parametrize("underlay", ["ipv4", "ipv6"])


def encapsulate(frame: bytes, key: Tunnelled, own: str) -> bytes:
    """What the device sends of a frame with this key."""
    outer = (IPv6 if key.remote.version == 6 else IP)(src=str(key.local or own), dst=str(key.remote))
    udp_header = UDP(sport=50000, dport=PORT)
    return bytes(outer / udp_header / GENEVE(vni=key.vni, proto=TRANSPARENT_ETHERNET) / Raw(frame))


def decapsulate(packet: bytes) -> tuple[str, int, bytes]:
    """The sender outside, the network identifier and the frame that the device takes out of a packet."""
    outer = (IPv6 if packet[0] >> 4 == 6 else IP)(packet)
    geneve = outer[GENEVE]
    assert (outer[UDP].dport, geneve.version, geneve.proto) == (PORT, 0, TRANSPARENT_ETHERNET)
    assert not geneve.critical
    assert not geneve.optionlen
    return outer.src, geneve.vni, bytes(geneve.payload)


@pytest.fixture
def geneve(overlay: OverlayWorld, underlay: str) -> OverlayWorld:
    """The node's tunnel has Geneve's port, over either family."""
    overlay.set_tunnel(on=True, port=PORT)
    if underlay == "ipv6":
        overlay.over_ipv6(port=PORT)
    return overlay


def sent_by(world: OverlayWorld, pod: Pod, frame: bytes, underlay: str) -> bytes:
    """The packet that leaves the node."""
    world.recorder.nothing()
    done = world.pod_sends(pod, frame)
    assert (done.action, world.recorder.redirected) == (REDIRECT, Redirected(IFINDEX, 0))
    key = world.recorder.tunnelled
    assert key is not None
    return encapsulate(bytes(done.packet), key, OWN6 if underlay == "ipv6" else NODE)


@UNDERLAY
@INNER
def test_a_pods_packet_leaves_as_its_sender_and_fits_the_network(
    geneve: OverlayWorld, underlay: str, pod: str, other: str
) -> None:
    settings = TunnelSettings(tunnel_protocol="geneve", underlay_protocol=underlay)  # type: ignore[arg-type]
    longest = 1500 - settings.overhead
    header = ip(pod, other) / UDP(sport=40000, dport=53)
    frame = bytes(from_pod(A) / header / Raw(bytes(longest - len(header))))
    for _ in range(2):  # the first is evaluated, later ones are remembered
        packet = sent_by(geneve, A, frame, underlay)
        assert len(packet) == 1500
        source, vni, inside = decapsulate(packet)
        assert (source, vni, inside) == (OWN6 if underlay == "ipv6" else NODE, A.identity, frame)
        destination = (IPv6 if underlay == "ipv6" else IP)(packet).dst
        assert destination == (OTHER_NODE6 if underlay == "ipv6" else OTHER_NODE)


@UNDERLAY
@INNER
def test_another_nodes_packet_is_delivered_as_from_the_pod_and_answered(
    geneve: OverlayWorld, underlay: str, pod: str, other: str
) -> None:
    geneve.allow(A, [(PolicyKey(REMOTE_IDENTITY, egress=False), PolicyEntry())])
    own, node = (OWN6, OTHER_NODE6) if underlay == "ipv6" else (NODE, OTHER_NODE)
    key = Tunnelled(REMOTE_IDENTITY, (IPv6Address if ":" in own else IPv4Address)(own), 64, 28, 0)
    frame = bytes(Ether(src="0e:00:00:00:00:01", dst="0e:00:00:00:00:02") / udp(other, pod, sport=53))
    source, vni, inside = decapsulate(encapsulate(frame, key, node))
    done = geneve.tunnel_brings(inside, vni=vni, node=source)
    assert (done.action, done.packet.dst) == (REDIRECT, A.mac)
    stranger = decapsulate(encapsulate(frame, key._replace(local=None), STRANGER if "." in own else "::66"))
    assert geneve.tunnel_brings(inside, vni=vni, node=stranger[0]).dropped is not None
    answer = bytes(from_pod(A) / udp(pod, other, sport=53, dport=53))
    assert decapsulate(sent_by(geneve, A, answer, underlay)) == (own, A.identity, answer)


@UNDERLAY
def test_what_a_pod_sends_to_the_port_of_geneve_is_dropped_and_to_that_of_vxlan_passes(
    geneve: OverlayWorld, underlay: str
) -> None:
    geneve.identify(OTHER_NODE, 6)
    forged = from_pod(A) / udp(A.ip, OTHER_NODE, dport=PORT)
    assert geneve.pod_sends(A, forged).dropped == (170, EGRESS)
    assert geneve.pod_sends(A, from_pod(A) / udp(A.ip, OTHER_NODE, dport=PORTS["vxlan"])).action == OK
