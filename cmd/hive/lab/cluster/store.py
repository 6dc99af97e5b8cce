"""The kvstore of a lab's cluster: etcd of Debian, in the network between the nodes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from hive.lab.children import signals_blocked
from hive.lab.cluster.network import LabNetwork, Place
from hive.lab.daemon import Daemon
from hive.lab.node import LabError

PORT = 2379
READY_WITHIN = 60.0


@dataclass(frozen=True, slots=True)
class Store:
    """The etcd of a cluster's network, whether it runs or not."""

    network: LabNetwork

    @property
    def directory(self) -> Path:
        """Directory of its data, log and pid file."""
        return self.network.directory / "etcd"

    @property
    def exists(self) -> bool:
        """Whether the cluster has one."""
        return self.directory.is_dir()

    @property
    def address(self) -> str:
        """Its URL for agents: the router of the first segment."""
        return f"http://{Place(0, 0).routers[0]}:{PORT}"

    @property
    def settings(self) -> list[str]:
        """Settings of the agents."""
        if not self.exists:
            return []
        return [
            "--identity-allocation-mode=kvstore",
            "--kvstore=etcd",
            f"--kvstore-opt=etcd.address={self.address}",
        ]

    @property
    def pid(self) -> int | None:
        """Return its pid; None if it does not run."""
        return self._daemon.pid

    @property
    def _daemon(self) -> Daemon:
        return Daemon("etcd", self.directory / "pid", self.directory / "log")

    @staticmethod
    def program() -> str | None:
        """Return the path of etcd; None if it is not installed."""
        return shutil.which("etcd", path=f"{os.environ.get('PATH', '')}:{os.defpath}")

    def start(self) -> None:
        """Start it with its previous data. Raises LabError."""
        program = self.program()
        if program is None:
            raise LabError("--etcd needs etcd: install it (Debian: apt install etcd-server)")
        if self.pid is not None:
            return
        self.directory.mkdir(exist_ok=True)
        command = [
            program,
            f"--data-dir={self.directory / 'data'}",
            f"--listen-client-urls=http://0.0.0.0:{PORT}",
            f"--advertise-client-urls={self.address}",
            "--heartbeat-interval=50",
            "--election-timeout=500",
        ]
        with self.network.open() as network:
            pid = self._daemon.start(network, command)
            self._daemon.wait(pid, lambda: network.run(_listens), READY_WITHIN)

    def crash(self) -> None:
        """Kill it with SIGKILL; its data stay. Raises LabError if it survives."""
        self._daemon.kill()

    def freeze(self) -> None:
        """Stop it by SIGSTOP, until thaw()."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume it by SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        pid = self.pid
        if pid is None:
            raise LabError("etcd does not run")
        os.kill(pid, number)

    def remove(self) -> None:
        """Stop it and remove its data; a missing one is ignored."""
        with signals_blocked():
            self.crash()
            shutil.rmtree(self.directory, ignore_errors=True)


def _listens() -> bool:
    try:
        with socket.create_connection(("127.0.0.1", PORT), timeout=1):
            return True
    except OSError:
        return False
