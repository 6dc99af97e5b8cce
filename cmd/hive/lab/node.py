"""Create, find and remove a lab node: its directory, namespaces and uplink.

The directory is /run/hive-lab/<name>, a tmpfs: bind mounts that keep the namespaces (``net``, ``mnt``,
``outside``, ``pods/<pod>``), and the agent's log. Inside the node the agent uses its default paths, and pods
are also in /run/netns, as with container runtimes. No process keeps a node alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hive import syscalls
from hive.lab import cgroups
from hive.lab.children import readable, signals_blocked
from hive.lab.namespaces import Namespaces, hold, mounted_below, new_held_node, new_netns, release
from hive.lab.requirements import missing

if TYPE_CHECKING:
    from hive.lab.cluster.network import LabNetwork

ROOT = Path("/run/hive-lab")
PODS = Path("/run/netns")
"""Directory of pods' namespaces inside the node."""

NODE_ADDRESS, OUTSIDE_ADDRESS, PREFIX = "192.168.50.10", "192.168.50.1", 24
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


class LabError(click.ClickException):
    """Raised if a lab command fails, with one line for the user."""


@dataclass(frozen=True, slots=True)
class Lab:
    """The node called ``name``, whether it exists or not."""

    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise LabError(f"name {self.name!r}: expected up to 32 of a-z, 0-9 and '-', as in node-1")

    @property
    def directory(self) -> Path:
        """Directory of the node on the machine; the same path is visible inside."""
        return ROOT / self.name

    @property
    def agent_log(self) -> Path:
        """Log file of the node's agents."""
        return self.directory / "agent.log"

    @property
    def cni_conf(self) -> Path:
        """CNI configuration that the agent writes when it is ready."""
        return self.directory / "cni" / "05-cilium.conflist"

    @property
    def manifests(self) -> Path:
        """Directory of the agent's objects, if the node belongs to a cluster."""
        return self.directory / "manifests"

    @property
    def cluster(self) -> str:
        """Name of the node's cluster; empty if it has none."""
        try:
            return (self.directory / "cluster").read_text()
        except FileNotFoundError:
            return ""

    @property
    def exists(self) -> bool:
        """Whether the node is complete."""
        return (self.directory / "complete").exists()

    def open(self) -> Namespaces:
        """Open the node's namespaces. Raises LabError if the node does not exist."""
        if not self.exists:
            known = ", ".join(lab.name for lab in labs()) or "none"
            raise LabError(
                f"there is no lab node named {self.name} (there are: {known}): make it with hive lab up"
            )
        return Namespaces.open(self.directory / "net", self.directory / "mnt")

    def open_outside(self) -> Namespaces:
        """Open the network at the other end of the node's uplink."""
        return Namespaces.open(self.directory / "outside")

    def pods(self) -> list[str]:
        """Return the names of pods with a namespace."""
        return _names(self.directory / "pods")

    def open_pod(self, pod: str) -> Namespaces:
        """Open a pod's network namespace with the node's mounts. Raises LabError for an unknown pod."""
        if pod not in self.pods():
            known = ", ".join(self.pods()) or "none"
            raise LabError(f"node {self.name} has no pod named {pod} (it has: {known})")
        return Namespaces.open(self.directory / "pods" / pod, self.directory / "mnt")

    def hold_pod(self, pod: str) -> None:
        """Create a pod's network namespace where the plugin expects it.

        Its ``lo`` is up, as with container runtimes: a pod reaches its own address through it.
        """
        with self.open() as node, new_netns() as fresh:
            fresh.run(syscalls.set_loopback_up)
            hold(fresh.net, self.directory / "pods" / pod)
            node.run(hold, fresh.net, PODS / pod)

    def release_pod(self, pod: str) -> None:
        """Release a pod's namespace."""
        with self.open() as node:
            node.run(release, PODS / pod)
        release(self.directory / "pods" / pod)


def labs() -> list[Lab]:
    """Return the nodes of this machine, including incomplete ones."""
    return [Lab(name) for name in _names(ROOT) if _NAME.fullmatch(name)]


def need_root() -> None:
    """Raise LabError if a lab cannot work: without root, namespaces or BPF."""
    if reason := missing():
        raise LabError(reason)


