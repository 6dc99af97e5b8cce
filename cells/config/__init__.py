"""The agent's node-wide configuration, and its claim on the node.

Source: reads the settings, gives every other cell the resolved paths and names.
Why:    a cell that takes an AgentConfig starts after its hook, so it knows that the directories exist, that
        bpffs is mounted, that the process may use it, and that no other agent has this node.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from lifecycle import HiveError, Hook, Lifecycle, Logger, Settings, config, module, provide
from lifecycle.http import clear_socket
from lifecycle.settings import read_regular

__all__ = [
    "AgentConfig",
    "AgentSettings",
    "ChainingMode",
    "cell",
    "cluster_faults",
    "cluster_name_fault",
    "version_of",
]


# How our plugin works with others.
#
# Source: Cilium 1.17, cni-chaining-mode.


class ChainingMode(msgspec.Struct, frozen=True):
    """How the network configuration that is written has our plugin work with others."""

    name: str

    @property
    def own_links(self) -> bool:
        """Whether pods' links are ours: no other plugin has made them."""
        return self.name in ("none", "portmap")


# Settings that concern the whole agent.

LONGEST_SOCKET: Final = 107
"""Bytes of the path of a unix socket (unix(7))."""
LONGEST_STATE_DIR: Final = LONGEST_SOCKET - len("/cilium.sock")
"""Bytes."""

_CLUSTER_NAME: Final = re.compile(r"([a-z0-9][-a-z0-9]*)?[a-z0-9]")
_LONGEST_CLUSTER_NAME: Final = 32
MESH_SIZES: Final = (255, 511)
"""How many clusters a mesh may have: 511 take one of the 16 bits that identities have within a cluster."""


def cluster_name_fault(name: str) -> str:
    """Why it is not a name of a cluster, in Cilium's words; empty for one that is."""
    if not name:
        return "must not be empty"
    if len(name) > _LONGEST_CLUSTER_NAME:
        return f"must not be more than {_LONGEST_CLUSTER_NAME} characters"
    if not _CLUSTER_NAME.fullmatch(name):
        return (
            "must consist of lower case alphanumeric characters and '-', and must start and end with an"
            " alphanumeric character"
        )
    return ""


def cluster_faults(name: str, cluster_id: int, most: int) -> Iterator[str]:
    """What is wrong with the name and the id of the own cluster, in a mesh of so many clusters.

    Source: Cilium 1.17, ClusterInfo.Validate.
    """
    if most not in MESH_SIZES:
        yield f"max-connected-clusters={most}: is invalid; supported values are {list(MESH_SIZES)}"
    elif not 0 <= cluster_id <= most:
        yield f"cluster-id={cluster_id}: invalid cluster id {cluster_id}: must be in range 0..{most}"
    if fault := cluster_name_fault(name):
        yield f"cluster-name={name}: invalid cluster name: {fault}"
    elif cluster_id and name == "default":
        yield (
            f"cluster-id={cluster_id}: cannot use default cluster name (default) with option cluster-id: set"
            " cluster-name"
        )


class AgentSettings(Settings, frozen=True):
    """Directories of the agent, address families, the MTU."""

    state_dir: Path = Path("/var/run/cilium")
    """Directory of the sockets, the pidfile, the delete queue and the endpoints' state."""

    socket_path: Path | None = None
    """Path of the API's socket; unset: cilium.sock in the state-dir."""

    bpf_root: Path = Path("/sys/fs/bpf")
    """Where bpffs is mounted; maps are pinned in tc/globals below it."""

    enable_ipv4: bool = True
    """Give pods IPv4 addresses."""

    enable_ipv6: bool = False
    """Give pods IPv6 addresses."""

    cluster_name: str = "default"
    """Name of the cluster, part of every pod's labels."""

    cluster_id: int = 0
    """Number of the cluster in a mesh, up to max-connected-clusters: the first bits of its pods' identities.
    0: in no mesh. With a number the cluster needs a name of its own."""

    max_connected_clusters: int = 255
    """How many clusters the mesh may have, 255 or 511: the same in all of them."""

    debug: bool = False
    """Log at level debug, here and in the CNI plugin."""

    mtu: int = 0
    """MTU of pod links in bytes; 0 takes the smallest of the node's uplinks."""

    @property
    def globals_dir(self) -> Path:
        """Where maps are pinned."""
        return self.bpf_root / "tc" / "globals"

    @property
    def programs_dir(self) -> Path:
        """Where programs are pinned, and what goes with them."""
        return self.bpf_root / "cilium"

    def faults(self) -> Iterator[str]:
        if not (self.enable_ipv4 or self.enable_ipv6):
            yield "enable-ipv4=false and enable-ipv6=false: a pod needs an address; leave one of them true"
        if self.mtu and not 576 <= self.mtu <= 65535:
            yield f"mtu={self.mtu}: expected 0, or 576 to 65535 bytes"
        for name in ("state_dir", "bpf_root"):
            path: Path = getattr(self, name)
            if not path.is_absolute():
                yield f"{name.replace('_', '-')}={path}: expected an absolute path"
        if len(os.fsencode(self.state_dir)) > LONGEST_STATE_DIR:
            yield (
                f"state-dir={self.state_dir}: too long for the sockets in it, expected at most"
                f" {LONGEST_STATE_DIR} bytes"
            )
        if (socket := self.socket_path) is not None and not socket.is_absolute():
            yield f"socket-path={socket}: expected an absolute path"
        if socket is not None and len(os.fsencode(socket)) > LONGEST_SOCKET:
            yield f"socket-path={socket}: too long for a socket, expected at most {LONGEST_SOCKET} bytes"
        yield from cluster_faults(self.cluster_name, self.cluster_id, self.max_connected_clusters)


