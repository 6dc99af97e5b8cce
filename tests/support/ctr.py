"""Containers started by ctr, each with the network that containerd's CNI library finds in /etc/cni."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from hive import syscalls
from hive.lab.namespaces import Namespaces
from hive.lab.node import Lab
from tests.support.containerd import Containerd
from tests.support.pause import IMAGE
from tests.support.runtime_place import RuntimePlace
from tests.support.waiting import eventually

NAMESPACE = "plain"
"""A namespace of containerd, apart from that of its CRI."""
KILLED = 128 + 9
SNAPSHOTTER = "native"


class Ctr:
    """``with Ctr(lab, place) as ctr: ctr.run("web-0")``; removes remaining containers at the end.

    When ``ctr run --cni`` ends, it deletes the container's network by the container's name alone: the
    namespace is deleted by then.
    """

    def __init__(self, lab: Lab, place: RuntimePlace) -> None:
        self._lab = lab
        self._place = place
        self._containerd = Containerd(place, namespace=NAMESPACE)
        self._running: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Ctr:
        etc = self._place.folder / "etc"
        shutil.copytree("/etc", etc, symlinks=True)
        shutil.rmtree(etc / "cni", ignore_errors=True)
        shutil.copytree(self._place.networks, etc / "cni" / "net.d")
        plugins = self._place.folder / "opt" / "cni" / "bin"
        shutil.copytree(self._place.plugins, plugins)
        with self._lab.open() as node:  # ctr takes no other folders
            for folder in (etc, plugins.parents[1]):
                node.run(_bind, folder, Path("/") / folder.name)
        self._containerd.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.remove(*self._running)
        finally:
            self._containerd.__exit__(kind, error, trace)

    def run(self, *names: str) -> None:
        """Start containers of these names in parallel."""
        options = ["--rm", "--cni", "--null-io", f"--snapshotter={SNAPSHOTTER}"]
        for name in names:
            cgroup = f"--cgroup={self._place.cgroup}/{name}"
            self._running[name] = self._start("run", *options, cgroup, IMAGE, name)
        eventually(lambda: self._tasks().keys() >= set(names))

    def remove(self, *names: str) -> None:
        """End containers in parallel, and wait until ctr has deleted their networks."""
        for name in names:
            self._place.output_of(self._start("task", "kill", "--signal=SIGKILL", name))
        for name in names:
            self._place.output_of(self._running.pop(name), code=KILLED)

    def network(self, name: str) -> str:
        """Return the container's network from libcni's cache."""
        return str(self._remembered(name)["networkName"])

    def address(self, name: str) -> str:
        """Return the container's address from libcni's cache."""
        (ip,) = self._remembered(name)["result"]["ips"]
        return str(ip["address"]).partition("/")[0]

    def open(self, name: str) -> Namespaces:
        """Open the container's network namespace."""
        return Namespaces.open(f"/proc/{self._tasks()[name]}/ns/net")

    def _remembered(self, name: str) -> Any:
        """Read what libcni caches of an ADD for its DEL."""
        with self._lab.open() as node:
            return json.loads(node.run(_read, f"*-{NAMESPACE}-{name}-eth0"))

    def _tasks(self) -> dict[str, int]:
        """Return the running containers and their processes; a running container has its network."""
        lines = self._place.output_of(self._start("task", "ls")).splitlines()[1:]
        rows = [line.split() for line in lines]
        return {name: int(pid) for name, pid, status in rows if status == "RUNNING"}

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        return self._place.start(["ctr", *self._containerd.address_options, *arguments])


def _bind(folder: Path, target: Path) -> None:
    syscalls.mount(str(folder), target, flags=syscalls.MS_BIND)


def _read(pattern: str) -> str:
    (found,) = Path("/var/lib/cni/results").glob(pattern)
    return found.read_text()
