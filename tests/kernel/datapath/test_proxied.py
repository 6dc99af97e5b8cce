"""Connections that policy gives to a proxy: nothing passes without it, unless policy says so."""

import pytest

from cells.maps import PolicyEntry, PolicyKey
from tests.kernel.datapath.packets import from_host, from_pod, tcp
from tests.kernel.datapath.world import EGRESS, INGRESS, NET_MAC, REDIRECT, ROUTER, A, B, World

pytestmark = pytest.mark.kernel

READ = PolicyEntry(proxy_port=15001, only_by_proxy=True)
"""Requests are read, or nothing passes."""
ASKED = PolicyEntry(proxy_port=15001)
"""Names may be asked for without the proxy."""
SYN = from_pod(A) / tcp(A.ip, B.ip, "S")


def on_port_80(*, egress: bool) -> PolicyKey:
    return PolicyKey(0, egress, 6, 80, 16)


@pytest.mark.parametrize("egress", [True, False], ids=["egress", "ingress"])
def test_nothing_passes_unread_while_the_proxy_is_away(world: World, egress: bool) -> None:
    world.allow(A if egress else B, [(on_port_80(egress=egress), READ)])
    direction = EGRESS if egress else INGRESS
    assert world.pod_sends(A, SYN).dropped == (178, direction)
    assert world.pod_sends(A, from_pod(A) / tcp(A.ip, B.ip, "A")).dropped == (178, direction), "nor later"


def test_a_proxy_that_may_be_missed_is_passed_by(world: World) -> None:
    world.allow(A, [(on_port_80(egress=True), ASKED)])
    assert world.pod_sends(A, SYN).action == REDIRECT


def test_another_port_is_not_the_proxys(world: World) -> None:
    world.allow(B, [(on_port_80(egress=False), READ), (PolicyKey(0, False), PolicyEntry())])
    assert world.pod_sends(A, from_pod(A) / tcp(A.ip, B.ip, "S", dport=81)).action == REDIRECT


def test_what_the_host_sends_enters_the_stack_again_for_the_proxy(world: World) -> None:
    world.allow(A, [(on_port_80(egress=False), READ)])
    outcome = world.host_sends(from_host() / tcp(ROUTER, A.ip, "S"))
    assert outcome.action == REDIRECT
    assert outcome.packet.dst == NET_MAC