# Which kernel the agent needs, and what goes missing on one that is not new.
#
# Source: the kernel's own history; what of it the programs and the agent use is named with each version.

Version = tuple[int, int]

OLDEST: Final[Version] = (5, 14)
"""SO_NETNS_COOKIE, which distinguishes pods' namespaces.

Before that: batches on LPM tries 5.13, bpf_ktime_get_coarse_ns and BPF memory that no RLIMIT_MEMLOCK limits
5.11, bpf_redirect_peer 5.10, fields of maps read by programs 5.9.
"""
BTF: Final = Path("/sys/kernel/btf/vmlinux")
"""The kernel's description of its types (CONFIG_DEBUG_INFO_BTF): conntrack maps are walked by it."""
LOCKDOWN: Final = Path("/sys/kernel/security/lockdown")
"""How far the kernel keeps root out of itself: ``none [integrity] confidentiality``."""
FEATURES: Final[tuple[tuple[Version, str], ...]] = (
    ((6, 8), "a pod's first packet to the node may be late by up to a second"),
)
"""What goes missing before each version."""

_RELEASE: Final = re.compile(r"(\d+)\.(\d+)")


def version_of(release: str) -> Version | None:
    """Major and minor number in a release as uname prints it, such as ``6.1.0-18-amd64``."""
    found = _RELEASE.match(release)
    return (int(found[1]), int(found[2])) if found else None


def check_kernel(release: str) -> None:
    """Raise HiveError, one line, for a kernel that is too old; one that does not say what it is passes."""
    version = version_of(release)
    if version is not None and version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise HiveError(
            f"Linux {release} is too old: the agent needs {oldest} or later, which reports the network"
            " namespace of each pod; start a newer kernel"
        )


def missing_features(release: str, btf: Path = BTF, lockdown: Path = LOCKDOWN) -> list[str]:
    """What does not work on this kernel, each with what it takes."""
    version = version_of(release)
    missing = [
        f"{what}; it takes Linux {'.'.join(map(str, since))}"
        for since, what in FEATURES
        if version is not None and version < since
    ]
    stay = "ended connections, and those of removed pods, stay in the conntrack maps until these are full"
    if not btf.exists():
        missing.append(f"{stay}; it takes a kernel with CONFIG_DEBUG_INFO_BTF")
    if lockdown.exists() and "[confidentiality]" in lockdown.read_text():
        missing.append(f"{stay}; it takes a kernel without lockdown=confidentiality")
    return missing


# The resolved configuration, and the hook that claims the node for this agent.

BPF_FS_MAGIC = 0xCAFE4A11  # linux/magic.h
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # linux/capability.h

FEWEST_FILES = 256
"""Descriptors without which not even the pooled policy maps can be opened."""


class AgentConfig:
    """Paths and names every cell agrees on.

    The hook makes the directories and takes the node: a second agent with the same state directory or the
    same maps is refused, and the pidfile is written. Raises HiveError, one line, when the node is not usable.
    """

    ipv4: bool = True
    """Whether pods get IPv4 addresses."""
    ipv6: bool = False
    """Whether pods get IPv6 addresses."""
    cluster_id: int = 0
    """Of the cluster in a mesh; 0: it is in none."""
    max_connected_clusters: int = 255
    """How many clusters the mesh may have."""

    def __init__(self, settings: AgentSettings, lifecycle: Lifecycle, log: Logger) -> None:
        self.state_dir = settings.state_dir
        self.bpf_root = settings.bpf_root
        self.cluster_name = settings.cluster_name
        self.cluster_id = settings.cluster_id
        self.max_connected_clusters = settings.max_connected_clusters
        self.debug = settings.debug
        self.mtu = settings.mtu
        self.ipv4 = settings.enable_ipv4
        self.ipv6 = settings.enable_ipv6
        self.state = self.state_dir / "state"
        self.globals_dir = settings.globals_dir
        self.programs_dir = settings.programs_dir
        self.api_socket = settings.socket_path or self.state_dir / "cilium.sock"
        self.cni_socket = self.state_dir / "cni.sock"
        self.delete_queue = self.state_dir / "deleteQueue"
        self.pidfile = self.state_dir / "cilium.pid"
        self._locks: list[int] = []
        self._log = log
        lifecycle.append(Hook("claim the node", self._claim, self._leave))

    @property
    def node_name(self) -> str:
        """``K8S_NODE_NAME`` as the DaemonSet sets it, else the host's name."""
        return os.environ.get("K8S_NODE_NAME") or socket.gethostname()

    async def _claim(self) -> None:
        release = os.uname().release
        check_kernel(release)
        for missing in missing_features(release):
            self._log.warning(missing, kernel=release)
        check_privileges()
        check_bpffs(self.bpf_root)
        if self.ipv6:
            check_ipv6()
        raise_descriptor_limit()
        try:
            with writable("state-dir", self.state_dir):
                self.state_dir.mkdir(mode=0o775, parents=True, exist_ok=True)
                self._locks.append(take_lock(self.state_dir / "agent.lock", "state-dir", self.pidfile))
            with writable("bpf-root", self.bpf_root):
                for directory in (self.globals_dir, self.programs_dir):
                    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
                self._locks.append(take_lock(self.programs_dir, "bpf-root"))
            # An agent of another make does not know our locks; from here on the pidfile is ours.
            check_directory("socket-path", self.api_socket)
            for path in (self.api_socket, self.cni_socket):
                clear_socket(path)
        except BaseException:
            self._unlock()
            raise
        try:
            with writable("state-dir", self.state_dir):
                for directory, mode in ((self.state, 0o770), (self.delete_queue, 0o755)):
                    directory.mkdir(mode=mode, exist_ok=True)
                write_pidfile(self.pidfile)
        except BaseException:
            await self._leave()
            raise
        self._log.info("node claimed", state_dir=str(self.state_dir), bpf_root=str(self.bpf_root))

    async def _leave(self) -> None:
        self.pidfile.unlink(missing_ok=True)
        self._unlock()

    def _unlock(self) -> None:
        while self._locks:
            os.close(self._locks.pop())


