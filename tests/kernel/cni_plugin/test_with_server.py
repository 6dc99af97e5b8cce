"""The plugin, the server and real links: what ADD creates in a pod, and DEL removes."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import anyio
import pytest

from cells.netlink.connection import NetlinkError
from cells.netlink.namespaces import PodLink
from cells.netlink.rows import mac_text
from lifecycle.testing import eventually
from tests.kernel.cni_plugin.real_links import add_veth, configuration, look, path_of, serving
from tests.support.cni_plugin import compiled_plugin, environment, run_plugin
from tests.support.namespaces import Namespaces, in_node, inside, new_netns

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel


class Stubborn(PodLink):
    """A pod that takes everything and then refuses."""

    def configure(
        self,
        ifindex: int,
        name: str,
        addresses: Sequence[IPv4Address | IPv6Address],
        gateways: Sequence[IPv4Address | IPv6Address],
        mtu: int,
    ) -> None:
        super().configure(ifindex, name, addresses, gateways, mtu)
        raise NetlinkError(errno.EPERM, f"add route to {name}")


def remove_eth0(pod: Namespaces) -> None:
    """Another program deletes the pod's link behind our back."""
    from pyroute2 import IPRoute

    with inside(pod), IPRoute() as ip:
        ip.link("del", ifname="eth0")


def reverse_path_filter(name: str) -> str:
    return Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter").read_text(encoding="ascii").strip()


async def test_a_pod_gets_its_interface_and_loses_it_again(in_node: None) -> None:
    with new_netns() as pod:
        async with serving() as node:
            added = await node.call("ADD", pod)
            assert (added.code, added.stderr) == (0, "")
            result = json.loads(added.stdout)
            ((number, endpoint),) = node.fakes.book.items()
            host = node.links.find(endpoint.ifname)
            assert host is not None
            assert (host.up, host.alias, host.mtu) == (True, f"hive endpoint {number}", 1400)
            assert (host.mac, host.ifindex) == (endpoint.host_mac, endpoint.ifindex)
            seen = await look(pod)
            eth0 = seen.links["eth0"]
            assert (eth0["state"], eth0.get("mtu")) == ("up", 1400)
            assert eth0.get("address") == mac_text(endpoint.pod_mac) == result["interfaces"][1]["mac"]
            assert seen.addresses == [(str(endpoint.ipv4), 32)]
            assert seen.routes == {("10.0.1.5/32", "", 0), ("0.0.0.0/0", "10.0.1.5", 1400)}
            assert endpoint.netns_cookie != 0
            assert reverse_path_filter(endpoint.ifname) == "0"

            previous = {**result, "cniVersion": "1.0.0"}
            assert (await node.call("CHECK", pod, prevResult=previous)).code == 0

            before, links = node.fakes.steps.copy(), node.links.links()
            again = await node.call("ADD", pod)
            assert "already exists" in again.stdout
            after = await look(pod)
            assert (after.addresses, after.routes, after.marks) == (seen.addresses, seen.routes, seen.marks)
            assert node.links.links() == links
            assert node.fakes.steps == before

            await anyio.to_thread.run_sync(remove_eth0, pod)
            checked = await node.call("CHECK", pod, prevResult=previous)
            assert checked.json["msg"] == "cannot find container link eth0"

            assert (await node.call("DEL", pod)).code == 0
            assert not node.fakes.book
            await eventually(lambda: node.links.find(endpoint.ifname) is None and not node.fakes.addresses)
            assert set((await look(pod)).links) == {"lo"}
            assert (await node.call("DEL", pod)).code == 0


async def test_an_add_straight_after_a_delete_works(in_node: None) -> None:
    with new_netns() as pod:
        async with serving() as node:
            for version in ("0.2.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"):
                added = await node.call("ADD", pod, version=version)
                assert (added.code, json.loads(added.stdout)["cniVersion"]) == (0, version)
                assert (await node.call("DEL", pod, version=version)).code == 0


@pytest.mark.parametrize("step", ["allocate", "create endpoint"])
async def test_a_failed_add_leaves_no_link(in_node: None, step: str) -> None:
    with new_netns() as pod:
        async with serving() as node:
            node.fakes.refuse.add(step)
            assert (await node.call("ADD", pod)).code == 1
            assert {link.name for link in node.links.links()} == {"lo"}
            assert set((await look(pod)).links) == {"lo"}
            assert node.fakes.clean()


async def test_a_pod_that_cannot_be_configured_is_taken_back(
    in_node: None,
) -> None:
    with new_netns() as pod:
        async with serving(open_pod=Stubborn) as node:
            ended = await node.call("ADD", pod)
            assert ended.json["msg"].startswith(
                "unable to configure interfaces in container namespace: error configuring IPv4: "
            )
            assert {link.name for link in node.links.links()} == {"lo"}
            assert node.fakes.clean()


async def test_a_leftover_interface_is_replaced(in_node: None) -> None:
    with new_netns() as pod:
        await anyio.to_thread.run_sync(add_veth, pod)
        async with serving() as node:
            assert (await node.call("ADD", pod)).code == 0
            assert set((await look(pod)).links) == {"lo", "eth0"}


async def test_a_burst_of_pods_is_attached_and_detached(in_node: None) -> None:
    pods = [new_netns() for _ in range(100)]
    async with serving() as node:
        for command in ("ADD", "DEL"):
            codes: list[int] = []

            async def one(number: int, pod: Namespaces, command: str, codes: list[int]) -> None:
                codes.append((await node.call(command, pod, f"cid{number}")).code)

            async with anyio.create_task_group() as tasks:
                for number, pod in enumerate(pods):
                    tasks.start_soon(one, number, pod, command, codes)
            assert codes == [0] * len(pods)
        await eventually(lambda: {link.name for link in node.links.links()} == {"lo"} and node.fakes.clean())
    for pod in pods:
        pod.close()


async def test_a_plugin_killed_in_the_middle_of_an_add_leaves_nothing(in_node: None) -> None:
    with new_netns() as pod:
        async with serving() as node:
            node.fakes.policy_maps, node.fakes.may_refill = 0, anyio.Event()
            env = environment("ADD", CNI_NETNS=path_of(pod))
            async with await anyio.open_process([compiled_plugin()], env=env) as plugin:
                assert plugin.stdin is not None
                await plugin.stdin.send(json.dumps(configuration(cniVersion="1.0.0")).encode())
                await plugin.stdin.aclose()
                await eventually(lambda: "wait for a policy map" in node.fakes.steps)
                plugin.kill()
            node.fakes.may_refill.set()
            await eventually(
                lambda: node.fakes.clean() and {each.name for each in node.links.links()} == {"lo"}
            )
            assert set((await look(pod)).links) == {"lo"}
            assert (await node.call("ADD", pod)).code == 0


async def test_a_delete_of_a_namespace_that_went_takes_the_rest(in_node: None) -> None:
    pod = new_netns()
    async with serving() as node:
        assert (await node.call("ADD", pod)).code == 0
        pod.close()
        env = environment("DEL", CNI_NETNS="/run/netns/gone")
        given = configuration(cniVersion="1.0.0")
        for _ in range(2):
            ended = await anyio.to_thread.run_sync(partial(run_plugin, env, given))
            assert (ended.code, ended.stdout) == (0, "")
        await eventually(node.fakes.clean)
        await eventually(lambda: {each.name for each in node.links.links()} == {"lo"})
