"""Later fragments follow the first one, in either family."""

import pytest
from scapy.layers.inet import ICMP, IP, UDP
from scapy.layers.inet6 import ICMPv6EchoRequest, IPv6, IPv6ExtHdrFragment
from scapy.packet import Packet, Raw

from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from tests.kernel.datapath.packets import from_pod
from tests.kernel.datapath.world import EGRESS, REDIRECT, A, B, World

pytestmark = pytest.mark.kernel


def fragment(version: int, number: int, protocol: int, payload: Packet, *, id: int = 9) -> Packet:  # noqa: A002
    """The first of two fragments with its transport header, or the second without."""
    if version == 4:
        return (
            from_pod(A)
            / IP(src=A.ip, dst=B.ip, id=id, flags=0 if number else "MF", frag=9 * number, proto=protocol)
            / payload
        )
    extension = IPv6ExtHdrFragment(nh=protocol, id=id, m=1 - number, offset=9 * number)
    return from_pod(A) / IPv6(src=A.ip6, dst=B.ip6) / extension / payload


DATAGRAM = UDP(sport=40000, dport=53, len=136, chksum=1) / Raw(bytes(64))
PINGS = {4: (1, ICMP(id=7) / Raw(bytes(64))), 6: (58, ICMPv6EchoRequest(id=7) / Raw(bytes(64)))}


@pytest.mark.parametrize("version", [4, 6])
def test_a_later_fragment_follows_the_first(world: World, version: int) -> None:
    later = fragment(version, 1, 17, Raw(bytes(64)))
    assert world.pod_sends(A, later).dropped == (175, EGRESS)
    assert world.pod_sends(A, fragment(version, 0, 17, DATAGRAM)).action == REDIRECT
    assert world.pod_sends(A, later).action == REDIRECT
    assert world.pod_sends(A, fragment(version, 1, 17, Raw(bytes(64)), id=10)).dropped == (175, EGRESS)
    ports = {(key.sport, key.dport) for key in world.connections(tcp=False, version=version) if key.flags < 2}
    assert ports == {(40000, 53)}


@pytest.mark.parametrize("version", [4, 6])
def test_policy_is_enforced_for_every_fragment(world: World, version: int) -> None:
    world.allow(A, [(PolicyKey(0, True, 17, 53, 16), PolicyEntry())])
    assert world.pod_sends(A, fragment(version, 0, 17, DATAGRAM)).action == REDIRECT
    assert world.pod_sends(A, fragment(version, 1, 17, Raw(bytes(64)))).action == REDIRECT
    world.allow(A, [(PolicyKey(0, True, 17, 54, 16), PolicyEntry())])
    assert world.pod_sends(A, fragment(version, 1, 17, Raw(bytes(64)))).dropped == (133, EGRESS)


@pytest.mark.parametrize("version", [4, 6])
def test_a_long_ping_keeps_its_type(world: World, version: int) -> None:
    protocol, ping = PINGS[version]
    world.allow(A, [(PolicyKey(0, True, protocol, 8 if version == 4 else 128, 16), PolicyEntry())])
    assert world.pod_sends(A, fragment(version, 0, protocol, ping)).action == REDIRECT
    assert world.pod_sends(A, fragment(version, 1, protocol, Raw(bytes(64)))).action == REDIRECT
