"""A place for a container runtime in a lab node: folders, plugins and cgroups, with a reliable clean-up."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from hive import syscalls
from hive.lab import pods
from hive.lab.node import Lab, wait_exited
from tests.support.waiting import eventually

CGROUPS = Path("/sys/fs/cgroup")


class RuntimePlace:
    """``with RuntimePlace(lab, "containerd") as place``: the runtime's own folders in the node.

    Containers belong below ``cgroup``: remaining ones are killed at the end. All files, also /var/lib, are on
    the node's own file systems and are removed with it.
    """

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab = lab
        self.folder = lab.directory / name
        self.plugins = self.folder / "plugins"
        """Our plugin and the loopback plugin."""
        self.networks = lab.cni_conf.parent
        """Where the agent writes the network configuration."""
        self.cgroup = f"/hive-test-{lab.name}"

    def __enter__(self) -> RuntimePlace:
        self.plugins.mkdir(parents=True)
        for plugin in (pods.PLUGIN, Path("/usr/lib/cni/loopback")):
            shutil.copy(plugin, self.plugins)
        with self._lab.open() as node:
            node.run(syscalls.mount, "var-lib", "/var/lib", "tmpfs")  # libcni keeps results in /var/lib/cni
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_cgroup(self.cgroup)

    def start(self, command: list[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a program in the node; ``env`` are changes. Its output goes to a file of the folder.

        By nsenter, since gRPC's threads do not survive our fork.
        """
        enter = ["nsenter", f"--mount={self._lab.directory / 'mnt'}", f"--net={self._lab.directory / 'net'}"]
        with (self.folder / f"{Path(command[0]).name}.log").open("ab") as log:
            return subprocess.Popen(
                [*enter, "--", *command],
                env=os.environ | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def output_of(self, process: subprocess.Popen[str], within: float = 90.0, code: int = 0) -> str:
        """Wait for a started program, check its exit code, and return its output."""
        with process:
            try:
                stdout, _ = process.communicate(timeout=within)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert process.returncode == code, (
            f"{process.args!r} ended with {process.returncode}:\n{self._logs()}"
        )
        return stdout

    def _logs(self) -> str:
        return "\n".join(log.read_text()[-4000:] for log in self.folder.glob("*.log"))


def end_cgroup(name: str) -> None:
    """Kill all processes below the cgroups called ``name``, in every mounted hierarchy, and remove the
    cgroups.
    """
    for folder in hierarchies(name):
        for pid in sorted(members(folder)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            assert wait_exited(pid, 60), f"process {pid} survives SIGKILL"
    for folder in hierarchies(name):
        eventually(partial(empty, folder))
        for place, _, _ in os.walk(folder, topdown=False):
            with suppress(FileNotFoundError):  # the runtime removes its own meanwhile
                Path(place).rmdir()


def hierarchies(name: str) -> list[Path]:
    """Return the folders of a cgroup; version 1 has several hierarchies."""
    found = [root / name.strip("/") for root in (CGROUPS, *CGROUPS.iterdir())]
    return [folder for folder in found if folder.is_dir() and not folder.parent.is_symlink()]


def empty(folder: Path) -> bool:
    """Return whether no process is in a cgroup or below."""
    return not members(folder)


def members(folder: Path) -> set[int]:
    """Return the processes in a cgroup and below."""
    found: set[int] = set()
    for place, _, _ in os.walk(folder):  # passes over what goes meanwhile
        try:
            found.update(map(int, Path(place, "cgroup.procs").read_text().split()))
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENODEV}:
                raise
    return found
