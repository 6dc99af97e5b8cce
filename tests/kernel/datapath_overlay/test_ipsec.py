"""Packets of each local sender that are marked for IPsec encryption."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, ip_address, ip_network
from itertools import product

import pytest
from scapy.layers.l2 import Ether

from cells.cluster.encryption import UNANNOUNCED_KEY
from cells.datapath.settings import ProgramSettings
from cells.maps.records.cluster import IpcacheKey, IpcacheValue, TunnelKey, TunnelValue
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from tests.kernel.datapath.packets import from_host, from_pod, udp
from tests.kernel.datapath.world import (
    EGRESS,
    INGRESS,
    NODE,
    NODE6,
    OK,
    OUTSIDE,
    OUTSIDE6,
    REDIRECT,
    ROUTER,
    ROUTER6,
    A,
    B,
    Outcome,
    World,
)
from tests.kernel.datapath_overlay.recorder import Recorder, recorded_object
from tests.kernel.datapath_overlay.world import OTHER_NODE, REMOTE, REMOTE6, REMOTE_IDENTITY, OverlayWorld
from tests.support.namespaces import need_root

BY_PROXY_FOR_A, BY_INGRESS_PROXY = 0x0B00 | A.identity << 16, 0x0A00
FOR_NODE_1_WITH_KEY_3 = 0x00013E00
DECRYPTED = 0x0D00
FRAME = Ether(src="0e:00:00:00:00:01", dst="0e:00:00:00:00:02")
UNENCRYPTED = 195


class IpsecWorld(OverlayWorld):
    """The overlay's world, with programs that mark for the kernel; the pod of the other node has key 4."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        settings = ProgramSettings(marks_for_xfrm=True)
        World.__init__(self, settings, recorded_object(), self.recorder.map)

    def reset(self) -> None:
        super().reset()
        self.maps["hive_pod_networks"].clear()
        self.announce(4)
        self.use_key(3)

    def announce(self, key: int) -> None:
        """Have the other node announce this key for its pod."""
        self.know(REMOTE, IpcacheValue(REMOTE_IDENTITY, IPv4Address(OTHER_NODE), key))

    def know(self, ip: str, value: IpcacheValue | None) -> None:
        """Have the ipcache know this of an address; None: nothing."""
        self._put("cilium_ipcache", ip, None if value is None else value.pack())

    def pods_have(self, network: str, *, elsewhere: bool | None) -> None:
        """Have pods' addresses in a network, of other nodes or of this one; None: in no such."""
        self._put("hive_pod_networks", network, None if elsewhere is None else bytes([elsewhere]))

    def _put(self, name: str, network: str, value: bytes | None) -> None:
        key, table = IpcacheKey.of(ip_network(network)).pack(), self.maps[name]
        if value is not None:
            table.update(key, value)
        elif table.lookup(key) is not None:
            table.delete(key)
        self.bump(0)

    def give_range(self, *, known: bool) -> None:
        """Whether the tunnel knows which node has the range of the other's pods."""
        for network in ("10.2.0.0", "fd00:10:2::"):
            key = TunnelKey(ip_address(network)).pack()
            if known:
                self.maps["cilium_tunnel_map"].update(key, TunnelValue(IPv4Address(OTHER_NODE)).pack())
            elif self.maps["cilium_tunnel_map"].lookup(key) is not None:
                self.maps["cilium_tunnel_map"].delete(key)
        self.bump(0)

    def leaves(self, packet: bytes, mark: int = 0) -> Outcome:
        """The node sends a packet out of a native device."""
        return self._run("hive_to_device", packet, 1, mark)

    def use_key(self, spi: int) -> None:
        self.maps["cilium_encrypt_state"].update(bytes(4), bytes([spi]))
        self.bump(0)


@pytest.fixture(scope="module")
def loaded() -> Iterator[IpsecWorld]:
    need_root()
    with IpsecWorld() as world:
        yield world


@pytest.fixture
def ipsec(loaded: IpsecWorld) -> IpsecWorld:
    loaded.reset()
    return loaded


def test_a_pod_s_packets_are_marked_with_the_node_and_the_older_key(ipsec: IpsecWorld) -> None:
    for _ in range(2):  # a new flow, and a known one
        sent = ipsec.pod_sends(A, from_pod(A) / udp(A.ip, REMOTE))
        assert (sent.action, sent.mark) == (OK, FOR_NODE_1_WITH_KEY_3)


def test_what_is_for_a_node_that_announces_no_key_is_marked_with_the_own_one(ipsec: IpsecWorld) -> None:
    ipsec.announce(UNANNOUNCED_KEY)
    for own in (1, 3, 15):
        ipsec.use_key(own)
        sent = ipsec.pod_sends(A, from_pod(A) / udp(A.ip, REMOTE))
        assert (sent.action, sent.mark) == (OK, 0x00010E00 | own << 12)
    ipsec.use_key(0)
    assert ipsec.pod_sends(A, from_pod(A) / udp(A.ip, REMOTE)).dropped == (UNENCRYPTED, EGRESS)


@pytest.mark.parametrize("mark", [BY_PROXY_FOR_A, BY_INGRESS_PROXY])
def test_proxied_packets_are_marked_with_the_node_and_key(ipsec: IpsecWorld, mark: int) -> None:
    sent = ipsec.host_sends(from_host() / udp(A.ip, REMOTE), mark=mark)
    assert (sent.action, sent.mark) == (OK, FOR_NODE_1_WITH_KEY_3)


