"""A node with real links: the datapath's hive, cilium_host and cilium_net, and pods in namespaces.

The work of other cells is done here directly, as briefly as possible.
"""

import os
import struct
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path

from cells import config, datapath, maps, netlink
from cells.datapath.datapath import Datapath
from cells.maps.map import Map, create_map
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.endpoints import (
    LXC_HOST,
    EndpointConfig,
    LxcKey,
    LxcValue,
    NodeConfig,
    PolicyEntry,
    PolicyKey,
)
from cells.maps.records.flows import MetricsKey, MetricsValue
from cells.maps.specs import policy_spec
from cells.netlink.connection import open_socket
from cells.netlink.links import HostLinks
from cells.netlink.messages import VethPair
from cells.netlink.namespaces import PodLink
from cells.netlink.rows import parse_mac
from lifecycle import Hive, invoke
from tests.support.all_maps import every_map
from tests.support.namespaces import Namespaces, inside, new_netns

ROUTER, ROUTER6 = IPv4Address("10.1.0.1"), IPv6Address("fd00:10:1::1")
PODS, PODS6 = IPv4Network("10.1.0.0/16"), IPv6Network("fd00:10:1::/64")
STATE = Path("/run/cilium")


@dataclass(frozen=True, slots=True)
class LivePod:
    """A pod with its link up."""

    net: Namespaces
    ip: IPv4Address
    ifindex: int
    link: str
    policy: Map
    ip6: IPv6Address | None = None

    def address(self, version: int) -> str:
        """Return the pod's address of that IP version."""
        return str(self.ip if version == 4 else self.ip6)

    def sent_by_link(self) -> int:
        """Return the number of packets that left through the host's end of its link."""
        return int(Path(f"/sys/class/net/{self.link}/statistics/tx_packets").read_text(encoding="ascii"))


@dataclass(frozen=True, slots=True)
class LiveNode:
    """The parts of a started hive that tests use."""

    datapath: Datapath
    maps: Maps
    links: HostLinks

    def add_host(self) -> None:
        """Create cilium_host with the router's address, cilium_net, the route to pods, and their programs."""
        for command in (
            "link add cilium_host type veth peer name cilium_net",
            "link set cilium_host arp off up",
            "link set cilium_net arp off up",
            f"address add {ROUTER}/32 dev cilium_host",
            f"route add {PODS} dev cilium_host src {ROUTER}",
            f"address add {ROUTER6}/128 dev cilium_host nodad",
            f"route add {PODS6} dev cilium_host src {ROUTER6}",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        for device in ("all", "cilium_host", "cilium_net"):
            Path(f"/proc/sys/net/ipv4/conf/{device}/rp_filter").write_text("0", encoding="ascii")
        for forwarding in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            Path(f"/proc/sys/net/{forwarding}").write_text("1", encoding="ascii")
        host, net = self.links.find("cilium_host"), self.links.find("cilium_net")
        assert host is not None
        assert net is not None
        node_config = NodeConfig(
            *(ROUTER, host.ifindex, host.mac, net.ifindex, net.mac, PODS), router_ip6=ROUTER6, pod_cidr6=PODS6
        )
        self.datapath.set_node(node_config)
        self.datapath.attach_host(host.ifindex, net.ifindex)
        self._own(ROUTER)
        self._own(ROUTER6)

    def add_address(self, *addresses: str) -> None:
        """Add addresses of the node."""
        for address in addresses:
            length = 128 if ":" in address else 32
            subprocess.run(["ip", "address", "add", f"{address}/{length}", "dev", "lo"], check=True)
            self._own(ip_address(address))

    def add_route_outside(self, address: str) -> None:
        """Create a device, and the route to the address through it."""
        for command in (
            "link add outside type veth peer name beyond",
            "link set outside up",
            "link set beyond up",
            f"route add {address} dev outside",
        ):
            subprocess.run(["ip", *command.split()], check=True)

    def _own(self, address: IPv4Address | IPv6Address) -> None:
        self.maps.lxc.update(LxcKey(address).pack(), LxcValue(flags=LXC_HOST).pack())
        self.maps.ipcache.update(IpcacheKey.host(address).pack(), IpcacheValue(1).pack())

    def add_pod(self, number: int, *, ipv6: bool = False) -> LivePod:
        """Add a pod with an allow-all policy."""
        ip, identity = PODS[number], 1000 + number
        ip6 = PODS6[number] if ipv6 else None
        addresses = (ip, ip6) if ip6 else (ip,)
        host_mac, pod_mac = (parse_mac(f"0a:00:00:00:{end:02x}:{number:02x}") for end in (1, 2))
        net, name = new_netns(), f"lxc{number:012x}"
        link = self.links.create_veth(VethPair(name, host_mac, "eth0", pod_mac, 1500, net.net))
        with inside(net):
            fd = open_socket()
        PodLink(fd).configure(link.pod_ifindex, "eth0", addresses, (ROUTER, ROUTER6)[: len(addresses)], 1500)
        os.close(fd)
        policy = create_map(policy_spec(number, 16384))
        self.maps.policies.update(struct.pack("<I", number), struct.pack("<I", policy.fd))
        for egress in (False, True):
            key = PolicyKey(0, egress)
            policy.update(key.pack(), PolicyEntry().pack(key))
        row = EndpointConfig(*(ip, number, identity, host_mac, pod_mac, 0), ip6 or IPv6Address(0))
        self.maps.endpoints.update(struct.pack("<I", link.host_ifindex), row.pack())
        address = LxcValue(link.host_ifindex, number, pod_mac, host_mac, identity)
        for each in addresses:
            self.maps.lxc.update(LxcKey(each).pack(), address.pack())
            self.maps.ipcache.update(IpcacheKey.host(each).pack(), IpcacheValue(identity).pack())
        self.datapath.attach_endpoint(link.host_ifindex)
        self.links.activate(link.host_ifindex, f"hive endpoint {number}")
        return LivePod(net, ip, link.host_ifindex, name, policy, ip6)

    def drops(self, *, ipv6: bool = False) -> dict[int, int]:
        """Return dropped packets by reason, without IPv6 that a pod's kernel sends by itself."""
        spontaneous = {132, 137} if ipv6 else set()
        rows = {MetricsKey.unpack(k): MetricsValue.unpack(v) for k, v in self.maps.metrics.items()}
        return {
            key.reason: value.packets
            for key, value in rows.items()
            if key.reason not in {0, 139} | spontaneous
        }


def root(_datapath: Datapath) -> None:
    """List the dependencies of the tests."""


@asynccontextmanager
async def running(uses: Callable[[Maps], None] = every_map, /, **settings: object) -> AsyncIterator[LiveNode]:
    """Run the datapath's hive; its programs and maps stay in the kernel afterwards."""
    small: dict[str, object] = {
        "bpf-ct-global-tcp-max": 4096,
        "bpf-ct-global-any-max": 4096,
        "bpf-nat-global-max": 4096,
        "state-dir": STATE,
    }
    given = {name.replace("_", "-"): value for name, value in settings.items()}
    hive = Hive(
        config.cell, maps.cell, netlink.cell, datapath.cell, invoke(root, uses), settings=small | given
    )
    async with hive.started():
        yield LiveNode(hive.get(Datapath), hive.get(Maps), hive.get(HostLinks))
