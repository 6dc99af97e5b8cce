"""Devices, addresses and routes of the node, by pyroute2 in worker threads.

For:    work outside a pod's ADD and the start, such as repairs.
Needs:  pyroute2, loaded at the first call (0.1 s, 13 MB).   Gives: NodeNetwork.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread

from cells.node.netlink.connection import NetlinkError
from cells.node.netlink.messages import IPAddress, IPInterface, IPNetwork, VethPair

if TYPE_CHECKING:
    from pyroute2 import IPRoute

T = TypeVar("T")

TX_QUEUE_LENGTH = 1000
_IFF_NOARP, _IFA_F_NODAD = 0x80, 0x02
_LINK_SCOPE, _UNIVERSE = 253, 0
_GONE = frozenset({3, 19, 99})  # ESRCH, ENODEV, EADDRNOTAVAIL


class NodeNetwork:
    """Writes to the node's network namespace. Methods raise NetlinkError when the kernel refuses."""

    async def create_veth(self, pair: VethPair) -> None:
        """Create a pair with both ends here, down. EEXIST: either name is taken."""
        await self._do(
            f"create veth {pair.host_name} with peer {pair.pod_name}",
            lambda ip: ip.link(
                "add",
                ifname=pair.host_name,
                kind="veth",
                address=pair.host_mac.hex(":"),
                mtu=pair.mtu,
                peer={"ifname": pair.pod_name, "address": pair.pod_mac.hex(":"), "mtu": pair.mtu},
            ),
        )

    async def set_device(self, ifindex: int, name: str, mtu: int) -> None:
        """Make a link a node device: MTU, queue length 1000, no ARP, up. Repeating it changes nothing."""
        flags = 1 | _IFF_NOARP
        await self._do(
            f"set up {name}",
            lambda ip: ip.link(
                "set", index=ifindex, mtu=mtu, txqlen=TX_QUEUE_LENGTH, flags=flags, change=flags
            ),
        )

    async def add_address(self, ifindex: int, name: str, address: IPAddress) -> None:
        """Give a link an address of its own, as a /32 or /128. EEXIST when it has it."""
        more = {"flags": _IFA_F_NODAD} if address.version == 6 else {}
        await self._do(
            f"add address {address} to {name}",
            lambda ip: ip.addr(
                "add", index=ifindex, address=str(address), prefixlen=address.max_prefixlen, **more
            ),
        )

    async def remove_address(self, ifindex: int, name: str, address: IPInterface) -> None:
        """Take an address off a link, and the route to it alone; what is gone is fine."""
        await self._do(
            f"remove address {address} from {name}",
            lambda ip: ip.addr(
                "del", index=ifindex, address=str(address.ip), prefixlen=address.network.prefixlen
            ),
            gone_is_fine=True,
        )
        await self.remove_route(ifindex, type(address.network)(address.ip))

    async def set_route(
        self, ifindex: int, destination: IPNetwork, gateway: IPAddress | None, source: IPAddress | None
    ) -> None:
        """A route of the main table, through ``gateway`` or on the link; in place of another one to there."""
        route: dict[str, Any] = {"dst": str(destination), "oif": ifindex, "proto": "boot"}
        route["scope"] = _LINK_SCOPE if gateway is None else _UNIVERSE
        if gateway is not None:
            route["gateway"] = str(gateway)
        if source is not None:
            route["prefsrc"] = str(source)
        await self._do(f"set route {destination}", lambda ip: ip.route("replace", **route))

    async def remove_route(self, ifindex: int, destination: IPNetwork) -> None:
        """Remove a route of the main table over a link; one that is gone is fine."""
        await self._do(
            f"remove route {destination}",
            lambda ip: ip.route("del", dst=str(destination), oif=ifindex),
            gone_is_fine=True,
        )

    async def _do(
        self, what: str, work: Callable[["IPRoute"], object], *, gone_is_fine: bool = False
    ) -> None:
        await anyio.to_thread.run_sync(_call, what, work, gone_is_fine)


def _call(what: str, work: Callable[["IPRoute"], object], gone_is_fine: bool) -> None:
    from pyroute2 import IPRoute
    from pyroute2 import NetlinkError as Refused

    try:
        with IPRoute() as ip:
            work(ip)
    except Refused as error:
        if not (gone_is_fine and error.code in _GONE):
            raise NetlinkError(error.code, what) from error
