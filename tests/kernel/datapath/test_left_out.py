"""Programs compiled without some features treat other packets alike, at half the verifier's work."""

from collections.abc import Iterator

import pytest
from scapy.packet import Packet

from cells.datapath.settings import ProgramSettings
from tests.kernel.datapath.model import UNKNOWN_NETWORK, UNROUTABLE
from tests.kernel.datapath.packets import echo, from_host, from_pod, tcp, udp, who_has
from tests.kernel.datapath.verified import processed
from tests.kernel.datapath.world import (
    EGRESS,
    INGRESS,
    NODE6,
    OK,
    OUTSIDE,
    OUTSIDE6,
    ROUTER,
    ROUTER6,
    A,
    B,
    World,
)
from tests.support.namespaces import need_root

pytestmark = pytest.mark.kernel


class PlainWorld(World):
    """A node without IPv6, tunnel, egress gateways and clients outside."""

    placeholders = frozenset(
        {"cilium_ct6_global", "cilium_ct_any6_global", "cilium_egress_gw_policy_v4", "cilium_tunnel_map"}
    )


@pytest.fixture(scope="module")
def plain() -> Iterator[World]:
    """Its maps and programs."""
    need_root()
    with PlainWorld(ProgramSettings(serves_outside=False)) as world:
        yield world


def test_the_verifier_follows_half_of_the_instructions(world: World, plain: World) -> None:
    everything, rest = (sum(map(processed, one.programs.values())) for one in (world, plain))
    assert rest < 0.55 * everything


@pytest.mark.parametrize(
    "packet",
    [
        from_pod(A) / tcp(A.ip, B.ip, "S"),
        from_pod(A) / udp(A.ip, B.ip),
        from_pod(A) / echo(A.ip, B.ip),
        from_pod(A) / udp(A.ip, OUTSIDE),
        from_pod(A) / udp(B.ip, OUTSIDE),
        who_has(A, ROUTER),
    ],
    ids=lambda packet: packet.summary(),
)
def test_ipv4_is_treated_as_by_programs_with_everything(world: World, plain: World, packet: Packet) -> None:
    wanted = world.pod_sends(A, packet)
    found = plain.pod_sends(A, packet)
    assert (found.action, bytes(found.packet), found.counted) == (
        wanted.action,
        bytes(wanted.packet),
        wanted.counted,
    )


def test_ipv6_is_an_unknown_protocol_to_pods(plain: World) -> None:
    plain.reset()
    assert plain.pod_sends(A, from_pod(A) / udp(A.ip6, B.ip6)).dropped == (UNKNOWN_NETWORK, EGRESS)
    assert plain.pod_gets(A, from_host() / udp(B.ip6, A.ip6)).dropped == (UNKNOWN_NETWORK, INGRESS)


def test_the_nodes_ipv6_stays_on_the_link(plain: World) -> None:
    plain.reset()
    assert plain.host_sends(from_host() / udp(ROUTER6, "ff02::1")).action == OK
    assert plain.host_sends(from_host() / udp(ROUTER6, A.ip6)).dropped == (UNROUTABLE, INGRESS)


def test_ipv6_of_devices_is_the_stacks(plain: World) -> None:
    plain.reset()
    assert plain.device_gets(from_host() / tcp(OUTSIDE6, NODE6, "S")).action == OK
    assert plain.device_sends(from_host() / tcp(NODE6, OUTSIDE6, "SA")).action == OK
