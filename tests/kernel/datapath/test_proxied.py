"""Connections that policy redirects to a proxy pass only through it, unless policy allows them."""

from dataclasses import replace

import pytest

from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from tests.kernel.datapath.packets import from_host, from_pod, tcp
from tests.kernel.datapath.world import EGRESS, INGRESS, NET_MAC, OK, REDIRECT, ROUTER, A, B, World

pytestmark = pytest.mark.kernel

ROUTED_BY_HOST = 8
"""Of an endpoint's flags."""

READ = PolicyEntry(proxy_port=15001, only_by_proxy=True)
"""Requests are read, or nothing passes."""
ASKED = PolicyEntry(proxy_port=15001)
"""Names may be asked for without the proxy."""
SYN = from_pod(A) / tcp(A.ip, B.ip, "S")


def on_port_80(*, egress: bool) -> PolicyKey:
    return PolicyKey(0, egress, 6, 80, 16)


@pytest.mark.parametrize("egress", [True, False], ids=["egress", "ingress"])
def test_without_the_proxy_redirected_packets_are_dropped(world: World, egress: bool) -> None:
    world.allow(A if egress else B, [(on_port_80(egress=egress), READ)])
    direction = EGRESS if egress else INGRESS
    assert world.pod_sends(A, SYN).dropped == (178, direction)
    assert world.pod_sends(A, from_pod(A) / tcp(A.ip, B.ip, "A")).dropped == (178, direction), "nor later"


def test_an_optional_proxy_that_is_missing_is_bypassed(world: World) -> None:
    world.allow(A, [(on_port_80(egress=True), ASKED)])
    assert world.pod_sends(A, SYN).action == REDIRECT


def test_packets_to_another_port_are_not_redirected(world: World) -> None:
    world.allow(B, [(on_port_80(egress=False), READ), (PolicyKey(0, False), PolicyEntry())])
    assert world.pod_sends(A, from_pod(A) / tcp(A.ip, B.ip, "S", dport=81)).action == REDIRECT


def test_what_the_host_sends_enters_the_stack_again_for_the_proxy(world: World) -> None:
    world.allow(A, [(on_port_80(egress=False), READ)])
    outcome = world.host_sends(from_host() / tcp(ROUTER, A.ip, "S"))
    assert outcome.action == REDIRECT
    assert outcome.packet.dst == NET_MAC


@pytest.mark.parametrize(("one", "other"), [(A.ip, B.ip), (A.ip6, B.ip6)])
def test_where_the_stack_serves_pods_a_proxys_packets_go_past_it(world: World, one: str, other: str) -> None:
    """It would find the proxy's socket, and drop what belongs to a socket of its own and is for the pod."""
    sender = replace(A, flags=ROUTED_BY_HOST)
    asked, later = (tcp(one, other, flags) for flags in ("S", "A"))
    world.allow(B, [(on_port_80(egress=False), READ)])
    assert world.pod_sends(sender, from_pod(A) / asked).action == OK, "the stack's"
    given = world.pod_gets(B, from_host() / asked, mark=0x0F00 | A.identity << 16)
    assert (given.action, given.packet.dst) == (REDIRECT, NET_MAC), "the proxy's"
    for _ in range(3):
        brought = world.pod_sends(sender, from_pod(A) / later)
        assert (brought.action, brought.packet.dst) == (REDIRECT, B.mac), "to the link, whose program decides"
        assert brought.mark == 0x0F00 | A.identity << 16
    world.allow(B, [(PolicyKey(0, egress=False), PolicyEntry())])
    assert world.pod_sends(sender, from_pod(A) / tcp(one, other, "S", dport=81)).action == OK


@pytest.mark.parametrize(("one", "other"), [(A.ip, B.ip), (A.ip6, B.ip6)])
def test_ports_of_a_connection_before_are_the_proxys_as_rules_are_now(
    world: World, one: str, other: str
) -> None:
    """Clients use ports again within a minute; rules may give the proxy what passed it, and the reverse."""
    sender = replace(A, flags=ROUTED_BY_HOST)
    asked, later = (tcp(one, other, flags) for flags in ("S", "A"))
    mark = 0x0F00 | A.identity << 16
    for entry, after in ((PolicyEntry(), OK), (READ, REDIRECT), (PolicyEntry(), OK)):
        world.allow(B, [(on_port_80(egress=False), entry)])
        assert world.pod_sends(sender, from_pod(A) / asked).action in {OK, REDIRECT}, "the program decides"
        given = world.pod_gets(B, from_host() / asked, mark=mark)
        assert given.action == after
        assert world.pod_sends(sender, from_pod(A) / later).action == after
