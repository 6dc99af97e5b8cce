"""Containers that ctr starts, each with the network that containerd's CNI library finds in /etc/cni."""

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
"""Of containerd, apart from the one of its CRI."""
KILLED = 128 + 9
SNAPSHOTTER = "native"


class Ctr:
    """``with Ctr(lab, place) as ctr: ctr.run("web-0")``; containers left over go at the end.

    ``ctr run --cni`` deletes the container's network when it ends itself, by the container's name alone: the
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
        """Start containers of these names, all at once."""
        options = ["--rm", "--cni", "--null-io", f"--snapshotter={SNAPSHOTTER}"]
        for name in names:
            cgroup = f"--cgroup={self._place.cgroup}/{name}"
            self._running[name] = self._start("run", *options, cgroup, IMAGE, name)
        eventually(lambda: self._tasks().keys() >= set(names))

    def remove(self, *names: str) -> None:
        """End containers, at once, and wait until ctr has deleted their networks."""
        for name in names:
            self._place.output_of(self._start("task", "kill", "--signal=SIGKILL", name))
        for name in names:
            self._place.output_of(self._running.pop(name), code=KILLED)

    def network(self, name: str) -> str:
        """The network the container is in, as the library remembers it."""
        return str(self._remembered(name)["networkName"])

    def address(self, name: str) -> str:
        """The container's address, as the library remembers it."""
        (ip,) = self._remembered(name)["result"]["ips"]
        return str(ip["address"]).partition("/")[0]

    def open(self, name: str) -> Namespaces:
        """The container's network namespace."""
        return Namespaces.open(f"/proc/{self._tasks()[name]}/ns/net")

    def _remembered(self, name: str) -> Any:
        """What libcni keeps of an ADD for its DEL."""
        with self._lab.open() as node:
            return json.loads(node.run(_read, f"*-{NAMESPACE}-{name}-eth0"))

    def _tasks(self) -> dict[str, int]:
        """Running containers with their processes; what runs has its network."""
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
