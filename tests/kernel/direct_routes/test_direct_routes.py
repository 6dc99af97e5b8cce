"""Routes to the pods of other nodes, in a real routing table."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from ipaddress import ip_address
from typing import Any

import msgspec
import pytest
import structlog
from pyroute2 import IPRoute

from cells.cluster import direct_routes
from cells.cluster.ipcache.rows import Source
from cells.cluster.nodes.node import INTERNAL_IP, ClusterNode, NodeIP
from cells.config import AgentConfig, AgentSettings
from cells.node.devices import Device
from lifecycle import Hive, Lifecycle, ReadTable, Table, Tables, supply
from lifecycle.tables import ObjectStatus
from lifecycle.testing import eventually
from tests.support.namespaces import in_node
from tests.unit.remote_nodes.nodes import node

__all__ = ["in_node"]

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("in_node")]


@contextmanager
def netlink() -> Iterator[Callable[..., Any]]:
    """Calls of pyroute2's IPRoute by name, in a thread: it runs an event loop of its own."""
    with ThreadPoolExecutor(1) as thread:
        ip = thread.submit(IPRoute).result()
        try:
            yield lambda name, *args, **more: thread.submit(
                lambda: _listed(getattr(ip, name)(*args, **more))
            ).result()
        finally:
            thread.submit(ip.close).result()


def _listed(answer: Any) -> list[Any]:
    return list(answer)


def set_up_networks() -> None:
    """A network with others: 192.0.2.0/24 and 2001:db8::/64; 198.51.100.0/24 is behind a router."""
    with netlink() as ip:
        ip("link", "add", ifname="eth0", kind="veth", peer={"ifname": "peer0"})
        for name in ("eth0", "peer0"):
            (index,) = ip("link_lookup", ifname=name)
            ip("link", "set", index=index, state="up")
        (index,) = ip("link_lookup", ifname="eth0")
        ip("addr", "add", index=index, address="192.0.2.1", prefixlen=24)
        ip("addr", "add", index=index, address="2001:db8::1", prefixlen=64, flags=0x02)
        ip("route", "add", dst="198.51.100.0/24", gateway="192.0.2.254")


def routes() -> dict[str, str]:
    """Every route with a gateway, but the one to the other network."""
    found = {}
    with netlink() as ip:
        for row in (*ip("get_routes", family=2, table=254), *ip("get_routes", family=10, table=254)):
            gateway = row.get_attr("RTA_GATEWAY")
            if gateway and row.get_attr("RTA_DST") not in (None, "198.51.100.0"):
                found[f"{row.get_attr('RTA_DST')}/{row['dst_len']}"] = gateway
    return found


def change(what: str, dst: str, gateway: str) -> None:
    with netlink() as ip:
        ip("route", what, dst=dst, gateway=gateway, proto=2)


@asynccontextmanager
async def agent(nodes: Table[str, ClusterNode], **settings: str) -> AsyncIterator[Hive]:
    devices: Table[int, Device] = Table("devices", key=lambda row: row.ifindex)
    known = AgentSettings(enable_ipv6=settings.pop("enable-ipv6", "true") == "true")
    hive = Hive(
        direct_routes.cell,
        supply(nodes, type=ReadTable[str, ClusterNode]),
        supply(devices, type=Table[int, Device]),
        supply(AgentConfig(known, Lifecycle("test"), structlog.get_logger())),
        settings={"auto-direct-node-routes": "true", **settings},
    )
    async with hive.started():
        yield hive


def table(*rows: ClusterNode) -> Table[str, ClusterNode]:
    found: Table[str, ClusterNode] = Table("nodes", key=lambda row: row.full_name)
    with found.txn() as txn:
        txn.replace_all(rows)
    return found


OWN = node(1, "10.1.0.0/24", source=Source.LOCAL)


async def test_routes_follow_nodes_that_come_change_and_go() -> None:
    set_up_networks()
    nodes = table(OWN, node(2, "10.2.0.0/24", "fd02::/112"))
    async with agent(nodes):
        await eventually(lambda: routes() == {"10.2.0.0/24": "192.0.2.2", "fd02::/112": "2001:db8::2"})
        with nodes.txn() as txn:
            txn.put(node(3, "10.3.0.0/24"))
            txn.put(node(4, "10.2.0.0/24", "fd02::/112", name="n2"))
        await eventually(
            lambda: (
                routes()
                == {"10.2.0.0/24": "192.0.2.4", "fd02::/112": "2001:db8::4", "10.3.0.0/24": "192.0.2.3"}
            )
        )
        with nodes.txn() as txn:
            txn.delete("default/n2")
        await eventually(lambda: routes() == {"10.3.0.0/24": "192.0.2.3"})


