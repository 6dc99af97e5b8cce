"""A control group for a lab node: services at sockets are served to its processes, not to the machine's."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

_OPTIONS = ("--bpf-lb-sock", "--kube-proxy-replacement")
_SOCKETS = {text for each in _OPTIONS for text in (each, f"{each}=true")}


def settings_of(name: str, settings: Sequence[str]) -> list[str]:
    """Further settings for an agent with these, so that it leaves the machine's processes alone.

    Who is to reach services at sockets joins the group. Raises click.ClickException where there can be none.
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
    """Put this process into the group of a node, if it has one. Raises OSError."""
    root = _root()
    if root is not None:
        with suppress(FileNotFoundError):
            (_group(root, name) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def remove(name: str) -> None:
    """Remove the group of a node that no longer exists; one that still has processes stays."""
    root = _root()
    if root is not None:
        with suppress(OSError):
            _group(root, name).rmdir()


def _group(root: Path, name: str) -> Path:
    return root / f"hive-lab-{name}"


def _root() -> Path | None:
    """Where cgroup v2 is mounted on this machine, None if nowhere."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        place, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            return Path(place.split(" ")[4])
    return None