@contextmanager
def writable(setting: str, directory: Path) -> Iterator[None]:
    """Report what could not be made below a directory, in one line that names its setting."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise HiveError(
            f"{setting} {directory} is not usable: {where}{error.strerror}; expected a directory that the"
            " agent may write to, with room for its files"
        ) from error


def check_privileges() -> None:
    """Raise HiveError unless the process has the capabilities that BPF and rtnetlink need."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    effective = int(next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1], 16)
    missing = [name for name, bit in CAPABILITIES.items() if not effective >> bit & 1]
    if missing:
        raise HiveError(f"the agent lacks {' and '.join(missing)}: run it as root, or grant the capabilities")


def check_bpffs(root: Path) -> None:
    """Raise HiveError unless ``root`` is on a mounted bpffs (statfs(2), f_type)."""
    libc = ctypes.CDLL(None, use_errno=True)
    answer = (ctypes.c_long * 32)()
    if libc.statfs(os.fsencode(root), ctypes.byref(answer)) or answer[0] & 0xFFFFFFFF != BPF_FS_MAGIC:
        raise HiveError(f"no bpffs at bpf-root {root}: mount one with: mount -t bpf bpf {root}")


def check_ipv6(root: Path = Path("/proc/sys")) -> None:
    """Raise HiveError unless the kernel has IPv6, and it is on (kernel Documentation/networking/ipv6.rst)."""
    switch = root / "net/ipv6/conf/all/disable_ipv6"
    try:
        off = switch.read_text(encoding="ascii").strip() != "0"
    except OSError:
        raise HiveError(
            "enable-ipv6=true, and this kernel has no IPv6: start it without ipv6.disable=1, or set"
            " enable-ipv6=false"
        ) from None
    if off:
        raise HiveError(
            "enable-ipv6=true, and IPv6 is off on this node: set net.ipv6.conf.all.disable_ipv6=0, or"
            " enable-ipv6=false"
        )


def check_directory(setting: str, path: Path) -> None:
    """Raise HiveError unless the directory of a path is there."""
    if not path.parent.is_dir():
        raise HiveError(
            f"{setting} {path}: {path.parent} is not a directory; make it, or leave the setting out"
        )


def raise_descriptor_limit() -> None:
    """Allow as many descriptors as the hard limit does: every pod's policy map is one.

    Raises HiveError when that is too few for the agent itself.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FEWEST_FILES:
        raise HiveError(
            f"the agent may open {hard} files at most, and needs {FEWEST_FILES} and more, one for each pod:"
            " raise the limit (ulimit -Hn, or LimitNOFILE of systemd)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def take_lock(path: Path, setting: str, pidfile: Path | None = None) -> int:
    """Lock a file, or a directory that is there; its descriptor. HiveError when another agent holds it."""
    kind = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT
    lock = os.open(path, kind | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        holder = f" (pid {pid})" if pidfile and (pid := read_pidfile(pidfile)) else ""
        raise HiveError(
            f"another agent{holder} has the same {setting}, {path.parent}: stop it first"
        ) from None
    return lock


def read_pidfile(path: Path) -> str:
    """The pid in it, empty when there is none."""
    try:
        text = read_regular(path, 100).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return text if text.isdigit() else ""


def write_pidfile(path: Path) -> None:
    """Overwrite the pidfile, mode 0660, including a stale one of a killed agent."""
    path.write_text(f"{os.getpid()}\n", encoding="ascii")
    path.chmod(0o660)


cell = module(
    "config",
    "Configuration and the claim on the node",
    config(AgentSettings),
    provide(AgentConfig),
)