async def test_a_removed_direct_route_is_restored_and_foreign_routes_stay() -> None:
    set_up_networks()
    with netlink() as ip:
        ip("route", "add", dst="203.0.113.0/24", gateway="192.0.2.9", proto="static")
    async with agent(table(OWN, node(2, "10.2.0.0/24", "fd02::/112"))):
        await eventually(lambda: len(routes()) == 3)
        change("del", "10.2.0.0/24", "192.0.2.2")
        change("del", "fd02::/112", "2001:db8::2")
        await eventually(lambda: len(routes()) == 3)
        assert routes()["203.0.113.0/24"] == "192.0.2.9"


async def test_a_route_that_is_not_ours_is_never_replaced() -> None:
    set_up_networks()
    with netlink() as ip:
        ip("route", "add", dst="10.2.0.0/24", gateway="192.0.2.9", proto="static")
    async with agent(table(OWN, node(2, "10.2.0.0/24", "10.5.0.0/24"))) as hive:
        await eventually(lambda: "10.5.0.0/24" in routes())
        assert routes()["10.2.0.0/24"] == "192.0.2.9"
        await eventually(lambda: len(failed(hive)) == 1)
        (error,) = failed(hive)
        assert "a route to 10.2.0.0/24 of another owner exists (via 192.0.2.9)" in error
    assert routes()["10.2.0.0/24"] == "192.0.2.9"


async def test_routes_of_an_earlier_agent_are_removed_when_all_nodes_are_known() -> None:
    set_up_networks()
    change("add", "10.9.0.0/24", "192.0.2.9")
    nodes = table(OWN, node(2, "10.2.0.0/24"))
    source = nodes.initializer("another source")
    async with agent(nodes):
        assert "10.9.0.0/24" in routes()
        source.done()
        await eventually(lambda: routes() == {"10.2.0.0/24": "192.0.2.2"})


def beyond() -> ClusterNode:
    far = NodeIP(INTERNAL_IP, ip_address("198.51.100.5"))
    return msgspec.structs.replace(node(5, "10.5.0.0/24"), addresses=(far,))


def failed(hive: Hive) -> list[str]:
    statuses: ReadTable[Any, ObjectStatus] = hive.get(Tables).get("direct-routes-status")
    return [one.error or "" for one in statuses.all() if one.state == "failed"]


async def test_a_node_behind_a_router_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_networks()
    async with agent(table(OWN, beyond(), node(2, "10.2.0.0/24"))) as hive:
        await eventually(lambda: len(failed(hive)) == 1 and len(routes()) == 1)
        assert "contains gateway 192.0.2.254, must be directly reachable" in failed(hive)[0]
        await eventually(
            lambda: any(s.failures > 1 for s in hive.get(Tables).get("direct-routes-status").all())
        )
    assert capsys.readouterr().err.count("no route to 10.5.0.0/24") == 1


async def test_a_node_behind_a_router_may_be_left_out() -> None:
    set_up_networks()
    nodes = table(OWN, beyond(), node(2, "10.2.0.0/24"))
    async with agent(nodes, **{"direct-routing-skip-unreachable": "true"}) as hive:
        await eventually(lambda: routes() == {"10.2.0.0/24": "192.0.2.2"})
        assert failed(hive) == []


@pytest.mark.parametrize("skip", ["true", "false"])
async def test_a_node_that_moves_behind_a_router_loses_its_route(skip: str) -> None:
    set_up_networks()
    near = msgspec.structs.replace(beyond(), addresses=(NodeIP(INTERNAL_IP, ip_address("192.0.2.5")),))
    nodes = table(OWN, near, node(2, "10.2.0.0/24"))
    async with agent(nodes, **{"direct-routing-skip-unreachable": skip}):
        await eventually(lambda: routes() == {"10.2.0.0/24": "192.0.2.2", "10.5.0.0/24": "192.0.2.5"})
        nodes.put(beyond())
        await eventually(lambda: routes() == {"10.2.0.0/24": "192.0.2.2"})
        nodes.put(near)
        await eventually(lambda: len(routes()) == 2)


async def test_ranges_of_a_family_that_is_off_get_no_route() -> None:
    set_up_networks()
    async with agent(table(OWN, node(2, "10.2.0.0/24", "fd02::/112")), **{"enable-ipv6": "false"}) as hive:
        await eventually(lambda: len(hive.get(Tables).get("direct-routes-status")) == 1)
        await eventually(lambda: "10.2.0.0/24" in routes())
        assert routes() == {"10.2.0.0/24": "192.0.2.2"}


async def test_without_the_setting_routes_of_an_earlier_agent_are_removed() -> None:
    set_up_networks()
    nodes = table(OWN, node(2, "10.2.0.0/24", "fd02::/112"))
    async with agent(nodes):
        await eventually(lambda: len(routes()) == 2)
    change("add", "10.9.0.0/24", "192.0.2.9")
    async with agent(nodes, **{"auto-direct-node-routes": "false"}):
        await eventually(lambda: routes() == {"10.9.0.0/24": "192.0.2.9"})
