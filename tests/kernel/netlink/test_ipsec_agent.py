"""IPsec's cells on a node: the kernel state that they create of nodes and keys, and its removal."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from cells.cluster.encryption import EncryptionKey, PublishedKey
from cells.netlink.xfrm import XfrmKernel
from lifecycle import Hive, StartError
from lifecycle.testing import eventually
from tests.kernel.netlink.ipsec_node import KEY, NEXT_KEY, IpsecWorld, key_file, node
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]

RULES = [
    "1:\tfrom all fwmark 0xd00/0xf00 lookup 200",
    "1:\tfrom all fwmark 0xe00/0xf00 lookup 200",
]
BLOCKS = 2
SHARED = 4
"""Policies for what comes: two for each family."""
OUT = 3
"""States and policies for another node: of each family, and of the nodes' own addresses in the tunnel."""


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def routes(family: str) -> list[str]:
    return [
        " ".join(line.split()) for line in run("ip", family, "route", "list", "table", "200").splitlines()
    ]


def rules(family: str) -> list[str]:
    return sorted(
        line.removesuffix(" proto kernel").strip()
        for line in run("ip", family, "rule", "list").splitlines()
        if "lookup 200" in line
    )


def policies() -> int:
    return sum(line.startswith("src ") for line in run("ip", "xfrm", "policy", "list").splitlines())


def published(hive: Hive) -> list[EncryptionKey]:
    return hive.get(PublishedKey).table.all()


def with_links(world: IpsecWorld) -> IpsecWorld:
    names = ("cilium_host", "cilium_vxlan")
    run("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
    for name in names:
        run("ip", "link", "set", name, "up")
        world.add_device(name, socket.if_nametoindex(name))
    return world


async def settled(world: IpsecWorld, others: int, keys: int = 1) -> None:
    """Wait for all states and policies with this many other nodes."""
    wanted = (2 * OUT * others * keys, BLOCKS + (SHARED + OUT * keys * others if others else 0))

    await eventually(lambda: (len(world.esp.esp.held_states), policies()) == wanted)


async def test_nodes_have_states_policies_and_routes_and_leave_none(in_node: None, tmp_path: Path) -> None:
    world = with_links(IpsecWorld(tunnelled=True))
    path = key_file(tmp_path, KEY)
    on = {"enable-ipsec": "true", "ipsec-key-file": str(path)}
    async with world.agent(**on) as hive:
        assert published(hive) == [EncryptionKey(3, overhead=77)]
        assert len(await world.kernel.policies()) == BLOCKS  # before any node is known
        pools = {"10.0.0.0/8": 1, "fd00::/104": 1}
        assert world.pod_networks() == pools
        world.add(node(1, local=True), node(2), node(3))
        world.all_known.done()
        await settled(world, 2)
        await eventually(lambda: len(routes("-4")) == 3)
        assert routes("-4") == [
            "local 10.0.1.0/24 dev cilium_vxlan proto kernel scope host",
            "10.0.2.0/24 dev cilium_host proto kernel mtu 1400",
            "10.0.3.0/24 dev cilium_host proto kernel mtu 1400",
        ]
        await eventually(lambda: rules("-4") == RULES and rules("-6") == RULES)
        await eventually(lambda: world.number.lookup(bytes(4)) == b"\3")
        known = {"10.0.1.0/24": 0, "10.0.2.0/24": 1, "fd00::1:0/112": 0, "fd00::2:0/112": 1}
        third = {"10.0.3.0/24": 1, "fd00::3:0/112": 1}
        await eventually(lambda: world.pod_networks() == pools | known | third)
        with world.nodes.txn() as txn:
            txn.delete("default/n3")
        await settled(world, 1)
        await eventually(lambda: world.pod_networks() == pools | known)
        await eventually(lambda: len(routes("-4")) == 2 == len(routes("-6")))
        run("ip", "xfrm", "policy", "flush")
        await settled(world, 1)
    async with world.agent():
        assert await world.kernel.policies() == [] == await world.kernel.states()
        assert [*rules("-4"), *rules("-6"), *routes("-4"), *routes("-6")] == []


async def test_a_key_is_published_once_there_are_states_of_it(in_node: None, tmp_path: Path) -> None:
    world = with_links(IpsecWorld(tunnelled=True))
    path = key_file(tmp_path, KEY)
    on = {
        "enable-ipsec": "true",
        "ipsec-key-file": str(path),
        "ipsec-key-rotation-duration": "1s",
    }
    async with world.agent(**on) as hive:
        world.add(node(1, local=True), node(2))
        world.all_known.done()
        await settled(world, 1)
        world.esp.published = hive.get(PublishedKey)
        world.esp.added.clear()
        key_file(tmp_path, NEXT_KEY, "second")
        await eventually(lambda: published(hive) == [EncryptionKey(4, overhead=77)])
        assert {one.spi for one in await world.kernel.states()} == {3, 4}
        assert world.esp.added == {(4, 3)}  # all were there before others could send by them
        await eventually(lambda: world.number.lookup(bytes(4)) == b"\4")
        await settled(world, 1)
        assert {one.spi for one in await world.kernel.states()} == {4}
        key_file(tmp_path, "4 rfc4106(gcm(aes)) 0102 128\n", "third")
        await eventually(lambda: any("changing IPSec keys" in str(one) for one in hive.health.snapshot()))
        assert published(hive) == [EncryptionKey(4, overhead=77)]


async def test_settings_that_would_send_clear_text_are_refused(in_node: None, tmp_path: Path) -> None:
    on = {"enable-ipsec": "true", "ipsec-key-file": str(key_file(tmp_path, KEY))}
    why = "enable-ipv4=false: nodes find each other's keys by their IPv4 addresses"
    with pytest.raises(StartError, match=why):
        async with IpsecWorld().agent(**on, **{"enable-ipv4": "false"}):
            pass
    why = "ipv6-native-routing-cidr: unset, and packets from pods to nodes that are not known yet"
    with pytest.raises(StartError, match=why):
        async with IpsecWorld().agent(**on, **{"cluster-pool-ipv6-cidr": ""}):
            pass
    assert await XfrmKernel().policies() == []
