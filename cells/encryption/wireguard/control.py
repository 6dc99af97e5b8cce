"""Reads and changes WireGuard devices: the kernel's over generic netlink, wireguard-go's over its socket.

Source: linux/wireguard.h; the interface of userspace WireGuard (wireguard.com/xplatform).
"""

from __future__ import annotations

import base64
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from cells.base.addresses import IPNetwork
from cells.encryption.wireguard.peers import PeerCall
from cells.netlink.connection import NetlinkError

if TYPE_CHECKING:
    from pyroute2 import WireGuard

__all__ = ["DeviceState", "KernelControl", "UserspaceControl", "WireguardControl"]


class DevicePeer(msgspec.Struct):
    """A peer as read from the device."""

    endpoint: str = ""
    """``address:port``."""
    handshake: float = 0.0
    """Time of its last handshake, in seconds since 1970; 0: never."""
    sent: int = 0
    received: int = 0
    """Bytes."""
    allowed: set[IPNetwork] = msgspec.field(default_factory=set)


class DeviceState(msgspec.Struct):
    """The configuration as read from the device."""

    private: bytes = bytes(32)
    port: int = 0
    mark: int = 0
    peers: dict[bytes, DevicePeer] = msgspec.field(default_factory=dict)
    """By public key."""


class WireguardControl(Protocol):
    """The control interface of one device. Methods block and raise OSError."""

    def read(self) -> DeviceState:
        """Read the whole state."""
        ...

    def configure_self(self, private: bytes, port: int, mark: int) -> None:
        """Set its key, its UDP port and the mark of its datagrams; peers remain."""
        ...

    def configure(self, call: PeerCall) -> None:
        """Change one peer."""
        ...


# wireguard-go: a text protocol over a Unix socket.

PATIENCE: Final = 10.0
"""Seconds to wait for an answer."""


class UserspaceControl:
    """A wireguard-go device, over its socket; keys are hexadecimal there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> DeviceState:
        """``get=1``: first the device's own lines, then those of each peer, which begin with its key."""
        found, peer = DeviceState(), DevicePeer()
        for key, value in self._ask("get=1\n\n"):
            match key:
                case "private_key":
                    found.private = bytes.fromhex(value)
                case "listen_port":
                    found.port = int(value)
                case "fwmark":
                    found.mark = int(value)
                case "public_key":
                    peer = found.peers.setdefault(bytes.fromhex(value), DevicePeer())
                case _:
                    _read_line(key, value, peer)
        return found

    def configure_self(self, private: bytes, port: int, mark: int) -> None:
        """See the interface."""
        self._ask(f"set=1\nprivate_key={private.hex()}\nlisten_port={port}\nfwmark={mark}\n\n")

    def configure(self, call: PeerCall) -> None:
        """See the interface."""
        lines = ["set=1", f"public_key={call.key.hex()}"]
        if call.remove:
            lines.append("remove=true")
        if call.endpoint is not None:
            host = f"[{call.endpoint}]" if call.endpoint.version == 6 else str(call.endpoint)
            lines.append(f"endpoint={host}:{call.port}")
        if call.keepalive:
            lines.append(f"persistent_keepalive_interval={int(call.keepalive)}")
        lines += [f"allowed_ip={prefix}" for prefix in call.allowed]
        self._ask("\n".join(lines) + "\n\n")

    def _ask(self, request: str) -> list[tuple[str, str]]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(str(self._path))
            connection.sendall(request.encode())
            answer = bytearray()
            while not answer.endswith(b"\n\n"):
                part = connection.recv(1 << 16)
                if not part:
                    raise OSError(errno.ECONNRESET, "wireguard-go does not answer", str(self._path))
                answer += part
        pairs = [(key, value) for key, _, value in (line.partition("=") for line in answer.decode().split())]
        number = abs(int(dict(pairs).get("errno", "0")))
        if number:
            raise OSError(number, os.strerror(number), str(self._path))
        return pairs


def _read_line(key: str, value: str, peer: DevicePeer) -> None:
    match key:
        case "endpoint":
            peer.endpoint = value
        case "last_handshake_time_sec":
            peer.handshake += int(value)
        case "last_handshake_time_nsec":
            peer.handshake += int(value) / 1e9
        case "tx_bytes":
            peer.sent = int(value)
        case "rx_bytes":
            peer.received = int(value)
        case "allowed_ip":
            peer.allowed.add(ip_network(value))


# The kernel's: generic netlink.

_AT_ONCE: Final = 500
"""Maximum number of addresses in one message, which has at most 64 KiB."""


class KernelControl:
    """A kernel device, with pyroute2; keys are base64 there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read(self) -> DeviceState:
        """A dump; a peer with many addresses spans several messages."""
        found = DeviceState()
        with _generic(self._name) as wireguard:
            for message in wireguard.info(self._name):
                found.private = _raw(message.get_attr("WGDEVICE_A_PRIVATE_KEY")) or found.private
                found.port = message.get_attr("WGDEVICE_A_LISTEN_PORT") or found.port
                found.mark = message.get_attr("WGDEVICE_A_FWMARK") or found.mark
                for one in message.get_attr("WGDEVICE_A_PEERS") or ():
                    _read_peer(one, found.peers)
        return found

    def configure_self(self, private: bytes, port: int, mark: int) -> None:
        """See the interface."""
        with _generic(self._name) as wireguard:
            wireguard.set(self._name, private_key=_text(private), listen_port=port, fwmark=mark)

    def configure(self, call: PeerCall) -> None:
        """See the interface; never replaces the list of addresses."""
        peer: dict[str, Any] = {"public_key": _text(call.key)}
        if call.remove:
            peer["remove"] = True
        if call.endpoint is not None:
            peer |= {"endpoint_addr": str(call.endpoint), "endpoint_port": call.port}
        if call.keepalive:
            peer["persistent_keepalive"] = int(call.keepalive)
        allowed = [str(prefix) for prefix in call.allowed]
        with _generic(self._name) as wireguard:
            for begin in range(0, len(allowed) or 1, _AT_ONCE):
                part = {"allowed_ips": allowed[begin : begin + _AT_ONCE]} if allowed else {}
                wireguard.set(self._name, peer=peer | part)


def _read_peer(row: Any, peers: dict[bytes, DevicePeer]) -> None:
    key = _raw(row.get_attr("WGPEER_A_PUBLIC_KEY"))
    if key is None:
        return
    peer = peers.setdefault(key, DevicePeer())
    if (endpoint := row.get_attr("WGPEER_A_ENDPOINT")) is not None:
        host = f"[{endpoint['addr']}]" if ":" in endpoint["addr"] else endpoint["addr"]
        peer.endpoint = f"{host}:{endpoint['port']}"
    if (time := row.get_attr("WGPEER_A_LAST_HANDSHAKE_TIME")) is not None:
        peer.handshake = time["tv_sec"] + time["tv_nsec"] / 1e9
    peer.sent = row.get_attr("WGPEER_A_TX_BYTES") or peer.sent
    peer.received = row.get_attr("WGPEER_A_RX_BYTES") or peer.received
    peer.allowed |= {ip_network(one["addr"]) for one in row.get_attr("WGPEER_A_ALLOWEDIPS") or ()}


def _raw(key: bytes | str | None) -> bytes | None:
    return None if key is None else base64.b64decode(key)


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode()


@contextmanager
def _generic(name: str) -> Iterator[WireGuard]:
    from pyroute2 import NetlinkError as Refused
    from pyroute2 import WireGuard

    try:
        with WireGuard() as wireguard:
            yield wireguard
    except Refused as error:
        raise NetlinkError(error.code, f"configure {name}") from error
