"""Cgroups of lab nodes: socket load balancing applies to a node's processes, not to the whole machine."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

_OPTIONS = ("--bpf-lb-sock", "--kube-proxy-replacement")
_SOCKETS = {text for each in _OPTIONS for text in (each, f"{each}=true")}


def settings_of(name: str, settings: Sequence[str]) -> list[str]:
    """Return settings by which an agent attaches its socket programs to a cgroup of its node.

    None if the settings enable no socket load balancing, or name a cgroup root. Raises click.ClickException
    if no cgroup v2 is mounted.
    """
    asked = any(each in _SOCKETS for each in settings)
    if not asked or any(each.startswith("--cgroup-root") for each in settings):
        return []
    root = _root()
    if root is None:
        raise click.ClickException(
            "no cgroup v2 is mounted, in which the node could have a group of its own: mount it on"
            " /sys/fs/cgroup/unified"
        )
    group = _group(root, name)
    group.mkdir(exist_ok=True)
    return [f"--cgroup-root={group}"]


def join(name: str) -> None:
    """Move this process into the cgroup of a node, if the node has one. Raises OSError."""
    root = _root()
    if root is not None:
        with suppress(FileNotFoundError):
            (_group(root, name) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def remove(name: str) -> None:
    """Remove the cgroup of a removed node, unless it still has processes."""
    root = _root()
    if root is not None:
        with suppress(OSError):
            _group(root, name).rmdir()


def _group(root: Path, name: str) -> Path:
    return root / f"hive-lab-{name}"


def _root() -> Path | None:
    """Return the mount point of cgroup v2; None if it is not mounted."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        place, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            return Path(place.split(" ")[4])
    return None
