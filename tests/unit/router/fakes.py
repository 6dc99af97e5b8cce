"""The node's links as the router reads them, in memory."""

from collections.abc import Iterable
from ipaddress import ip_interface

from msgspec.structs import replace

from cells.netlink.connection import NetlinkError
from cells.netlink.messages import IPAddress, IPInterface, IPNetwork, VethPair
from cells.netlink.rows import LinkInfo, RouteInfo


def link(ifindex: int, name: str, peer: int) -> LinkInfo:
    """Return one end of a pair in the router's desired state."""
    return LinkInfo(
        ifindex=ifindex,
        name=name,
        mac=bytes(6),
        mtu=1500,
        kind="veth",
        alias="",
        up=True,
        arp=False,
        peer_ifindex=peer,
        link_netnsid=None,
        group=0,
        tx_queue_length=1000,
    )


HOST, NET = link(2, "cilium_host", 3), link(3, "cilium_net", 2)


class FakeLinks:
    """Links and addresses in memory; ``done`` lists the requests."""

    def __init__(self, *links: LinkInfo) -> None:
        self.found = {each.name: each for each in links}
        self.present: dict[int, list[IPInterface]] = {}
        self.routed: list[RouteInfo] = []
        self.done: list[str] = []
        self.fast = False

    def find(self, name: str) -> LinkInfo | None:
        return self.found.get(name)

    def create_veth(self, pair: VethPair) -> None:
        assert not {pair.host_name, pair.pod_name} & self.found.keys()
        self.done.append("create")
        host, net = link(12, pair.host_name, 13), link(13, pair.pod_name, 12)
        for end, mac in ((host, pair.host_mac), (net, pair.pod_mac)):
            self.found[end.name] = replace(end, mac=mac, mtu=pair.mtu, up=False, arp=True)

    def set_device(self, ifindex: int, name: str, mtu: int) -> None:
        assert self.found[name].ifindex == ifindex
        self.done.append(f"set {name} {mtu}")
        self.found[name] = replace(self.found[name], mtu=mtu, up=True, arp=False, tx_queue_length=1000)

    def addresses(self) -> dict[int, list[IPInterface]]:
        return {ifindex: list(addresses) for ifindex, addresses in self.present.items()}

    def add_address(self, ifindex: int, name: str, address: IPAddress) -> None:
        self.done.append(f"add {address}")
        self.present.setdefault(ifindex, []).append(ip_interface(address))

    def remove_address(self, ifindex: int, name: str, address: IPInterface) -> None:
        if self.fast:
            raise NetlinkError(16, f"remove address {address} from {name}")
        self.done.append(f"remove {address}")
        self.present[ifindex].remove(address)

    def set_route(
        self, ifindex: int, destination: IPNetwork, gateway: IPAddress | None, source: IPAddress | None
    ) -> None:
        self.done.append(f"route {destination} via {gateway} src {source}")
        self.routed = [each for each in self.routed if each.destination != destination]
        self.routed.append(RouteInfo(ifindex, destination, gateway, source, by_kernel=False))

    async def routes(self, ifindex: int) -> list[RouteInfo]:
        return [each for each in self.routed if each.ifindex == ifindex]

    def remove_route(self, ifindex: int, network: IPNetwork) -> None:
        self.done.append(f"unroute {network}")
        self.routed = [each for each in self.routed if each.destination != network]

    async def reap(self, ifindexes: Iterable[int]) -> None:
        vanished = set(ifindexes)
        self.done.extend(f"delete {each.name}" for each in self.found.values() if each.ifindex in vanished)
        self.found = {name: each for name, each in self.found.items() if each.ifindex not in vanished}
