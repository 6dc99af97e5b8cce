"""Endpoints in real maps and on real links."""

import struct

import pytest
from anyio import to_thread

from cells.endpoint import EndpointError, Endpoints
from cells.maps.map import Map, open_map
from cells.maps.node_maps import Maps
from cells.maps.policy_maps import PolicyMaps
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.endpoints import EndpointConfig, LxcKey, LxcValue, PolicyEntry, PolicyKey
from cells.maps.records.flows import CtEntry, CtKey
from cells.netlink.links import HostLinks
from cells.node.ipam import Ipam
from cells.node.local_addresses import LocalAddresses
from cells.policy.maps import ALLOW_ALL
from lifecycle import Hive
from tests.kernel.endpoint.nodes import GLOBALS, STATE, add_pod, address_of, agent, link_request, pods
from tests.support.namespaces import in_node
from tests.support.waiting import eventually
from tests.unit.endpoint.fakes import create

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]


def filters(ifindex: int) -> list[str]:
    """Names of the BPF programs on a link's clsact ingress."""
    from pyroute2 import IPRoute

    with IPRoute() as route:
        found = route.get_filters(index=ifindex, parent=0xFFFFFFF2)
        options = [dict(each["attrs"]).get("TCA_OPTIONS") for each in found]
        return [dict(each["attrs"])["TCA_BPF_NAME"] for each in options if each is not None]


def used(hive: Hive) -> dict[str, object]:
    """Everything endpoints leave behind, as the kernel and the disk show it."""
    maps = hive.get(Maps)
    return {
        "lxc": list(maps.lxc.items()),
        "ipcache": list(maps.ipcache.items()),
        "configs": list(maps.endpoints.items()),
        "policies": sorted(path.name for path in GLOBALS.glob("cilium_policy_*")),
        "state": sorted(path.name for path in STATE.iterdir()),
        "addresses": hive.get(Ipam).dump(),
    }


def only(table: Map, key: CtKey) -> bool:
    """Whether the map has this entry and no other."""
    return [found for found, _ in table.items()] == [key.pack()]


@pytest.mark.usefixtures("in_node")
async def test_a_new_endpoint_is_in_every_map_as_documented() -> None:
    async with agent() as hive:
        with pods(1) as [pod]:
            made = add_pod(hive, 1, pod)
            ip = address_of(made)
            with open_map(GLOBALS / "cilium_lxc") as table:
                value = table.lookup(LxcKey(ip).pack())
            assert (
                value
                == LxcValue(
                    ifindex=made.ifindex,
                    endpoint_id=made.id,
                    mac=made.pod_mac,
                    node_mac=made.host_mac,
                    identity=made.identity,
                ).pack()
            )
            with open_map(GLOBALS / "cilium_ipcache") as table:
                value = table.lookup(IpcacheKey.host(ip).pack())
            assert value == IpcacheValue(made.identity).pack()
            with open_map(GLOBALS / "hive_endpoints") as table:
                value = table.lookup(struct.pack("<I", made.ifindex))
            expected = EndpointConfig(
                ipv4=ip,
                endpoint_id=made.id,
                identity=made.identity,
                host_mac=made.host_mac,
                pod_mac=made.pod_mac,
            )
            assert value == expected.pack()
            with open_map(GLOBALS / f"cilium_policy_{made.id:05d}") as table:
                rules = {PolicyKey.unpack(k): PolicyEntry.unpack(v) for k, v in table.items()}
            assert rules == ALLOW_ALL
            assert await to_thread.run_sync(filters, made.ifindex) == ["cil_from_container"]
            assert [path.name for path in STATE.iterdir()] == [str(made.id)]


@pytest.mark.usefixtures("in_node")
async def test_a_deleted_endpoint_leaves_nothing() -> None:
    async with agent() as hive:
        before = used(hive)
        with pods(3) as three:
            made = [add_pod(hive, number, pod) for number, pod in enumerate(three, 1)]
            for each in made:
                assert hive.get(Endpoints).delete(each) == ()
            await hive.get(HostLinks).reap([each.ifindex for each in made])
        assert used(hive) == before


@pytest.mark.usefixtures("in_node")
async def test_a_link_that_vanished_leaves_nothing_of_its_endpoint() -> None:
    async with agent() as hive:
        before = used(hive)
        with pods(1) as [pod]:
            request = link_request(hive, 1, pod)
            await hive.get(HostLinks).reap([request.ifindex])
            with pytest.raises(EndpointError, match="No such device") as caught:
                create(hive.get(Endpoints), request)
            assert caught.value.status == 500
            assert request.ipv4 is not None
            hive.get(Ipam).release(request.ipv4, request.pool)
        assert used(hive) == before


@pytest.mark.usefixtures("in_node")
async def test_without_free_endpoint_ids_creation_fails_with_a_reason() -> None:
    async with agent() as hive:
        endpoints = hive.get(Endpoints)
        with pods(1) as [pod]:
            request = link_request(hive, 1, pod)
            policies = hive.get(PolicyMaps)
            policies._spare.clear()
            policies._uncreated.clear()
            with pytest.raises(EndpointError, match="no more endpoint IDs available"):
                create(endpoints, request)


@pytest.mark.usefixtures("in_node")
async def test_the_flows_of_a_deleted_endpoint_are_forgotten() -> None:
    async with agent() as hive:
        maps = hive.get(Maps)
        with pods(2) as two:
            first, second = (add_pod(hive, number, pod) for number, pod in enumerate(two, 1))
            one, other = address_of(first), address_of(second)
            mine = [CtKey(one, other, 80, 40000, 6), CtKey(other, one, 80, 40001, 6)]
            stranger = CtKey(other, other, 80, 40002, 6)
            for key in [*mine, stranger]:
                maps.ct4_tcp.update(key.pack(), CtEntry(lifetime=2**31).pack())
                maps.ct4_any.update(key.pack(), CtEntry(lifetime=2**31).pack())
            hive.get(Endpoints).delete(first)
            await to_thread.run_sync(eventually, lambda: only(maps.ct4_tcp, stranger))
            await to_thread.run_sync(eventually, lambda: only(maps.ct4_any, stranger))


@pytest.mark.usefixtures("in_node")
async def test_an_address_of_the_node_stays_the_nodes() -> None:
    async with agent() as hive:
        maps = hive.get(Maps)
        with pods(1) as [pod]:
            request = link_request(hive, 1, pod)
            assert request.ipv4 is not None
            key, host = LxcKey(request.ipv4).pack(), LxcValue(flags=1).pack()
            hive.get(LocalAddresses).put_host(request.ipv4)
            made = create(hive.get(Endpoints), request)
            assert maps.lxc.lookup(key) == host
            hive.get(Endpoints).delete(made)
            assert maps.lxc.lookup(key) == host
