"""BIG TCP: packets above 64 KiB between pods, the node and clients outside, with and without NAT."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from hive.client import ask
from hive.lab import pods
from hive.lab.agent_process import api_socket
from hive.lab.namespaces import Namespaces, inside
from hive.lab.node import Lab
from tests.node.agent.masqueraded import DUAL
from tests.node.agent.node_ports import NODE_PORT, OUTSIDE, TARGET, give_addresses, service, slices
from tests.support.agents import known_pods, run_agent, serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

BIG_TCP = ("--enable-ipv4-big-tcp=true", "--enable-ipv6-big-tcp=true")
SETTINGS = (*DUAL, "--routing-mode=native", "--kube-proxy-replacement=true", *BIG_TCP)
USUAL, LARGEST = 65536, 196608
SIZE = 32 << 20
CHUNK = 1 << 20
PATTERN = bytes(range(256)) * (CHUNK // 256 + 1)
SO_RCVBUFFORCE = 33


def largest_packet(client: Namespaces, server: Namespaces, address: str, device: str) -> int:
    """Bytes of the largest packet that comes in by the server's device, of a stream that arrives whole."""
    six = ":" in address
    family = socket.AF_INET6 if six else socket.AF_INET
    with inside(server):
        listener = socket.create_server(("", TARGET), family=family)
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM)
        tap.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, SIZE)
        tap.bind((device, 0x86DD if six else 0x0800))
    with inside(client):
        calling = socket.socket(family)

    def send() -> None:
        for _ in range(SIZE // CHUNK):
            calling.sendall(PATTERN[:CHUNK])
        calling.shutdown(socket.SHUT_WR)

    with listener, tap, calling:
        for each in (listener, calling):
            each.settimeout(30)
        tap.setblocking(False)
        calling.connect((address, TARGET))
        answering, _ = listener.accept()
        sender = threading.Thread(target=send)
        sender.start()
        received, sizes = 0, [0]
        with answering:
            answering.settimeout(30)
            while data := answering.recv(CHUNK):
                start = received % 256
                assert data == PATTERN[start : start + len(data)]
                received += len(data)
                while True:
                    try:
                        sizes.append(len_of_next(tap))
                    except BlockingIOError:
                        break
        sender.join()
    assert received == SIZE
    return max(sizes)


def len_of_next(tap: socket.socket) -> int:
    """Bytes of the next packet, which was cut."""
    return tap.recv_into(bytearray(1), 1, socket.MSG_TRUNC)


def test_packets_above_64_kib_pass(node: Lab, tmp_path: Path) -> None:
    give_addresses(node)
    known_pods(tmp_path, "first", "second")
    pid = serving(node, f"--manifests-dir={tmp_path}", *SETTINGS)
    config = ask("/v1/config", api_socket(pid))["status"]
    names = [f"{kind}{family}MaxSize" for kind in ("GSO", "GRO") for family in ("", "IPv4")]
    assert [config[name] for name in names] == [LARGEST] * 4
    status = ask("/v1/healthz", api_socket(pid))
    for family in ("ipv4", "ipv6"):
        assert status[f"{family}-big-tcp"] == {"enabled": True, "maxGRO": LARGEST, "maxGSO": LARGEST}
    pods.add(node, "first")
    second = pods.add(node, "second")
    web = service("web", NODE_PORT) + slices("web", {4: second.ipv4, 6: second.ipv6})
    (tmp_path / "web.yaml").write_text(web)
    eventually(lambda: len(ask("/v1/service", api_socket(pid))) >= 2)
    with (
        node.open_outside() as outside,
        node.open_pod("first") as client,
        node.open_pod("second") as pod,
    ):
        for server, device, addresses in (
            (pod, "eth0", (second.ipv4, second.ipv6)),
            (pod, "eth0", (f"10.96.0.{NODE_PORT % 100}", f"fd00:96::{NODE_PORT % 100}")),
            (outside, "node", OUTSIDE.values()),
        ):
            for address in addresses:
                assert USUAL < largest_packet(client, server, address, device) <= LARGEST, address
    for pod_name in ("first", "second"):
        pods.delete(node, pod_name)


def test_a_tunnel_is_refused_beside_it(node: Lab) -> None:
    ended = run_agent(node, "--kube-proxy-replacement=true", "--routing-mode=tunnel", *BIG_TCP)
    assert ended.code == 2
    assert ended.line.endswith(
        "enable-ipv4-big-tcp=true: BIG TCP is not supported in tunneling mode; set routing-mode=native"
    )
