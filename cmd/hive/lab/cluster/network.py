"""The network between lab nodes: a bridge for each segment, and a router between segments.

It is a network namespace, pinned below /run/hive-lab/<cluster>.network. Nodes 1, 2, … are on the segments in
turn; segment s is 192.168.(50+s).0/24 and fd50:(1+s)::/64, with the router at the first address of both.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from hive.lab.namespaces import Namespaces, hold, mounted_below, new_netns, release
from hive.lab.node import ROOT, LabError

MOST_SEGMENTS = 8


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a node: its number, from 1, and its segment, from 0."""

    number: int
    segment: int

    @property
    def ipv4(self) -> str:
        """The node's IPv4 address, in a /24."""
        return f"192.168.{50 + self.segment}.{10 + self.number}"

    @property
    def ipv6(self) -> str:
        """The node's IPv6 address, in a /64."""
        return f"fd50:{self.segment + 1}::{10 + self.number:x}"

    @property
    def routers(self) -> tuple[str, str]:
        """The segment's default gateways."""
        return f"192.168.{50 + self.segment}.1", f"fd50:{self.segment + 1}::1"

    @property
    def ranges(self) -> tuple[str, str]:
        """The networks of the segment."""
        return f"192.168.{50 + self.segment}.0/24", f"fd50:{self.segment + 1}::/64"

    @property
    def pod_cidrs(self) -> tuple[str, str]:
        """The ranges of the node's pods."""
        return f"10.244.{self.number}.0/24", f"fd00:10:244:{self.number:x}::/112"


@dataclass(frozen=True, slots=True)
class LabNetwork:
    """The network of the cluster called ``name``, whether it exists or not."""

    name: str

    @property
    def directory(self) -> Path:
        """Directory of the network; no node can have its name."""
        return ROOT / f"{self.name}.network"

    @property
    def exists(self) -> bool:
        """Whether it is complete."""
        return (self.directory / "segments").exists()

    @property
    def segments(self) -> int:
        """Number of segments."""
        return int((self.directory / "segments").read_text())

    def place(self, number: int) -> Place:
        """Return the place of node ``number``."""
        return Place(number, (number - 1) % self.segments)

    def open(self) -> Namespaces:
        """Open its namespace. Raises LabError if it does not exist."""
        if not self.exists:
            raise LabError(f"there is no network of nodes named {self.name}: hive lab up --nodes 2 makes one")
        return Namespaces.open(self.directory / "net")

    def route(self, place: Place) -> None:
        """Add the routes to a node's pods to the router."""
        with self.open() as network:
            network.run(_route, place)


def make_network(network: LabNetwork, segments: int) -> None:
    """Create the network. A failure leaves nothing behind."""
    network.directory.mkdir(mode=0o755)
    try:
        with new_netns() as fresh:
            hold(fresh.net, network.directory / "net")
            fresh.run(_bridges, segments)
        (network.directory / "segments").write_text(str(segments))
    except BaseException:
        remove_network(network)
        raise


def remove_network(network: LabNetwork) -> None:
    """Remove the network; a missing one is ignored."""
    if mounted_below(network.directory):
        release(network.directory / "net")
    for name in ("net", "segments"):
        (network.directory / name).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        network.directory.rmdir()


def uplink(network: int, place: Place) -> None:
    """Inside a node: create the link to the network's namespace, with addresses and default routes."""
    from pyroute2 import IPRoute

    ipv4, ipv6 = place.routers
    with IPRoute() as ip:
        peer = {"ifname": f"node-{place.number}", "net_ns_fd": network}
        ip.link("add", ifname="uplink", kind="veth", peer=peer)
        (index,) = ip.link_lookup(ifname="uplink")
        ip.addr("add", index=index, address=place.ipv4, prefixlen=24)
        ip.addr("add", index=index, address=place.ipv6, prefixlen=64, flags=0x02)  # no duplicate detection
        ip.link("set", index=index, state="up")
        ip.route("add", dst="default", gateway=ipv4)
        ip.route("add", dst="default", gateway=ipv6, oif=index)


def attach_uplink(place: Place) -> None:
    """Inside the network: attach the node's link to the bridge of its segment."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        (bridge,) = ip.link_lookup(ifname=f"segment-{place.segment}")
        (index,) = ip.link_lookup(ifname=f"node-{place.number}")
        ip.link("set", index=index, master=bridge, state="up")


def _bridges(segments: int) -> None:
    from pyroute2 import IPRoute

    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    Path("/proc/sys/net/ipv6/conf/all/forwarding").write_text("1")
    with IPRoute() as ip:
        ip.link("set", index=ip.link_lookup(ifname="lo")[0], state="up")
        for segment in range(segments):
            ipv4, ipv6 = Place(0, segment).routers
            ip.link("add", ifname=f"segment-{segment}", kind="bridge")
            (index,) = ip.link_lookup(ifname=f"segment-{segment}")
            ip.addr("add", index=index, address=ipv4, prefixlen=24)
            ip.addr("add", index=index, address=ipv6, prefixlen=64, flags=0x02)
            ip.link("set", index=index, state="up")


def _route(place: Place) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        for destination, gateway in zip(place.pod_cidrs, (place.ipv4, place.ipv6), strict=True):
            ip.route("replace", dst=destination, gateway=gateway)
