"""The agent's node-wide configuration, and the hook that claims the node.

AgentConfig has the resolved paths and names for all cells. A cell that depends on it starts after its hook:
the directories exist, bpffs is mounted, the process has the capabilities, and no other agent runs on this
node.
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


# Chaining with other CNI plugins.
#
# Source: Cilium 1.17, cni-chaining-mode.


class ChainingMode(msgspec.Struct, frozen=True):
    """The chaining mode of the CNI configuration that the agent writes."""

    name: str

    @property
    def own_links(self) -> bool:
        """Whether our plugin creates the pods' links, not another one."""
        return self.name in ("none", "portmap")


# Settings of the whole agent.

LONGEST_SOCKET: Final = 107
"""Maximum length of a unix socket's path in bytes (unix(7))."""
LONGEST_STATE_DIR: Final = LONGEST_SOCKET - len("/cilium.sock")
"""Maximum length of the path in bytes."""

_CLUSTER_NAME: Final = re.compile(r"([a-z0-9][-a-z0-9]*)?[a-z0-9]")
_LONGEST_CLUSTER_NAME: Final = 32
MESH_SIZES: Final = (255, 511)
"""Maximum numbers of clusters; 511 use one of the 16 bits of identities within a cluster."""


def cluster_name_fault(name: str) -> str:
    """Return why a cluster name is invalid, in Cilium's words; empty if it is valid."""
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
    """Yield what is wrong with name and id of the local cluster, in a mesh of up to ``most`` clusters.

    Source: Cilium 1.17, ClusterInfo.Validate.
    """
    if most not in MESH_SIZES:
        option = f"max-connected-clusters={most}"
        yield f"{option}: --{option} is invalid; supported values are {list(MESH_SIZES)}"
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
    """Directories of the agent, address families and MTU."""

    state_dir: Path = Path("/var/run/cilium")
    """Directory of the sockets, the pidfile, the delete queue and the endpoints' state."""

    socket_path: Path | None = None
    """Path of the API's socket; unset: cilium.sock in the state-dir."""

    bpf_root: Path = Path("/sys/fs/bpf")
    """Mount point of bpffs; maps are pinned in its tc/globals."""

    enable_ipv4: bool = True
    """Allocate IPv4 addresses to pods."""

    enable_ipv6: bool = False
    """Allocate IPv6 addresses to pods."""

    cluster_name: str = "default"
    """Name of the cluster; a label of every pod."""

    cluster_id: int = 0
    """Id of the cluster in a mesh, up to max-connected-clusters: the high bits of its pods' identities. 0: no
    mesh. Another id requires a cluster-name.
    """

    max_connected_clusters: int = 255
    """Maximum number of clusters in the mesh, 255 or 511; the same in all clusters."""

    debug: bool = False
    """Log at level debug, in the agent and in the CNI plugin."""

    mtu: int = 0
    """MTU of pods' links in bytes; 0: the smallest of the node's uplinks."""

    @property
    def globals_dir(self) -> Path:
        """Directory of pinned maps."""
        return self.bpf_root / "tc" / "globals"

    @property
    def programs_dir(self) -> Path:
        """Directory of pinned programs and links."""
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


# The required kernel, and the features that older kernels lack.
#
# Source: the kernel's history; each version is listed with the feature that the programs or the agent use.

Version = tuple[int, int]

OLDEST: Final[Version] = (5, 14)
"""SO_NETNS_COOKIE, which distinguishes pods' namespaces.

Older features in use: batches on LPM tries 5.13, bpf_ktime_get_coarse_ns and BPF memory without
RLIMIT_MEMLOCK 5.11, bpf_redirect_peer 5.10, fields of maps read by programs 5.9.
"""
BTF: Final = Path("/sys/kernel/btf/vmlinux")
"""The kernel's BTF (CONFIG_DEBUG_INFO_BTF), which programs need to walk conntrack maps."""
LOCKDOWN: Final = Path("/sys/kernel/security/lockdown")
"""The kernel's lockdown mode: ``none [integrity] confidentiality``."""
FEATURES: Final[tuple[tuple[Version, str], ...]] = (
    ((6, 8), "the first packet of a pod to the node may be delayed by up to a second"),
)
"""Version -> what does not work before it."""

