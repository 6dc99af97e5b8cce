"""The resolved configuration, and the hook that claims the node for this agent.

Needs: AgentSettings, Lifecycle.   Gives: AgentConfig.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cells.config.kernel import check_kernel, missing_features
from cells.config.settings import AgentSettings
from lifecycle import HiveError, Hook, Lifecycle, Logger
from lifecycle.http import clear_socket
from lifecycle.settings import read_regular

BPF_FS_MAGIC = 0xCAFE4A11  # linux/magic.h
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # linux/capability.h

FEWEST_FILES = 256
"""Descriptors without which not even the policy maps kept ready can be opened."""


class AgentConfig:
    """Paths and names every cell agrees on.

    The hook makes the directories and takes the node: a second agent with the same state directory or the
    same maps is refused, and the pidfile is written. Raises HiveError, one line, when the node is not usable.
    """

    ipv4: bool = True
    """Whether pods get IPv4 addresses."""
    ipv6: bool = False
    """Whether pods get IPv6 addresses."""

    def __init__(self, settings: AgentSettings, lifecycle: Lifecycle, log: Logger) -> None:
        self.state_dir = settings.state_dir
        self.bpf_root = settings.bpf_root
        self.cluster_name = settings.cluster_name
        self.debug = settings.debug
        self.mtu = settings.mtu
        self.ipv4 = settings.enable_ipv4
        self.ipv6 = settings.enable_ipv6
        self.state = self.state_dir / "state"
        self.globals_dir = self.bpf_root / "tc" / "globals"
        self.programs_dir = self.bpf_root / "cilium"
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
    """Tell what could not be made below a directory, in one line that names its setting."""
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
        raise HiveError(f"{setting} {path}: {path.parent} is no directory; make it, or leave the setting out")


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
    path.chmod(0o660)