@contextmanager
def exclusive() -> Iterator[None]:
    """Let one process at a time create or remove nodes; leaves no lock file behind."""
    while True:
        ROOT.mkdir(exist_ok=True)
        lock = os.open(ROOT, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:  # else it was removed while we waited
            break
        os.close(lock)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            ROOT.rmdir()
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def create(lab: Lab, network: LabNetwork | None = None) -> None:
    """Create the node: namespaces, mounts, an uplink with a global address. A failure leaves nothing behind.

    The uplink leads to an existing network, or to a new namespace.
    """
    lab.directory.mkdir(mode=0o755, parents=True)
    try:
        syscalls.mount(
            "hive-lab", lab.directory, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=0755"
        )
        # A mount namespace can only be bound below a private mount.
        syscalls.mount("none", lab.directory, flags=syscalls.MS_PRIVATE)
        lab.cni_conf.parent.mkdir()
        (lab.directory / "pods").mkdir()
        with (
            new_held_node(lab.directory, lab.directory / "net", lab.directory / "mnt") as node,
            network.open() if network is not None else new_netns() as outside,
        ):
            node.run(_forward)
            if network is not None:
                _join(lab, node, outside, network)
            else:
                hold(outside.net, lab.directory / "outside")
                node.run(_uplink, outside.net)
                outside.run(_outside)
        (lab.directory / "complete").touch()
    except BaseException:
        destroy(lab)
        raise


def _join(lab: Lab, node: Namespaces, outside: Namespaces, network: LabNetwork) -> None:
    from hive.lab.cluster.network import attach_uplink, uplink

    place = network.place(int(lab.name.rpartition("-")[2]))
    node.run(uplink, outside.net, place)
    outside.run(attach_uplink, place)
    lab.manifests.mkdir()
    (lab.directory / "cluster").write_text(network.name)


def destroy(lab: Lab) -> None:
    """Remove the node's processes, pods, namespaces, mounts and directory, even if it is incomplete."""
    with signals_blocked():
        end_processes(lab)
        for point in reversed(mounted_below(lab.directory)):
            syscalls.unmount(point, syscalls.MNT_DETACH)
        with contextlib.suppress(OSError):  # not mounted: it was never made, or is removed already
            syscalls.unmount(lab.directory, syscalls.MNT_DETACH)
        with contextlib.suppress(FileNotFoundError):
            lab.directory.rmdir()
    cgroups.remove(lab.name)


def processes(lab: Lab) -> list[int]:
    """Return the processes in a namespace of the node or of its pods."""
    ours = {identity for identity in map(_identity, _held(lab)) if identity}
    running = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [
        int(process.name)
        for process in running
        if {_identity(process / "ns" / "net"), _identity(process / "ns" / "mnt")} & ours
    ]


def end_processes(lab: Lab, within: float = 30.0) -> None:
    """Kill all processes of the node. Raises LabError if one survives."""
    for pid in processes(lab):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if not wait_exited(pid, within):
            raise LabError(f"process {pid} of node {lab.name} survives SIGKILL for {within:g} s")


def wait_exited(pid: int, within: float) -> bool:
    """Wait until a process, a child or not, has exited; False after ``within`` seconds."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return readable(process, within)
    finally:
        os.close(process)


def _held(lab: Lab) -> list[Path]:
    pods = (lab.directory / "pods" / pod for pod in lab.pods())
    return [lab.directory / name for name in ("net", "mnt", "outside")] + list(pods)


def _identity(namespace: Path) -> tuple[int, int] | None:
    try:
        status = namespace.stat()
    except OSError:  # a process that has just ended, or a node half made
        return None
    return status.st_dev, status.st_ino


def _names(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except FileNotFoundError:
        return []


def _forward() -> None:
    """Enable forwarding in the namespace, as nodes of a cluster do; else it depends on the machine."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _uplink(outside: int) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.link("add", ifname="uplink", kind="veth", peer={"ifname": "node", "net_ns_fd": outside})
        (index,) = ip.link_lookup(ifname="uplink")
        ip.addr("add", index=index, address=NODE_ADDRESS, prefixlen=PREFIX)
        ip.link("set", index=index, state="up")
        ip.route("add", dst="default", gateway=OUTSIDE_ADDRESS)


def _outside() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        (index,) = ip.link_lookup(ifname="node")
        ip.addr("add", index=index, address=OUTSIDE_ADDRESS, prefixlen=PREFIX)
        ip.link("set", index=index, state="up")
        ip.link("set", index=ip.link_lookup(ifname="lo")[0], state="up")
