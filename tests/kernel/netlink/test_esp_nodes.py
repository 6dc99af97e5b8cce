"""Two nodes with IPsec, their pods exchanging packets by ESP, with keys from key files.

The reconciler, the kernel's XFRM policies, the namespaces, the veth between them and the capture are real. A
fake encrypts ESP, as kernels may have none.
"""

from __future__ import annotations

import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import anyio
import pytest
from scapy.layers.inet import IP
from scapy.layers.inet6 import IPv6
from scapy.layers.ipsec import ESP
from scapy.layers.l2 import Ether

from cells.base.addresses import Family, IPAddress
from cells.cluster.encryption import PublishedKey
from cells.encryption.ipsec.plan import DECRYPT, ENCRYPT
from hive.lab.children import Child, Stop
from hive.lab.traffic.flows import Received, Sent, udp_receiver, udp_sender, udp_socket
from hive.lab.traffic.probe import ping
from lifecycle import Hive
from tests.kernel.netlink.ipsec_node import KEY, NEXT_KEY, IpsecWorld, key_file, node
from tests.support.esp import EspDevice
from tests.support.namespaces import Namespaces, inside, node_namespace
from tests.support.waiting import eventually

pytestmark = pytest.mark.kernel

OTHER_KEY = KEY.replace("4443", "4444")
SECRET = b"what a pod says to another"
ETH_P_ALL = 3
NUMBERS = (1, 2)


def pods(number: int) -> tuple[str, str]:
    """Return the IPv4 and IPv6 address of a node's pod."""
    return f"10.0.{number}.9", f"fd00::{number}:9"