def test_without_a_key_pods_send_nothing_there_and_the_host_sends_in_clear(ipsec: IpsecWorld) -> None:
    ipsec.use_key(0)
    assert ipsec.pod_sends(A, from_pod(A) / udp(A.ip, REMOTE)).dropped == (UNENCRYPTED, EGRESS)
    assert ipsec.host_sends(from_host() / udp(A.ip, REMOTE), mark=BY_PROXY_FOR_A).dropped == (
        UNENCRYPTED,
        EGRESS,
    )
    ipsec.identify(ROUTER, 1)
    assert ipsec.host_sends(from_host() / udp(ROUTER, REMOTE)).action == REDIRECT


@pytest.mark.parametrize("program", ["hive_from_device", "hive_from_vxlan"])
def test_who_has_a_key_sends_from_no_address_of_this_node(ipsec: IpsecWorld, program: str) -> None:
    """What the kernel has decrypted comes from another node."""

    def comes(source: str) -> Outcome:
        target = A.ip6 if ":" in source else A.ip
        return ipsec._run(program, FRAME / udp(source, target), 1, DECRYPTED)

    for source in (NODE, ROUTER, B.ip, A.ip, "127.0.0.1", NODE6, ROUTER6, B.ip6, "::1"):
        assert comes(source).dropped == (132, INGRESS), source
    ipsec.allow(A, [(PolicyKey(0, egress=False), PolicyEntry())])
    assert comes(REMOTE).action == REDIRECT


# What no key is known for.

WORLD, CIDR, REMOTE_NODE = 2, 1 << 24 | 5, 6
ENDPOINT = IPv4Address(OTHER_NODE)
NETWORKS = {False: "10.0.0.0/8", True: "fd00:10::/32"}
OWN = {False: "10.2.0.0/24", True: "fd00:10:2::/64"}
CLEAR, MARKED, IN_TUNNEL = "in clear text", "marked", "in clear text in the tunnel"


def fate(done: Outcome) -> object:
    """What became of a packet; the reason and direction, if it was dropped."""
    if done.action == OK:
        return MARKED if done.mark & 0xF00 == 0xE00 else CLEAR
    return IN_TUNNEL if done.action == REDIRECT else done.dropped


def expected(to: IpcacheValue | None, *, elsewhere: bool | None, node: bool, pod: bool) -> object:
    """By what the ipcache has of the destination; ``node``: it is reached in the tunnel."""
    keyed = to is not None and to.encrypt_key
    if pod and keyed and to is not None and to.tunnel_endpoint == ENDPOINT:
        return MARKED
    if to is not None and to.identity == REMOTE_NODE:
        return IN_TUNNEL if node else CLEAR
    return (UNENCRYPTED, EGRESS) if node or keyed or elsewhere else CLEAR


def known() -> Iterator[IpcacheValue | None]:
    """All that the ipcache may have of a destination."""
    yield None
    nowhere = IPv4Address(0)
    for identity, key, endpoint in product(
        (WORLD, CIDR, REMOTE_IDENTITY, REMOTE_NODE), (0, UNANNOUNCED_KEY), (nowhere, ENDPOINT)
    ):
        yield IpcacheValue(identity, endpoint, key)


@pytest.mark.parametrize("tunnel", [False, True], ids=["native", "tunnel"])
def test_nothing_for_a_pod_of_another_node_leaves_in_clear_text(ipsec: IpsecWorld, tunnel: bool) -> None:
    ipsec.set_tunnel(on=tunnel)
    for six, elsewhere, ranged in product((False, True), (None, False, True), {tunnel, False}):
        source, destination = (A.ip6, REMOTE6) if six else (A.ip, REMOTE)
        from_a = bytes(from_pod(A) / udp(source, destination))
        leaving = bytes(from_host() / udp(source, destination))
        by_host = bytes(from_host() / udp(NODE6 if six else NODE, destination))
        ipsec.pods_have(NETWORKS[six], elsewhere=None if elsewhere is None else True)
        ipsec.pods_have(OWN[six], elsewhere=False if elsewhere is False else None)
        ipsec.give_range(known=ranged)
        for to in known():
            ipsec.know(destination, to)
            at = (destination, to, elsewhere, ranged)
            by_range = ranged and (to is None or to.identity == WORLD)
            node = tunnel and (by_range or (to is not None and to.tunnel_endpoint == ENDPOINT))
            sent = fate(ipsec.pod_sends(A, from_a))
            assert sent == expected(to, elsewhere=elsewhere, node=node, pod=True), at
            if not tunnel:  # devices' programs do not ask
                leaves = expected(to, elsewhere=elsewhere, node=False, pod=False)
                assert fate(ipsec.leaves(leaving)) == leaves, at
                assert fate(ipsec.leaves(by_host, BY_INGRESS_PROXY)) == leaves, at
        assert fate(ipsec.leaves(by_host, BY_PROXY_FOR_A)) == CLEAR  # to a node
        assert fate(ipsec.leaves(by_host)) == CLEAR


def test_what_is_not_for_pods_of_other_nodes_leaves_as_it_is(ipsec: IpsecWorld) -> None:
    ipsec.pods_have("0.0.0.0/0", elsewhere=True)
    ipsec.pods_have("::/0", elsewhere=True)
    for tunnel in (False, True):
        ipsec.set_tunnel(on=tunnel)
        for source, own in ((A.ip, (ROUTER, NODE)), (A.ip6, (ROUTER6, NODE6))):
            for destination in own:
                assert fate(ipsec.pod_sends(A, from_pod(A) / udp(source, destination))) == CLEAR, destination
    ipsec.pods_have("0.0.0.0/0", elsewhere=None)
    ipsec.pods_have("::/0", elsewhere=None)
    for source, destination in ((A.ip, OUTSIDE), (A.ip6, OUTSIDE6)):
        assert fate(ipsec.pod_sends(A, from_pod(A) / udp(source, destination))) == CLEAR
        assert fate(ipsec.leaves(bytes(from_host() / udp(source, destination)))) == CLEAR
