"""Socket load balancing in the kernel: attached programs, the socket reverse NAT maps, and sock_diag.

``SocketLB`` attaches through SocketHooks; ``SocketTermination`` lists and destroys sockets through
SocketKernel.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

import msgspec

from cells.config import AgentConfig
from cells.config.shared import ServiceReach
from cells.datapath.generation import read_object
from cells.datapath.settings import PACKAGED_OBJECTS
from cells.maps.map import map_by_id
from cells.maps.node_maps import Maps
from cells.maps.records.flows import ReverseSk, ReverseSkKey, SockConfig
from cells.netlink.namespaces import run_in_each
from cells.services.sockets.links import CgroupRoot, SocketPrograms, detach_all, find_root
from lifecycle import Settings

# Sockets of a network namespace: listing those with peers, and closing them.
#
# Source: sock_diag(7), include/uapi/linux/inet_diag.h; net/ipv4/udp_diag.c, tcp_diag.c.

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_SOCK_DESTROY: Final = 21
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_INTERFACE_ANY: Final = 0

_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_REQUEST_BODY = struct.Struct("=BBBBI")  # struct inet_diag_req_v2, then its id
_ID = struct.Struct("!HH16s16s")  # struct inet_diag_sockid, then interface and cookie
_ID_TAIL = struct.Struct("=IQ")
_MESSAGE = struct.Struct("=BBBB")  # struct inet_diag_msg, then its id

# Of enum tcp_states: established, syn sent, fin wait 1 and 2, close wait, last ack, closing.
_WITH_PEER: Final = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11


class DiagSocket(msgspec.Struct, frozen=True):
    """A socket with a peer, as sock_diag describes it."""

    family: int
    cookie: int
    peer: IPv4Address | IPv6Address
    """An IPv4-mapped peer of an IPv6 socket is an IPv4 address."""
    port: int
    """The peer's port."""
    id: bytes
    """The kernel's identifier, for destroy()."""


class SocketDiag:
    """A netlink socket in the network namespace of the calling thread. All methods raise OSError."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._socket.close()

    def with_peers(self, protocol: int) -> Iterator[DiagSocket]:
        """Yield every connected socket of the protocol, TCP or UDP."""
        for family in (socket.AF_INET, socket.AF_INET6):
            body = _REQUEST_BODY.pack(family, protocol, 0, 0, _WITH_PEER) + bytes(48)
            self._send(_SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, body)
            yield from self._answers(family)

    def destroy(self, found: DiagSocket, protocol: int) -> bool:
        """Destroy a socket: its owner gets ECONNABORTED. False if it is already closed or has changed."""
        body = _REQUEST_BODY.pack(found.family, protocol, 0, 0, _WITH_PEER) + found.id
        self._send(_SOCK_DESTROY, _REQUEST | _ACK, body)
        data = self._socket.recv(1 << 16)
        (code,) = struct.unpack_from("=i", data, _HEADER.size)
        if -code in {errno.ENOENT, errno.ESTALE}:
            return False
        if -code == errno.EOPNOTSUPP:
            raise OSError(-code, "sockets cannot be closed: the kernel has no CONFIG_INET_DIAG_DESTROY")
        if code:
            raise OSError(-code, os.strerror(-code))
        return True

    def _send(self, kind: int, flags: int, body: bytes) -> None:
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body)

    def _answers(self, family: int) -> Iterator[DiagSocket]:
        while True:
            data = self._socket.recv(1 << 18)
            at = 0
            while at < len(data):
                length, kind, *_ = _HEADER.unpack_from(data, at)
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    (code,) = struct.unpack_from("=i", data, at + _HEADER.size)
                    if -code == errno.ENOENT:
                        text = "sockets cannot be listed: the kernel has no CONFIG_INET_UDP_DIAG"
                        raise OSError(-code, text)
                    raise OSError(-code, os.strerror(-code))
                yield _parse_socket(family, data[at + _HEADER.size : at + length])
                at += (length + 3) & ~3


def _parse_socket(family: int, message: bytes) -> DiagSocket:
    name = message[_MESSAGE.size : _MESSAGE.size + _ID.size + _ID_TAIL.size]
    _, port, _, peer = _ID.unpack_from(name)
    _, cookie = _ID_TAIL.unpack_from(name, _ID.size)
    # The kernel does not need the interface to find a socket, and it may no longer exist.
    identity = name[: _ID.size] + _ID_TAIL.pack(_INTERFACE_ANY, cookie)
    return DiagSocket(family, cookie, _address(family, peer), port, identity)


def _address(family: int, data: bytes) -> IPv4Address | IPv6Address:
    if family == socket.AF_INET:
        return IPv4Address(data[:4])
    address = IPv6Address(data)
    return address.ipv4_mapped or address


# Settings of socket load balancing.

DEFAULT_CGROUP_ROOT = Path("/run/cilium/cgroupv2")


class SocketLBSettings(Settings, frozen=True):
    """Services translated when a socket connects, so that no packet needs translation."""

    bpf_lb_sock: bool = False
    """Translate service addresses at the sockets of the node's processes and of pods."""

    bpf_lb_sock_hostns_only: bool = False
    """Only for processes in the node's own network namespace; pods' packets are translated one by one."""

    bpf_lb_sock_terminate_pod_connections: bool = True
    """Close pods' sockets too, not only the node's own, when their backend is removed."""

    bpf_lb_sock_terminate_all_protos: bool = False
    """Close TCP connections to removed backends too, not only UDP sockets."""

    cgroup_root: Path | None = None
    """Cgroup with the processes to serve; unset: all, at cgroup v2 mounted on /run/cilium/cgroupv2."""

    node_port_bind_protection: bool = True
    """Refuse to let processes of the node bind to the address and port of a service."""

    def serves(self, services: ServiceReach) -> bool:
        """Whether services are served at sockets."""
        return self.bpf_lb_sock or services.replaces_kube_proxy

    def faults(self) -> Iterator[str]:
        if self.cgroup_root is not None and not self.cgroup_root.is_absolute():
            yield f"cgroup-root={self.cgroup_root}: expected an absolute path"


