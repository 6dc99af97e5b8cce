"""Queries from inside a namespace: ping, TCP echo, links and routes.

For forked children inside a node or pod.
"""

import os
import socket
import struct
import time
from dataclasses import dataclass

from hive.lab.children import Stop

_ICMP = struct.Struct("!BBHHH")
_IP_HEADER_WORD = 4
_PATIENCE = 2.0
_TCP_PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class Interface:
    """A link: index of its peer in the other namespace, addresses with prefix length."""

    name: str
    mac: str
    mtu: int
    up: bool
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """An IPv4 route of the main table."""

    destination: str
    gateway: str | None
    device: str
    scope: int
    mtu: int | None

    def __str__(self) -> str:
        via = f" via {self.gateway}" if self.gateway else ""
        return f"{self.destination}{via} dev {self.device}" + (f" mtu {self.mtu}" if self.mtu else "")


@dataclass(frozen=True, slots=True)
class _Echo:
    """ICMP of one family: types of request and reply, whether a reply comes with its IP header."""

    family: socket.AddressFamily
    protocol: int
    request: int
    reply: int
    headed: bool


_ECHO = {
    4: _Echo(socket.AF_INET, socket.IPPROTO_ICMP, 8, 0, headed=True),
    6: _Echo(socket.AF_INET6, socket.IPPROTO_ICMPV6, 128, 129, headed=False),
}


def ping(target: str, count: int = 3, patience: float = _PATIENCE) -> list[float]:
    """Send ``count`` echo requests; return the round trips in seconds. Source: RFC 792, RFC 4443."""
    trips = []
    own = os.getpid() & 0xFFFF
    echo = _ECHO[6 if ":" in target else 4]
    with socket.socket(echo.family, socket.SOCK_RAW, echo.protocol) as sock:
        sock.connect((target, 0))
        for number in range(count):
            body = b"hive lab ping...".ljust(56, b".")
            # The kernel computes the checksum of ICMPv6.
            checksum = _checksum(_ICMP.pack(echo.request, 0, 0, own, number) + body) if echo.headed else 0
            began = time.monotonic()
            sock.send(_ICMP.pack(echo.request, 0, checksum, own, number) + body)
            if _answered(sock, echo, own, number, began + patience):
                trips.append(time.monotonic() - began)
    return trips


def _answered(sock: socket.socket, echo: _Echo, own: int, number: int, deadline: float) -> bool:
    while True:
        # Replies that arrived in time are read even if this process is late.
        sock.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            packet = sock.recv(2048)
        except (TimeoutError, BlockingIOError):
            return False
        start = (packet[0] & 0xF) * _IP_HEADER_WORD if echo.headed else 0
        kind, _, _, identifier, sequence = _ICMP.unpack_from(packet, start)
        if (kind, identifier, sequence) == (echo.reply, own, number):
            return True


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def tcp_echo_server(stop: Stop, listener: socket.socket) -> list[str]:
    """Echo every connection until stopped; return the peers' addresses in order."""
    peers = []
    listener.settimeout(0.02)
    while not stop.wait(0):
        try:
            sock, (peer, *_) = listener.accept()
        except TimeoutError:
            continue
        with sock:
            sock.settimeout(_TCP_PATIENCE)
            peers.append(peer)
            while data := sock.recv(1 << 16):
                sock.sendall(data)
    return peers


def tcp_echo(target: tuple[str, int], size: int = 1 << 20) -> float:
    """Send ``size`` bytes and read them back; return the seconds. Raises OSError."""
    message = os.urandom(1 << 12)
    began = time.monotonic()
    with socket.create_connection(target, timeout=_TCP_PATIENCE) as sock:
        for _ in range(size // len(message)):
            sock.sendall(message)
            answer = b""
            while len(answer) < len(message):
                chunk = sock.recv(len(message) - len(answer))
                if not chunk:
                    raise ConnectionError(f"{target[0]} closed the connection in the middle")
                answer += chunk
            if answer != message:
                raise ConnectionError(f"{target[0]} answered other bytes than were sent")
    return time.monotonic() - began


def interfaces() -> list[Interface]:
    """Return the links of this namespace with their IPv4 addresses, except ``lo``."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        addresses: dict[int, list[str]] = {}
        for message in ip.get_addr(family=socket.AF_INET):
            text = f"{message.get('address')}/{message['prefixlen']}"
            addresses.setdefault(message["index"], []).append(text)
        return [
            Interface(
                name=link.get("ifname"),
                mac=link.get("address"),
                mtu=link.get("mtu"),
                up=link["state"] == "up",
                addresses=tuple(addresses.get(link["index"], ())),
            )
            for link in ip.get_links()
            if link.get("ifname") != "lo"
        ]


def routes() -> list[Route]:
    """Return the IPv4 routes of the main table, longest prefix first."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        names = {link["index"]: link.get("ifname") for link in ip.get_links()}
        found = [
            (
                message["dst_len"],
                Route(
                    destination=f"{message.get('dst')}/{message['dst_len']}"
                    if message.get("dst")
                    else "default",
                    gateway=message.get("gateway"),
                    device=names[message.get("oif")],
                    scope=message["scope"],
                    mtu=(message.get("metrics") or {}).get("mtu"),
                ),
            )
            for message in ip.get_routes(family=socket.AF_INET, table=254)
        ]
    return [route for _, route in sorted(found, key=lambda pair: -pair[0])]
