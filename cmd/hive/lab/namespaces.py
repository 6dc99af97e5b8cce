"""Create network and mount namespaces, set them up as a node, keep them without a process, and enter them."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from hive import syscalls
from hive.lab.children import Child, Stop, run_child, signals_blocked, unblock_signals

T = TypeVar("T")


class Namespaces:
    """A network namespace and, for a node, a mount namespace, referenced by open files.

    The creator closes it; the kernel removes the namespaces when nothing else references them. The references
    are file objects, not descriptors, so that an interrupt before they are stored closes them.
    """

    def __init__(self, net: FileIO, mnt: FileIO | None = None) -> None:
        self._net = net
        self._mnt = mnt

    @classmethod
    def open(cls, net: Path | str, mnt: Path | str | None = None) -> "Namespaces":
        """Open namespaces by path, such as bind mounts or ``/proc/<pid>/ns/net``. Raises OSError."""
        return cls(FileIO(net), None if mnt is None else FileIO(mnt))

    @property
    def net(self) -> int:
        """Descriptor of the network namespace."""
        return self._net.fileno()

    @property
    def mnt(self) -> int:
        """Descriptor of the mount namespace. Raises ValueError if there is none."""
        if self._mnt is None:
            raise ValueError("these namespaces have no mount namespace")
        return self._mnt.fileno()

    def enter(self) -> None:
        """Move the calling thread inside; with a mount namespace, the working directory becomes ``/``."""
        if self._mnt is not None:
            syscalls.unshare(syscalls.CLONE_FS)  # setns(2): not with a root directory other threads share
            syscalls.setns(self.mnt, syscalls.CLONE_NEWNS)
        syscalls.setns(self.net, syscalls.CLONE_NEWNET)

    def run(self, fn: Callable[..., T], *args: Any, within: float | None = None) -> T:
        """Run ``fn(*args)`` in a forked child inside; return its result or raise its exception."""
        return run_child(fn, *args, enter=self.enter, within=within)

    def start(self, fn: Callable[..., T], *args: Any) -> Child[T]:
        """Start ``fn(stop, *args)`` in a forked child inside; see :class:`hive.lab.children.Child`."""
        return Child(fn, *args, enter=self.enter)

    def popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program inside; ``options`` are those of subprocess.Popen."""

        def enter() -> None:
            unblock_signals()
            self.enter()

        with signals_blocked():
            return subprocess.Popen(command, preexec_fn=enter, **options)  # noqa: PLW1509 - one thread

    def close(self) -> None:
        """Close the references."""
        self._net.close()
        if self._mnt is not None:
            self._mnt.close()

    def __enter__(self) -> "Namespaces":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def new_netns() -> Namespaces:
    """Create a network namespace as a pod gets it (``lo`` down); the caller stays in its own."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.unshare(syscalls.CLONE_NEWNET)
        try:
            return Namespaces.open("/proc/thread-self/ns/net")
        finally:
            syscalls.setns(home, syscalls.CLONE_NEWNET)
    finally:
        os.close(home)


def new_node(share: Path | None = None, cpu: int | None = None) -> Namespaces:
    """Create network and mount namespaces set up as a node; see :func:`set_up_node`.

    ``cpu`` is the processor to create them on; see :func:`new_held_node`.
    """
    ready_read, ready_write = os.pipe()

    def make(stop: Stop) -> None:
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})
        syscalls.unshare(syscalls.CLONE_NEWNET | syscalls.CLONE_NEWNS)
        set_up_node(share)
        os.write(ready_write, b"x")
        os.close(ready_write)
        stop.wait(60)

    child = Child(make)
    os.close(ready_write)
    try:
        if os.read(ready_read, 1):
            return Namespaces.open(f"/proc/{child.pid}/ns/net", f"/proc/{child.pid}/ns/mnt")
    finally:
        os.close(ready_read)
        child.finish(within=30)
    raise AssertionError("unreachable: the child's own error is raised above")


def new_held_node(share: Path, net: Path, mnt: Path) -> Namespaces:
    """Create a :func:`new_node` that the new files ``net`` and ``mnt`` keep alive.

    A mount namespace can only be bound in one with a smaller number (fs/namespace.c, mnt_ns_loop()), and
    newer kernels number by processor: the kernel may refuse one that was created on another processor than
    ours with EINVAL, unless ours is the machine's first.
    """
    processors = [None, *sorted(os.sched_getaffinity(0))]
    while True:
        node = new_node(share, processors.pop(0))
        try:
            hold(node.mnt, mnt)
            hold(node.net, net)
        except OSError as error:
            node.close()
            if error.errno != errno.EINVAL or not processors:
                raise
        else:
            return node


def set_up_node(share: Path | None = None) -> None:
    """Set up the caller's new namespaces as a node: ``lo`` up, private /run, /sys and bpffs.

    ``/run`` becomes an empty tmpfs with ``cilium`` and ``netns``, so that default paths are private and no
    directory stays on the machine. ``share``, a directory below /run, and the machine's cgroups stay visible.
    """
    syscalls.set_loopback_up()
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
    # Our copies of mounts below /run would keep namespaces of others alive.
    for path in reversed(mounted_below(Path("/run"))):
        if path != share:
            try:
                syscalls.unmount(path, syscalls.MNT_DETACH)
            except OSError:
                # Another process removes it in this moment, which unmounts it in every namespace:
                # fs/namespace.c, __detach_mounts(). Until its name is removed as well, the error is EINVAL.
                if path in mounted_below(Path("/run")):
                    raise
    handle = None if share is None else os.open(share, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    syscalls.mount("run", "/run", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=0755")
    if share is not None and handle is not None:
        share.mkdir(parents=True)
        syscalls.mount(f"/proc/self/fd/{handle}", share, flags=syscalls.MS_BIND)
        os.close(handle)
    Path("/run/cilium").mkdir()
    Path("/run/netns").mkdir()
    if Path("/var/run").resolve() != Path("/run"):
        syscalls.mount("/run", "/var/run", flags=syscalls.MS_BIND | syscalls.MS_REC)
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    cgroups = os.open("/sys/fs/cgroup", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    syscalls.mount("sysfs", "/sys", "sysfs", flags)
    syscalls.mount(f"/proc/self/fd/{cgroups}", "/sys/fs/cgroup", flags=syscalls.MS_BIND | syscalls.MS_REC)
    os.close(cgroups)
    syscalls.mount("bpf", "/sys/fs/bpf", "bpf", flags, "mode=0700")


def mounted_below(directory: Path) -> list[Path]:
    """Return the mount points below ``directory`` in the caller's mount namespace, in mount order."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    points = (Path(line.split(" ")[4].encode().decode("unicode_escape")) for line in lines)
    return [point for point in points if directory in point.parents]


def hold(fd: int, path: Path) -> None:
    """Keep a namespace alive by a bind mount on the new file ``path``; :func:`release` removes it."""
    path.touch(mode=0o600, exist_ok=False)
    try:
        syscalls.mount(f"/proc/self/fd/{fd}", path, flags=syscalls.MS_BIND)
    except OSError:
        path.unlink()
        raise


def release(path: Path) -> None:
    """Remove a bind mount of :func:`hold` and its file."""
    syscalls.unmount(path, syscalls.MNT_DETACH)
    path.unlink()


@contextmanager
def inside(namespaces: Namespaces) -> Iterator[None]:
    """Run a block of the calling thread in another network namespace; the mount namespace stays."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.setns(namespaces.net, syscalls.CLONE_NEWNET)
        try:
            yield
        finally:
            syscalls.setns(home, syscalls.CLONE_NEWNET)
    finally:
        os.close(home)
