"""Dual-stack pods with real links, also where IPv6 is disabled in the pod's namespace."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from lifecycle.testing import eventually
from tests.kernel.cni_plugin.real_links import Node, serving
from tests.support.namespaces import Namespaces, in_node, inside, new_netns
from tests.unit.cni_server.fakes import GATEWAY, GATEWAY6

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel
SWITCH = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")


def switched_off(pod: Namespaces, *, value: str | None = None) -> bool:
    """Whether the pod's namespace has IPv6 off; ``value`` is set before."""
    with inside(pod):
        if value is not None:
            SWITCH.write_text(value)
        return SWITCH.read_text().strip() == "1"


def addresses(pod: Namespaces) -> set[str]:
    """Those of eth0 that are not link-local; one that is still being tried out is marked."""
    from pyroute2 import IPRoute

    with inside(pod), IPRoute() as ip:
        rows = [row for row in ip.get_addr() if not row.get("address").startswith(("fe80:", "127.", "::1"))]
        tentative = 0x40  # IFA_F_TENTATIVE
        return {f"{row.get('address')}{'?' if row['flags'] & tentative else ''}" for row in rows}


def routes6(pod: Namespaces) -> set[tuple[str, str]]:
    """Destination and gateway of the IPv6 routes of the main table, without link-local ones."""
    from pyroute2 import IPRoute

    with inside(pod), IPRoute() as ip:
        rows = [
            (row.get("dst") or "default", row.get("gateway") or "")
            for row in ip.get_routes(family=10, table=254)
        ]
    return {row for row in rows if not row[0].startswith(("fe80:", "ff00:"))}


async def added(node: Node, pod: Namespaces) -> list[str]:
    """The pod's addresses as in the result of the ADD; the pod has exactly those."""
    node.fakes.gateways = (GATEWAY6, GATEWAY)
    ended = await node.call("ADD", pod)
    assert (ended.code, ended.stderr) == (0, "")
    returned = [each["address"].partition("/")[0] for each in json.loads(ended.stdout)["ips"]]
    assert await anyio.to_thread.run_sync(addresses, pod) == set(returned)
    found = await anyio.to_thread.run_sync(routes6, pod)
    assert found == {(str(GATEWAY6), ""), (returned[0], ""), ("default", str(GATEWAY6))}
    return returned


async def test_a_pod_gets_both_addresses_usable_at_once(in_node: None) -> None:
    with new_netns() as pod:
        async with serving() as node:
            returned = await added(node, pod)
            (endpoint,) = node.fakes.all()
            assert returned == [str(endpoint.ipv6), str(endpoint.ipv4)]
            assert (await node.call("DEL", pod)).code == 0
            await eventually(node.fakes.clean)


async def test_ipv6_that_is_off_in_the_pod_is_switched_on(in_node: None) -> None:
    with new_netns() as pod:
        assert switched_off(pod, value="1")
        async with serving() as node:
            await added(node, pod)
            assert not switched_off(pod)
            assert [link.name for link in node.links.links() if link.name.startswith("lxc")]
            assert (await node.call("DEL", pod)).code == 0
            await eventually(node.fakes.clean)


async def test_without_an_ipv6_address_disable_ipv6_is_unchanged(in_node: None) -> None:
    with new_netns() as pod:
        assert switched_off(pod, value="1")
        async with serving() as node:
            assert (await node.call("ADD", pod)).code == 0
            assert switched_off(pod)


async def test_a_switch_that_cannot_be_moved_fails_the_add_with_a_warning(in_node: None) -> None:
    await anyio.run_process(["mount", "--bind", "/proc/sys", "/proc/sys"])
    with new_netns() as pod:
        assert switched_off(pod, value="1")
        await anyio.run_process(["mount", "-o", "remount,bind,ro", "/proc/sys"])
        async with serving() as node:
            node.fakes.gateways = (GATEWAY6, GATEWAY)
            ended = await node.call("ADD", pod)
            assert ended.code == 1
            assert ended.json["msg"].startswith(
                "unable to configure interfaces in container namespace: error configuring IPv6 and IPv4: "
            )
            assert "unable to enable ipv6 on all interfaces: read-only file system" in ended.stderr
            assert node.fakes.clean()
            assert {link.name for link in node.links.links()} == {"lo"}
