"""The machine as a run of tests finds it and leaves it: what came and stayed fails the run, by name.

A process that runs tests as root first moves into network and mount namespaces of its own, furnished as a
lab's node is: rules, routes, links, /run and bpffs are its own, and other runs on the machine do not matter.
What is shared is compared, too: temporary files, which have a folder of the run, and control groups.
A command that downloads packages runs outside of those namespaces.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from pyroute2 import IPRoute

from hive import syscalls
from hive.lab.namespaces import set_up_node

CGROUPS = Path("/sys/fs/cgroup")
until_the_end = ExitStack()
"""What tests of several files share; closed before the last comparison."""
_LOCAL = 255
"""The kernel's local table: it follows addresses, which are compared with the links."""


_OUTSIDE: Final[dict[str, int]] = {}
"""Descriptors of the namespaces that this process has left, by nsenter's names for them."""


def enter() -> None:
    """Move this thread, and all processes it starts from now on, into new namespaces; does nothing without
    root.
    """
    if os.geteuid() == 0:
        for name, kind in {"net": "net", "mount": "mnt"}.items():
            _OUTSIDE[name] = os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)
        syscalls.unshare(syscalls.CLONE_NEWNET | syscalls.CLONE_NEWNS)
        set_up_node()


def outside(*command: str | Path) -> list[str]:
    """Return a command that runs in the machine's own network, where package registries are reachable."""
    words = list(map(str, command))
    if not _OUTSIDE:
        return words
    namespaces = [f"--{name}=/proc/{os.getpid()}/fd/{fd}" for name, fd in _OUTSIDE.items()]
    return ["nsenter", *namespaces, "--wd=.", "--", *words]


def temporary_folder() -> Path:
    """Create the folder for temporary files of this process and its children, also pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="hive-"))
    folder.chmod(0o755)  # for tests of programs that run as another user
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    return folder


class Watch:
    """Compares the machine with its state at the beginning."""

    def __init__(self) -> None:
        self._before = frozenset(self._now())
        self._since: dict[str, str] = {}

    def look(self, after: str) -> None:
        """Record what is new, with ``after`` as the cause; forget what was new and is removed."""
        new = frozenset(self._now()) - self._before
        self._since = {what: self._since.get(what, after) for what in sorted(new)}

    def left(self) -> list[str]:
        """Return a line for each thing that is present at the end and was not at the beginning."""
        until_the_end.close()
        self.look("all tests")
        outermost = [what for what in self._since if str(Path(what).parent) not in self._since]
        return [f"{what} (after {self._since[what]})" for what in outermost]

    def _now(self) -> Iterator[str]:
        if os.geteuid() == 0:
            yield from network()
            yield from files(Path("/run"))
            yield from files(Path("/sys/fs/bpf"))
        yield from files(Path(tempfile.gettempdir()))
        yield from (f"control group {name}" for name in cgroups())


def network() -> Iterator[str]:
    """Return links with their addresses, rules and routes of this network namespace."""
    with IPRoute() as ip:
        names = {link["index"]: link.get("ifname") for link in ip.get_links()}
        yield from (f"link {name}" for name in names.values())
        for address in ip.get_addr():
            yield f"address {address.get('address')}/{address['prefixlen']} of {names.get(address['index'])}"
        for rule in (*ip.get_rules(family=2), *ip.get_rules(family=10)):
            table = rule.get("table") or rule["table"]
            mark = f" fwmark {rule.get('fwmark'):#x}" if rule.get("fwmark") else ""
            yield f"rule {rule.get('priority') or 0}:{mark} lookup {table} (family {rule['family']})"
        for route in (*ip.get_routes(family=2), *ip.get_routes(family=10)):
            table = route.get("table") or route["table"]
            if table != _LOCAL:
                place = f"{route.get('dst') or 'default'}/{route['dst_len']}"
                yield f"route {place} of table {table} by {names.get(route.get('oif'))}"


def files(folder: Path) -> Iterator[str]:
    """Return two levels of a folder's content, which name what a test left."""
    with suppress(FileNotFoundError):
        for entry in folder.iterdir():
            if entry.name.startswith("pytest-of-"):
                continue
            below = []
            if entry.is_dir() and not entry.is_symlink():
                with suppress(FileNotFoundError, PermissionError):
                    below = list(entry.iterdir())
            yield from map(str, [entry, *below])


def cgroups() -> Iterator[str]:
    """Return the control groups with this process's pid in their names: other test runs create theirs
    meanwhile.
    """
    mark = re.compile(rf"hive-.*-{os.getpid()}(-.*)?")
    for root in [CGROUPS, *(each for each in CGROUPS.iterdir() if each.is_dir() and not each.is_symlink())]:
        with suppress(FileNotFoundError):
            yield from (str(each) for each in root.glob("hive-*") if mark.fullmatch(each.name))


def remove(folder: Path) -> None:
    """Remove the run's folder of temporary files."""
    shutil.rmtree(folder, ignore_errors=True)
    tempfile.tempdir = None
    os.environ.pop("TMPDIR", None)