_INDEX: Final = bytes(4)


class SocketHooks(Protocol):
    """The socket programs. Except configure(), only for one worker thread at a time.

    All methods raise OSError and HiveError.
    """

    def configure(self, config: SockConfig) -> None:
        """Write the configuration of the programs."""
        ...

    def attach(self, cgroup_root: Path) -> tuple[CgroupRoot, list[str]]:
        """Attach to a cgroup, mounting it if necessary; return the names of changed programs."""
        ...

    def missing(self) -> list[str]:
        """Return the names of programs that were detached or replaced since attach()."""
        ...

    def detach_all(self) -> list[str]:
        """Detach all programs; return their names."""
        ...

    def close(self) -> None:
        """Close descriptors; the programs stay attached."""
        ...


class SocketKernel(Protocol):
    """Translated sockets and their reverse NAT entries. For a worker thread; methods raise OSError."""

    def remembered(self) -> Iterable[tuple[ReverseSkKey, ReverseSk]]:
        """Yield the socket reverse NAT entries: sockets with their backends and services."""
        ...

    def end(self, sent: Iterable[ReverseSkKey], protocols: Iterable[int], *, pods: bool) -> int:
        """Destroy sockets connected to these backends, with ``pods`` also in pods; return how many."""
        ...


class KernelSocketHooks:
    """The socket programs in the kernel."""

    def __init__(self, agent: AgentConfig, maps: Maps) -> None:
        self._agent = agent
        self._maps = maps
        self._programs: SocketPrograms | None = None
        self._root: CgroupRoot | None = None

    def configure(self, config: SockConfig) -> None:
        wanted = config.pack()
        if self._maps.sock.lookup(_INDEX) != wanted:
            self._maps.sock.update(_INDEX, wanted)

    def attach(self, cgroup_root: Path) -> tuple[CgroupRoot, list[str]]:
        self._root = find_root(cgroup_root)
        if self._programs is None:
            data = read_object(PACKAGED_OBJECTS / "sock.o")
            self._programs = SocketPrograms(self._pins, data, self._maps.all())
        return self._root, self._programs.attach(self._root)

    def missing(self) -> list[str]:
        if self._programs is None or self._root is None:
            return []
        return self._programs.missing(self._root)

    def detach_all(self) -> list[str]:
        return detach_all(self._pins)

    def close(self) -> None:
        if self._programs is not None:
            self._programs.close()
            self._programs = None

    @property
    def _pins(self) -> Path:
        return self._agent.programs_dir / "socketlb" / "links" / "cgroup"


class KernelSockets:
    """The sockets and reverse NAT maps in the kernel."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    @staticmethod
    def provided(maps: Maps, settings: SocketLBSettings, services: ServiceReach) -> SocketKernel:
        """Select the maps, if services are translated at sockets."""
        if settings.serves(services):
            maps.use("reverse_sk4", "reverse_sk6")
        return KernelSockets(maps)

    def remembered(self) -> Iterable[tuple[ReverseSkKey, ReverseSk]]:
        for held in (self._maps.reverse_sk4, self._maps.reverse_sk6):
            with map_by_id(held.id, held.spec.name) as table:  # a descriptor of this thread
                for key, value in table.items():
                    yield ReverseSkKey.unpack(key), ReverseSk.unpack(value)

    def end(self, sent: Iterable[ReverseSkKey], protocols: Iterable[int], *, pods: bool) -> int:
        wanted = {(key.cookie, key.ip, key.port): key for key in sent}
        ended: list[ReverseSkKey] = []

        def work() -> bool:
            with SocketDiag() as diag:
                for protocol in protocols:
                    found = [
                        each
                        for each in diag.with_peers(protocol)
                        if (each.cookie, each.peer, each.port) in wanted
                    ]
                    for each in found:
                        key = wanted.pop((each.cookie, each.peer, each.port))
                        if diag.destroy(each, protocol):
                            ended.append(key)
            return bool(wanted)

        run_in_each(work, others=pods)
        self._delete_entries(ended)
        return len(ended)

    def _delete_entries(self, keys: Iterable[ReverseSkKey]) -> None:
        maps = self._maps
        with (
            map_by_id(maps.reverse_sk4.id, writable=True) as table4,
            map_by_id(maps.reverse_sk6.id, writable=True) as table6,
        ):
            for key in keys:
                (table4 if key.ip.version == 4 else table6).delete(key.pack())
