"""Host addresses in the real maps."""

from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface

import pytest

from cells import config, datapath, endpoint, kubernetes, maps, netlink
from cells.cluster import host_ip_sync, identity, ipcache
from cells.endpoint import host as host_endpoint
from cells.endpoint import restore as endpoint_restore
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.endpoints import LxcKey, LxcValue
from cells.netlink.links import HostLinks
from cells.node import devices, ipam, local_addresses, router, sysctl
from cells.node.local_addresses import LocalAddresses
from cells.node.router import Router
from cells.observe import controllers
from cells.policy import maps as policy_maps
from lifecycle import Hive, invoke
from lifecycle.testing import eventually
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel

CELLS = [
    each.cell
    for each in (
        config,
        controllers,
        datapath,
        devices,
        endpoint,
        endpoint_restore,
        host_endpoint,
        host_ip_sync,
        local_addresses,
        ipam,
        identity,
        ipcache,
        kubernetes,
        maps,
        netlink,
        policy_maps,
        router,
        sysctl,
    )
]
SETTINGS = {"ipv4-range": "10.0.1.0/24", "state-dir": "/run/cilium"}
NODE, NODE6 = IPv4Address("192.0.2.7"), IPv6Address("2001:db8::7")


def root(_router: Router, _links: HostLinks, _maps: Maps) -> None:
    """What the test needs of the hive."""


def local(opened: Maps) -> dict[str, LxcValue]:
    return {str(LxcKey.unpack(key).ip): LxcValue.unpack(value) for key, value in opened.lxc.items()}


def identities(opened: Maps) -> dict[str, int]:
    return {
        str(IpcacheKey.unpack(key).network): IpcacheValue.unpack(value).identity
        for key, value in opened.ipcache.items()
    }


async def test_addresses_of_the_node_are_in_the_maps_and_follow_it(in_node: None) -> None:
    async with Hive(*CELLS, invoke(root), settings=SETTINGS).started() as hive:
        opened, links, gateway = hive.get(Maps), hive.get(HostLinks), str(hive.get(Router).gateways[0])
        assert local(opened) == {gateway: LxcValue(flags=1)}
        assert identities(opened) == {"0.0.0.0/0": 2, f"{gateway}/32": 1}
        pod = LxcValue(ifindex=9, endpoint_id=7, identity=300)
        # the router has any address of the range
        ip = next(one for one in ("10.0.1.200", "10.0.1.201") if one != gateway)
        hive.get(LocalAddresses).put_endpoint([IPv4Address(ip)], pod)
        links.add_address(1, "lo", NODE)
        await eventually(lambda: f"{NODE}/32" in identities(opened))
        assert local(opened)[str(NODE)] == LxcValue(flags=1)
        assert identities(opened)[f"{NODE}/32"] == 1

        links.remove_address(1, "lo", IPv4Interface(NODE))
        await eventually(lambda: str(NODE) not in local(opened))
        assert set(identities(opened)) == {str(IPv4Network("0.0.0.0/0")), f"{gateway}/32"}
        assert local(opened)[ip].endpoint_id == 7


async def test_both_families_are_in_the_maps_and_verdicts_are_void_with_every_change(in_node: None) -> None:
    both = {**SETTINGS, "enable-ipv6": "true", "ipv6-range": "fd00:1::/112"}
    async with Hive(*CELLS, invoke(root), settings=both).started() as hive:
        opened, links = hive.get(Maps), hive.get(HostLinks)
        gateway6, gateway = map(str, hive.get(Router).gateways)
        assert local(opened) == dict.fromkeys((gateway6, gateway), LxcValue(flags=1))
        before = {"::/0": 10, "0.0.0.0/0": 9, f"{gateway6}/128": 1, f"{gateway}/32": 1}
        assert identities(opened) == before

        epochs = [epoch(opened)]
        links.add_address(1, "lo", NODE6)
        await eventually(lambda: f"{NODE6}/128" in identities(opened))
        assert local(opened)[str(NODE6)] == LxcValue(flags=1)
        epochs.append(epoch(opened))
        links.remove_address(1, "lo", IPv6Interface(NODE6))
        await eventually(lambda: str(NODE6) not in local(opened))
        epochs.append(epoch(opened))
        assert identities(opened) == before
        assert epochs == sorted(set(epochs))

    async with Hive(*CELLS, invoke(root), settings=SETTINGS).started() as hive:
        opened, gateway = hive.get(Maps), str(hive.get(Router).gateways[0])
        await eventually(lambda: set(local(opened)) == {gateway})
        await eventually(lambda: identities(opened) == {"0.0.0.0/0": 2, f"{gateway}/32": 1})


def epoch(opened: Maps) -> int:
    """The node's."""
    return int.from_bytes(opened.epoch.lookup(bytes(4)) or b"", "little")