def run(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def wire_up(other: int) -> None:
    """Create the veth between the nodes, from the namespace of the first one."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.link("add", ifname="uplink", kind="veth", peer={"ifname": "uplink", "net_ns_fd": other})


def prepare(number: int) -> None:
    """Configure a node's addresses, and its routes to the router IPs of the other node."""
    other = NUMBERS[2 - number]
    run("link set uplink up")
    for one, prefix, router, next_hop in (
        (f"192.0.2.{number}", 24, f"10.0.{other}.1", f"192.0.2.{other}"),
        (f"2001:db8::{number}", 64, f"fd00::{other}:1", f"2001:db8::{other}"),
    ):
        run(f"address add {one}/{prefix} dev uplink{' nodad' if ':' in one else ''}")
        run(f"route add {router} via {next_hop}")
    for own in (*pods(number), f"10.0.{number}.1", f"fd00::{number}:1"):
        run(f"address add {own} dev lo{' nodad' if ':' in own else ''}")


def set_up_tun(number: int) -> None:
    """Route the pod CIDRs of the other node to the TUN device."""
    other = NUMBERS[2 - number]
    run("link set esp0 mtu 1400 up")
    run(f"route add 10.0.{other}.0/24 dev esp0 src {pods(number)[0]}")
    run(f"route add fd00::{other}:0/112 dev esp0 src {pods(number)[1]}")


async def announce(hive: Hive, path: Path) -> None:
    """Write the SPI of a node to a file that the other node reads, in place of its CiliumNode object."""
    published = hive.get(PublishedKey)
    async for _ in published.table.changes():
        path.with_suffix(".new").write_text(str(published.number))
        path.with_suffix(".new").rename(path)


def announced(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


async def serve(stop: Stop, number: int, folder: Path) -> Counter[str]:
    """Run a node until it is stopped: IPsec's cells, and a TUN device that encrypts by their plan."""
    other = NUMBERS[2 - number]
    world = IpsecWorld()

    def mark(_: IPAddress) -> int:
        """Return the encryption mark with the older SPI of both nodes, as programs at pods' links do."""
        (own,) = world.number.lookup(bytes(4)) or b"\0"
        return other << 16 | min(own, announced(folder / f"n{other}")) << 12 | ENCRYPT

    def sender(_: IPAddress) -> int:
        return other << 16 | DECRYPT

    device = EspDevice(world.kernel, mark, sender)
    routers = [node(number).router_ip(family) for family in Family]
    settings = {"enable-ipsec": "true", "ipsec-key-file": str(folder / f"keys{number}" / "keys")}
    async with world.agent(**settings) as hive, anyio.create_task_group() as group:
        with device.opened("esp0", [each for each in routers if each]) as tun:
            set_up_tun(number)
            group.start_soon(device.run, tun)
            group.start_soon(announce, hive, folder / f"n{number}")
            world.add(node(number, local=True), node(other))
            world.all_known.done()
            await anyio.wait_readable(stop.fd)
            group.cancel_scope.cancel()
    return device.counts


def captured(stop: Stop) -> list[bytes]:
    """Capture all packets of the veth until stopped."""
    found: list[bytes] = []
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as link:
        link.bind(("uplink", 0))
        link.settimeout(0.05)
        while not stop.wait(0):
            with suppress(TimeoutError):
                found.append(link.recv(1 << 16))
    return found


class Nodes:
    """Two nodes and the packets captured between them."""

    def __init__(self, folder: Path, first: Namespaces, second: Namespaces) -> None:
        self.folder = folder
        self.spaces = {1: first, 2: second}
        self.counts: dict[int, Counter[str]] = {}
        self.packets: list[Ether] = []

    def use_key(self, number: int, text: str, version: str) -> None:
        """Replace the key file of a node."""
        folder = self.folder / f"keys{number}"
        folder.mkdir(exist_ok=True)
        key_file(folder, text, version)

    @contextmanager
    def served(self) -> Iterator[None]:
        """Run both nodes for the duration of the block, then collect their counts and packets."""
        with ExitStack() as stack:
            capture: Child[list[bytes]] = self.spaces[1].start(captured)
            stack.callback(capture.kill)
            working: dict[int, Child[Counter[str]]] = {}
            for number, space in self.spaces.items():
                working[number] = space.start(partial(_run, number=number, folder=self.folder))
                stack.callback(working[number].kill)
            yield
            self.counts = {number: child.finish(within=30) for number, child in working.items()}
            self.packets = [Ether(each) for each in capture.finish(within=30)]

    def reaches(self, number: int, target: str) -> bool:
        return bool(self.spaces[number].run(ping, target, 1))

    def announce(self, number: int, key: int) -> bool:
        return announced(self.folder / f"n{number}") == key

    def spis(self) -> set[int]:
        """Return the SPIs of captured ESP packets; fail if a packet is in clear text."""
        between = [each for each in self.packets if IP in each or ESP in each]
        assert between
        for each in self.packets:
            assert SECRET not in bytes(each)
            for pod in (address for number in NUMBERS for address in pods(number)):
                assert ip_address(pod).packed not in bytes(each), "an address of a pod in clear text"
            if IPv6 in each and ESP not in each:  # neighbour discovery
                assert each[IPv6].nh in {0, 58}
            elif IP in each:
                assert each[IP].proto == socket.IPPROTO_ESP
        return {each[ESP].spi for each in between if ESP in each}


def _run(stop: Stop, number: int, folder: Path) -> Counter[str]:
    return anyio.run(serve, stop, number, folder)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with node_namespace() as first, node_namespace() as second:
        first.run(wire_up, second.net)
        for number, space in zip(NUMBERS, (first, second), strict=True):
            space.run(prepare, number)
        yield Nodes(tmp_path, first, second)


def send_secret(target: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(SECRET, (target, port))


def test_pods_talk_and_between_the_nodes_nothing_is_in_clear(nodes: Nodes) -> None:
    for number in NUMBERS:
        nodes.use_key(number, KEY, "first")
    with nodes.served():
        for number, other in ((1, 2), (2, 1)):
            for target in pods(other):
                eventually(partial(nodes.reaches, number, target))
                with inside(nodes.spaces[other]):
                    sock = udp_socket(socket.AF_INET6 if ":" in target else socket.AF_INET)
                with sock:
                    sock.settimeout(30)
                    nodes.spaces[number].run(send_secret, target, sock.getsockname()[1])
                    data, (source, *_) = sock.recvfrom(100)
                assert data == SECRET
                assert source in pods(number)
    assert nodes.spis() == {3}
    before_the_keys = {"XfrmOutPolBlock", "XfrmInNoStates"}  # counted on this node, on the other one
    for number in NUMBERS:
        assert not nodes.counts[number].keys() - {"sent", "received"} - before_the_keys


def test_a_key_is_replaced_and_no_packet_is_lost(nodes: Nodes) -> None:
    for number in NUMBERS:
        nodes.use_key(number, KEY, "first")
    with nodes.served():
        target = pods(2)[0]
        eventually(partial(nodes.reaches, 1, target))
        with inside(nodes.spaces[2]):
            sock = udp_socket()
        with sock:
            receiver: Child[Received] = nodes.spaces[2].start(udp_receiver, sock)
            sender: Child[Sent] = nodes.spaces[1].start(udp_sender, (target, sock.getsockname()[1]), 200.0)
            for number in (2, 1):  # one after the other: until both have the new key, they use the older one
                nodes.use_key(number, NEXT_KEY, "second")
                eventually(partial(nodes.announce, number, 4))
                assert nodes.reaches(1, target)
            eventually(partial(nodes.reaches, 2, pods(1)[1]))
            sent = sender.finish(within=60)
            received = receiver.finish(within=60)
    assert sent.packets > 20
    assert (received.packets, received.duplicates) == (sent.packets, 0)
    assert nodes.spis() == {3, 4}


def test_packets_of_another_key_are_dropped_until_both_nodes_have_one(nodes: Nodes) -> None:
    nodes.use_key(1, KEY, "first")
    nodes.use_key(2, OTHER_KEY, "first")
    with nodes.served():
        for number in NUMBERS:
            eventually(partial(nodes.announce, number, 3))
        for number, other in ((1, 2), (2, 1)):
            for target in pods(other):
                assert not nodes.reaches(number, target)
        for number in NUMBERS:
            nodes.use_key(number, NEXT_KEY, "second")
        eventually(partial(nodes.reaches, 1, pods(2)[0]))
    assert nodes.spis() == {3, 4}
    for number in NUMBERS:
        assert nodes.counts[number]["XfrmInStateProtoError"] > 0
