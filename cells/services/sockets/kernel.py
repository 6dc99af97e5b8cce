"""Sockets in the kernel: the hooks of programs, what these remember, and the end of a socket.

Needs: AgentConfig, Maps, sock.o.   Gives: SocketHooks, SocketKernel and the real ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

from cells.config import AgentConfig
from cells.datapath import PACKAGED_OBJECTS, read_object
from cells.maps import Maps, ReverseSk, ReverseSkKey, SockConfig, map_by_id
from cells.node.netlink import run_in_each
from cells.services.settings import ServiceSettings
from cells.services.sockets.cgroup import CgroupRoot, find_root
from cells.services.sockets.diag import SocketDiag
from cells.services.sockets.links import SocketPrograms, detach_all
from cells.services.sockets.settings import SocketLBSettings

_INDEX: Final = bytes(4)


class SocketHooks(Protocol):
    """Where the programs at sockets are attached. All but configure() is for one worker thread at a time.

    All raise OSError and HiveError.
    """

    def configure(self, config: SockConfig) -> None:
        """Tell the programs about the node."""
        ...

    def attach(self, cgroup_root: Path) -> tuple[CgroupRoot, list[str]]:
        """Attach to a control group, mounted there if need be; names of those that were not attached."""
        ...

    def missing(self) -> list[str]:
        """Names of what somebody took off since then."""
        ...

    def take_off(self) -> list[str]:
        """Leave no program of ours attached; the names of those that were."""
        ...

    def close(self) -> None:
        """Give up descriptors: what is attached serves on."""
        ...


class SocketKernel(Protocol):
    """Sockets, and what the programs remember of them. For a worker thread; all raise OSError."""

    def remembered(self) -> Iterable[tuple[ReverseSkKey, ReverseSk]]:
        """Sockets with the backends they were sent to, and what they had asked for."""
        ...

    def end(self, sent: Iterable[ReverseSkKey], protocols: Iterable[int], *, pods: bool) -> int:
        """End those sockets that are connected to these backends, of pods too with ``pods``; how many."""
        ...


class KernelSocketHooks:
    """The real ones."""

    def __init__(self, agent: AgentConfig, maps: Maps) -> None:
        self._agent = agent
        self._maps = maps
        self._programs: SocketPrograms | None = None
        self._root: CgroupRoot | None = None

    @staticmethod
    def provided(agent: AgentConfig, maps: Maps) -> SocketHooks:
        """Those of this node."""
        return KernelSocketHooks(agent, maps)

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

    def take_off(self) -> list[str]:
        return detach_all(self._pins)

    def close(self) -> None:
        if self._programs is not None:
            self._programs.close()
            self._programs = None

    @property
    def _pins(self) -> Path:
        return self._agent.programs_dir / "socketlb" / "links" / "cgroup"


class KernelSockets:
    """The real :class:`~cells.services.sockets.kernel.SocketKernel`."""

    def __init__(self, maps: Maps) -> None:
        self._maps = maps

    @staticmethod
    def provided(maps: Maps, settings: SocketLBSettings, services: ServiceSettings) -> SocketKernel:
        """Those of this node."""
        if settings.serves(services):
            maps.use("reverse_sk4", "reverse_sk6")
        return KernelSockets(maps)

    def remembered(self) -> Iterable[tuple[ReverseSkKey, ReverseSk]]:
        for held in (self._maps.reverse_sk4, self._maps.reverse_sk6):
            with map_by_id(held.id, held.spec.name) as table:  # this thread's own
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
        self._forget(ended)
        return len(ended)

    def _forget(self, keys: Iterable[ReverseSkKey]) -> None:
        maps = self._maps
        with map_by_id(maps.reverse_sk4.id) as table4, map_by_id(maps.reverse_sk6.id) as table6:
            for key in keys:
                (table4 if key.ip.version == 4 else table6).delete(key.pack())