_RELEASE: Final = re.compile(r"(\d+)\.(\d+)")


def version_of(release: str) -> Version | None:
    """Parse major and minor version of a kernel release such as ``6.1.0-18-amd64``; None if it has none."""
    found = _RELEASE.match(release)
    return (int(found[1]), int(found[2])) if found else None


def check_kernel(release: str) -> None:
    """Raise HiveError if the kernel is too old; an unknown release passes."""
    version = version_of(release)
    if version is not None and version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise HiveError(
            f"Linux {release} is too old: the agent needs {oldest} or later, which reports the network"
            " namespace of each pod; start a newer kernel"
        )


def missing_features(release: str, btf: Path = BTF, lockdown: Path = LOCKDOWN) -> list[str]:
    """Return what does not work on this kernel, each with its requirement."""
    version = version_of(release)
    missing = [
        f"{what}; requires Linux {'.'.join(map(str, since))}"
        for since, what in FEATURES
        if version is not None and version < since
    ]
    stale = "stale conntrack entries stay in the maps until these are full"
    if not btf.exists():
        missing.append(f"{stale}; requires a kernel with CONFIG_DEBUG_INFO_BTF")
    if lockdown.exists() and "[confidentiality]" in lockdown.read_text():
        missing.append(f"{stale}; requires a kernel without lockdown=confidentiality")
    return missing


# The resolved configuration, and the hook that claims the node for this agent.

BPF_FS_MAGIC = 0xCAFE4A11  # linux/magic.h
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # linux/capability.h

FEWEST_FILES = 256
"""Minimum number of file descriptors, enough for the pooled policy maps."""


class AgentConfig:
    """The resolved paths and names for all cells, and the hook that claims the node.

    The hook creates the directories, takes the locks and writes the pidfile. Raises HiveError if the node is
    unsuitable or another agent has the same state directory or maps.
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
        """Id of the cluster in a mesh; 0: no mesh."""
        self.max_connected_clusters = settings.max_connected_clusters
        """Maximum number of clusters in the mesh."""
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
        """The name of this node: ``K8S_NODE_NAME``, else the host's name."""
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
                self._locks.append(lock_file(self.state_dir / "agent.lock", "state-dir", self.pidfile))
            with writable("bpf-root", self.bpf_root):
                for directory in (self.globals_dir, self.programs_dir):
                    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
                self._locks.append(lock_file(self.programs_dir, "bpf-root"))
            # Cilium's agent ignores our locks. From here on the pidfile is ours.
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
    """Convert an OSError below a directory to a HiveError that names the setting."""
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
    """Raise HiveError unless the parent directory of a path exists."""
    if not path.parent.is_dir():
        raise HiveError(
            f"{setting} {path}: {path.parent} is not a directory; make it, or leave the setting out"
        )


def raise_descriptor_limit() -> None:
    """Raise the descriptor limit to the hard limit, since every pod's policy map needs one.

    Raises HiveError if the hard limit is too low for the agent itself.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FEWEST_FILES:
        raise HiveError(
            f"the agent may open {hard} files at most, and needs {FEWEST_FILES} and more, one for each pod:"
            " raise the limit (ulimit -Hn, or LimitNOFILE of systemd)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def lock_file(path: Path, setting: str, pidfile: Path | None = None) -> int:
    """Lock a file or an existing directory; return its descriptor.

    Raises HiveError if another agent holds the lock.
    """
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
    """Return the pid in a pidfile; empty without a valid one."""
    try:
        text = read_regular(path, 100).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return text if text.isdigit() else ""


def write_pidfile(path: Path) -> None:
    """Write the pidfile with mode 0660, in place of a stale one."""
    path.write_text(f"{os.getpid()}\n", encoding="ascii")
    path.chmod(0o660)


cell = module(
    "config",
    "Configuration and the claim on the node",
    config(AgentSettings),
    provide(AgentConfig),
)
