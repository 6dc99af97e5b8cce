"""The kvstore of a lab's cluster: etcd of Debian, in the network between the nodes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hive.lab.agent_process import birth
from hive.lab.children import undisturbed
from hive.lab.cluster.network import LabNetwork, Place
from hive.lab.node import LabError, wait_exited

PORT = 2379
READY_WITHIN = 60.0
_SETTLE = 0.02


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
        try:
            pid, born = (self.directory / "pid").read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return int(pid) if birth(int(pid)) == born else None

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
        with self.network.open() as network, (self.directory / "log").open("ab") as log:
            process = network.popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        process.returncode = 0  # Popen must not wait for it: it outlives this process
        (self.directory / "pid").write_text(f"{process.pid} {birth(process.pid)}")
        self._wait(process.pid)

    def _wait(self, pid: int) -> None:
        began = time.monotonic()
        with self.network.open() as network:
            while not network.run(_listens):
                if wait_exited(pid, _SETTLE) or time.monotonic() - began > READY_WITHIN:
                    lines = (self.directory / "log").read_text(errors="replace").splitlines()[-5:]
                    raise LabError("etcd does not serve:\n" + "\n".join(f"  {line}" for line in lines))

    def crash(self) -> None:
        """Kill it with SIGKILL; its data stay. Raises LabError if it survives."""
        pid = self.pid
        if pid is None:
            return
        for each in (signal.SIGCONT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.kill(pid, each)
        if not wait_exited(pid, 10.0):
            raise LabError("etcd survives SIGKILL")
        with suppress(ChildProcessError):  # another process started it
            os.waitpid(pid, 0)

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
        with undisturbed():
            self.crash()
            shutil.rmtree(self.directory, ignore_errors=True)


def _listens() -> bool:
    try:
        with socket.create_connection(("127.0.0.1", PORT), timeout=1):
            return True
    except OSError:
        return False
