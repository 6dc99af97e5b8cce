"""ADD and DEL with both families: IPv6 first, all or nothing, and IPv6 disabled in the pod."""

from __future__ import annotations

import pytest

from lifecycle.testing import eventually
from tests.unit.cni_server.fakes import GATEWAY, GATEWAY6, MTU
from tests.unit.cni_server.harness import Harness

pytestmark = pytest.mark.anyio


@pytest.fixture
def both(served: Harness) -> Harness:
    served.node.gateways = (GATEWAY6, GATEWAY)
    return served


async def test_a_pod_gets_both_addresses_ipv6_first_and_gives_both_back(both: Harness) -> None:
    reply = await both.call("ADD")
    (endpoint,) = both.node.all()
    (link,) = both.node.links.values()
    assert endpoint.ipv4 is not None
    assert endpoint.ipv6 is not None
    assert (endpoint.pool, endpoint.ipv6_pool, endpoint.network) == ("default", "default", "cilium")
    assert link.configured == (endpoint.ipv6, endpoint.ipv4, GATEWAY6, GATEWAY, MTU)
    assert [ip["address"] for ip in reply.json["ips"]] == [f"{endpoint.ipv6}/128", f"{endpoint.ipv4}/32"]
    assert [ip["gateway"] for ip in reply.json["ips"]] == [str(GATEWAY6), str(GATEWAY)]
    assert both.node.owners == ["default/web-0"]
    assert (await both.call("DEL")).code == 0
    await eventually(both.node.clean)


async def test_a_node_of_ipv6_alone_serves(served: Harness) -> None:
    served.node.gateways = (GATEWAY6,)
    reply = await served.call("ADD")
    assert [ip["gateway"] for ip in reply.json["ips"]] == [str(GATEWAY6)]
    (endpoint,) = served.node.all()
    assert (endpoint.ipv4, endpoint.pool) == (None, "")


@pytest.mark.parametrize("step", ["create_veth", "create endpoint", "activate", "configure", "sync carrier"])
async def test_a_failure_at_any_step_gives_both_back(both: Harness, step: str) -> None:
    both.node.refuse.add(step)
    assert (await both.call("ADD")).code == 1
    assert both.node.clean()


async def test_an_address_that_is_not_taken_back_keeps_not_the_other(both: Harness) -> None:
    both.node.refuse |= {"create_veth", "release"}
    assert (await both.call("ADD")).code == 1
    assert both.node.steps.count("release") == 2


async def test_a_pod_with_ipv6_off_is_left_to_the_plugin_clean(both: Harness) -> None:
    both.node.pods_without_ipv6.add(both.pod("pod1"))
    reply = await both.call("ADD")
    assert (reply.code, reply.patch) == (1, 1)
    assert reply.message.startswith(
        "unable to configure interfaces in container namespace: error configuring IPv6 and IPv4: "
    )
    assert both.node.clean()
    both.node.pods_without_ipv6.clear()
    assert (await both.call("ADD")).patch == 0


async def test_without_an_ipv6_address_no_disable_ipv6_change_is_requested(served: Harness) -> None:
    served.node.pods_without_ipv6.add(served.pod("pod1"))
    assert (await served.call("ADD")).code == 0
    served.node.refuse.add("configure")
    reply = await served.call("ADD", "cid2", pod="pod2")
    assert (reply.code, reply.patch) == (1, 0)
