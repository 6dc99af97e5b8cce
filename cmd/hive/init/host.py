"""Enters the node's namespaces from an init container.

A container has its own mount namespace; mounts and files for the node must be created in the node's. Later
imports would be searched in the node's files, so import before.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from hive import syscalls

NAMESPACES = {"cgroup": syscalls.CLONE_NEWCGROUP, "mnt": syscalls.CLONE_NEWNS}

host_option: Callable[[Callable[..., object]], Callable[..., object]] = click.option(
    "--host-process",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Work in the namespaces of a process of the node, given by its proc directory, such as /hostproc/1.",
)


def enter_host(process: Path, namespaces: Sequence[str] = ("mnt",)) -> None:
    """Move this process into another one's namespaces, mounts last. Raises OSError with the namespace."""
    with ExitStack() as files:
        opened = [
            (name, files.enter_context((process / "ns" / name).open("rb")))
            for name in sorted(namespaces, key=("cgroup", "mnt").index)
        ]
        syscalls.unshare(syscalls.CLONE_FS)
        for name, file in opened:
            syscalls.setns(file.fileno(), NAMESPACES[name])
