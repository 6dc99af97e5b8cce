"""Two pods on a node with a tunnel, and pods of another node behind it."""

from __future__ import annotations

from ipaddress import IPv4Address, ip_address, ip_network

from scapy.packet import Packet

from cells.maps.records.cluster import (
    TUNNEL_OVER_IPV6,
    IpcacheKey,
    IpcacheValue,
    NodeKey,
    NodeValue,
    TunnelConfig,
    TunnelKey,
    TunnelValue,
)
from tests.kernel.datapath.world import Outcome, World
from tests.kernel.datapath_overlay.recorder import Recorder, recorded_object

OTHER_NODE, STRANGER = "192.168.7.8", "192.168.7.66"
OTHER_NODE6, STRANGER6, OWN6 = "2001:db8:7::8", "2001:db8:7::66", "2001:db8:7::7"
REMOTE, REMOTE6 = "10.2.0.5", "fd00:10:2::5"
UNKNOWN_REMOTE = "10.2.0.99"
REMOTE_IDENTITY = 4711
IFINDEX, MTU, PORT = 77, 1450, 8472
SKIP_TUNNEL = 1


class OverlayWorld(World):
    """The world with a tunnel to another node."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        super().__init__(None, recorded_object(), self.recorder.map)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.recorder.map.close()

    def reset(self) -> None:
        """Reset, with the tunnel up."""
        super().reset()
        self.recorder.nothing()
        self.set_tunnel(on=True)
        for ip in (REMOTE, REMOTE6):
            self.remote(ip)
        self.maps["cilium_node_map_v2"].update(NodeKey(ip_address(OTHER_NODE)).pack(), NodeValue(1).pack())
        value = TunnelValue(IPv4Address(OTHER_NODE)).pack()
        for network in ("10.2.0.0", "fd00:10:2::"):
            self.maps["cilium_tunnel_map"].update(TunnelKey(ip_address(network)).pack(), value)

    def set_tunnel(self, *, on: bool, flags: int = 0, port: int = PORT) -> None:
        """Set routing-mode to tunnel or native."""
        row = TunnelConfig(IFINDEX, MTU, port, flags=flags) if on else TunnelConfig()
        self.maps["hive_tunnel"].update(bytes(4), row.pack())
        self.bump(0)

    def over_ipv6(self, source: str = OWN6, port: int = PORT) -> None:
        """Set underlay-protocol=ipv6: the ipcache has pods' identities, and ranges with their nodes."""
        row = TunnelConfig(IFINDEX, MTU, port, ip_address(source), TUNNEL_OVER_IPV6)
        self.maps["hive_tunnel"].update(bytes(4), row.pack())
        value = TunnelValue(ip_address(OTHER_NODE6)).pack()
        for network in ("10.2.0.0", "fd00:10:2::"):
            self.maps["cilium_tunnel_map"].update(TunnelKey(ip_address(network)).pack(), value)
        for ip in (REMOTE, REMOTE6):
            self.identify(ip, REMOTE_IDENTITY)
        self.maps["cilium_node_map_v2"].update(NodeKey(ip_address(OTHER_NODE6)).pack(), NodeValue(1).pack())
        self.bump(0)

    def remote(self, ip: str, identity: int = REMOTE_IDENTITY, flags: int = 0) -> None:
        """Write an ipcache entry for an address of the other node."""
        value = IpcacheValue(identity, IPv4Address(OTHER_NODE), 0, flags)
        self.maps["cilium_ipcache"].update(IpcacheKey.of(ip_network(ip)).pack(), value.pack())
        self.bump(0)

    def tunnel_brings(
        self, packet: Packet | bytes, *, vni: int = REMOTE_IDENTITY, node: str = OTHER_NODE
    ) -> Outcome:
        """Receive a packet from the tunnel, with this outer source address and identity."""
        self.recorder.comes_from(node, vni)
        return self._run("hive_from_vxlan", packet, 1)
