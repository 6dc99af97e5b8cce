"""What is marked for the kernel to encrypt with IPsec, from every sender in a pod's name."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, ip_network

import pytest
from scapy.layers.l2 import Ether

from cells.cluster.encryption import UNANNOUNCED_KEY
from cells.datapath.settings import ProgramSettings
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from tests.kernel.datapath.packets import from_host, from_pod, udp
from tests.kernel.datapath.world import (
    EGRESS,
    INGRESS,
    NODE,
    NODE6,
    OK,
    REDIRECT,
    ROUTER,
    ROUTER6,
    A,
    B,
    Outcome,
    World,
)
from tests.kernel.datapath_overlay.recorder import Recorder, recorded_object
from tests.kernel.datapath_overlay.world import OTHER_NODE, REMOTE, REMOTE_IDENTITY, OverlayWorld
from tests.support.namespaces import need_root

BY_PROXY_FOR_A, BY_INGRESS_PROXY = 0x0B00 | A.identity << 16, 0x0A00
FOR_NODE_1_WITH_KEY_3 = 0x00013E00
DECRYPTED = 0x0D00
FRAME = Ether(src="0e:00:00:00:00:01", dst="0e:00:00:00:00:02")
UNENCRYPTED = 195


class IpsecWorld(OverlayWorld):
    """The overlay's world, whose programs mark for the kernel; the pod of the other node has key 4."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        settings = ProgramSettings(marks_for_xfrm=True)
        World.__init__(self, settings, recorded_object(), self.recorder.map)

    def reset(self) -> None:
        super().reset()
        self.announce(4)
        self.use_key(3)

    def announce(self, key: int) -> None:
        """Have the other node announce this key for its pod."""
        value = IpcacheValue(REMOTE_IDENTITY, IPv4Address(OTHER_NODE), key, 0)
        self.maps["cilium_ipcache"].update(IpcacheKey.of(ip_network(REMOTE)).pack(), value.pack())

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
def test_so_is_what_proxies_send_in_its_name(ipsec: IpsecWorld, mark: int) -> None:
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
