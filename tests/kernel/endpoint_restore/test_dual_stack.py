"""Restore of dual-stack endpoints, and of endpoints with unreadable state."""

import struct
from functools import partial

import anyio
import pytest
from anyio import to_thread

from cells.endpoint import Endpoint, Endpoints
from cells.endpoint.restore import RestoredEndpoints
from cells.maps.map import map_by_id
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.endpoints import EndpointConfig, LxcKey, LxcValue
from cells.netlink.links import HostLinks
from cells.node.ipam import Ipam
from lifecycle import Hive
from tests.kernel.endpoint.nodes import DUAL, STATE, add_pod, agent, pods
from tests.support.namespaces import Namespaces, node_namespace
from tests.support.waiting import eventually

pytestmark = pytest.mark.kernel


def rows(hive: Hive) -> dict[str, set[object]]:
    """Addresses and endpoints in the maps."""
    maps = hive.get(Maps)
    return {
        "lxc": {
            (LxcKey.unpack(key).ip, LxcValue.unpack(value).endpoint_id) for key, value in maps.lxc.items()
        },
        "ipcache": {
            (IpcacheKey.unpack(key).ip, IpcacheValue.unpack(value).identity)
            for key, value in maps.ipcache.items()
        },
    }


def config_of(hive: Hive, endpoint: Endpoint) -> EndpointConfig:
    """The endpoint's row in hive_endpoints."""
    row = hive.get(Maps).endpoints.lookup(struct.pack("<I", endpoint.ifindex))
    assert row is not None
    return EndpointConfig.unpack(row)


def rows_of(endpoint: Endpoint) -> dict[str, set[object]]:
    """What the maps hold when it is the only one."""
    return {
        "lxc": {(ip, endpoint.id) for ip in endpoint.addresses},
        "ipcache": {(ip, endpoint.identity) for ip in endpoint.addresses},
    }


async def add(namespace: Namespaces) -> Endpoint:
    """An agent that adds a pod and ends."""
    async with agent(**DUAL) as hive:
        made = add_pod(hive, 1, namespace)
        assert (made.ipv6, made.ipv4) == made.addresses
        assert rows(hive) == rows_of(made)
        assert config_of(hive, made).ipv6 == made.ipv6
    return made


async def take_on_and_remove(before: Endpoint) -> None:
    """The next agent: what it finds, and what is left when the pod goes."""
    async with agent(**DUAL) as hive:
        endpoints, ipam = hive.get(Endpoints), hive.get(Ipam)
        (found,) = endpoints.all()
        assert (found.id, found.addresses) == (before.id, before.addresses)
        assert rows(hive) == rows_of(found)
        assert set(ipam.dump()) == set(map(str, found.addresses))
        assert endpoints.lookup(f"ipv6:{found.ipv6}") == found
        assert endpoints.delete(found) == ()
        assert rows(hive) == {"lxc": set(), "ipcache": set()}
        assert ipam.dump() == {}
        await hive.get(HostLinks).reap([found.ifindex])


def test_both_addresses_outlive_the_agent_and_go_with_the_pod() -> None:
    with node_namespace() as node, pods(1) as (pod,):
        made = node.run(partial(anyio.run, add, pod))
        node.run(partial(anyio.run, take_on_and_remove, made))


def spoil(endpoint: Endpoint) -> None:
    """The state file as a full disk leaves it."""
    path = STATE / str(endpoint.id) / "ep_config.json"
    path.write_bytes(path.read_bytes()[:100])


async def lose_the_link(before: Endpoint) -> None:
    """The next agent, during which the pod with unreadable state is deleted."""
    async with agent(**DUAL) as hive:
        restored, ipam, links = hive.get(RestoredEndpoints), hive.get(Ipam), hive.get(HostLinks)
        assert list(restored.quarantined) == [before.id]
        assert set(ipam.dump()) == set(map(str, before.addresses))
        assert rows(hive) == rows_of(before)
        await links.reap([before.ifindex])
        await to_thread.run_sync(eventually, lambda: not ipam.dump() and not list(STATE.iterdir()))
        assert rows(hive) == {"lxc": set(), "ipcache": set()}
        with map_by_id(hive.get(Maps).endpoints.id) as configs:
            assert list(configs.items()) == []


def test_addresses_of_an_unreadable_endpoint_are_free_after_its_link_is_deleted() -> None:
    with node_namespace() as node, pods(1) as (pod,):
        made = node.run(partial(anyio.run, add, pod))
        node.run(spoil, made)
        node.run(partial(anyio.run, lose_the_link, made))
