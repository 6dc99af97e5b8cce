"""The part of an agent that endpoints need, and pods' links, in namespaces of the test."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from cells import config, datapath, endpoint, kubernetes, maps, netlink
from cells.cluster import identity, ipcache
from cells.endpoint import Endpoint, EndpointRequest, Endpoints
from cells.endpoint import host as host_endpoint
from cells.endpoint import restore as endpoint_restore
from cells.endpoint.restore import RegeneratedEndpoints
from cells.netlink.links import HostLinks
from cells.netlink.messages import VethPair
from cells.netlink.rows import random_mac
from cells.node import devices, ipam, local_addresses
from cells.node.ipam import Ipam
from cells.observe import controllers
from cells.policy import maps as policy_maps
from lifecycle import Hive, invoke
from tests.support.namespaces import Namespaces, new_netns
from tests.unit.endpoint.fakes import create

SETTINGS: Mapping[str, object] = {
    "ipv4-range": "10.77.0.0/24",
    "bpf-ct-global-tcp-max": 1024,
    "bpf-ct-global-any-max": 1024,
    "bpf-policy-map-max": 256,
    "policy-map-pool": 8,
}
DUAL: Mapping[str, object] = {"enable-ipv6": True, "ipv6-range": "fd00:77::/112"}
"""Settings of an agent with both families."""

GLOBALS = Path("/sys/fs/bpf/tc/globals")
STATE = Path("/run/cilium/state")


CELLS = (
    *(config.cell, netlink.cell, maps.cell, devices.cell, datapath.cell, ipam.cell),
    *(controllers.cell, policy_maps.cell, identity.cell, ipcache.cell, kubernetes.cell, endpoint.cell),
    local_addresses.cell,
    host_endpoint.cell,
    endpoint_restore.cell,
)


def needed(_: RegeneratedEndpoints) -> None:
    """Depend on restore, and so on everything before it."""


@asynccontextmanager
async def agent(**settings: object) -> AsyncIterator[Hive]:
    """Run an agent without servers until the block ends."""
    given = {**SETTINGS, **{name.replace("_", "-"): value for name, value in settings.items()}}
    async with Hive(*CELLS, invoke(needed), settings=given).started() as hive:
        yield hive


@contextmanager
def pods(count: int) -> Iterator[list[Namespaces]]:
    """Create network namespaces of pods."""
    made = [new_netns() for _ in range(count)]
    try:
        yield made
    finally:
        for pod in made:
            pod.close()


def link_request(hive: Hive, number: int, pod: Namespaces) -> EndpointRequest:
    """Create a link into the pod and allocate addresses; return the request for its endpoint."""
    name, pod_mac, host_mac = f"lxc{number:012x}", random_mac(), random_mac()
    created = hive.get(HostLinks).create_veth(VethPair(name, host_mac, "eth0", pod_mac, 1500, pod.net))
    got = hive.get(Ipam).allocate_next(f"default/web-{number}")
    ips = {each.ip.version: each.ip for each in got}
    ipv4, ipv6 = ips.get(4), ips.get(6)
    assert not isinstance(ipv4, IPv6Address)
    assert not isinstance(ipv6, IPv4Address)
    return EndpointRequest(
        container_id=f"cid{number}",
        container_ifname="eth0",
        ifname=name,
        ifindex=created.host_ifindex,
        pod_mac=pod_mac,
        host_mac=host_mac,
        ipv4=ipv4,
        pool=hive.get(Ipam).default_pool,
        ipv6=ipv6,
        ipv6_pool=hive.get(Ipam).default_pool,
        pod_name=f"web-{number}",
        pod_namespace="default",
    )


def add_pod(hive: Hive, number: int, pod: Namespaces) -> Endpoint:
    """Create the pod as ADD does: link, address, endpoint, link up."""
    made = create(hive.get(Endpoints), link_request(hive, number, pod))
    hive.get(HostLinks).activate(made.ifindex, f"hive endpoint {made.id}")
    return made


def address_of(made: Endpoint) -> IPv4Address:
    """Return the endpoint's address, which must be set."""
    assert made.ipv4 is not None
    return made.ipv4
