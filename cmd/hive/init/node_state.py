"""The agent's state on a node, and its removal, one kind at a time.

Each function removes as much as possible and returns the names of removed objects; missing objects are
ignored.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import TYPE_CHECKING, Any

from hive import syscalls

if TYPE_CHECKING:
    from pyroute2 import IPRoute

POD_LINKS = "lxc"
LINKS = ("cilium_", POD_LINKS)
"""Prefixes of the names of the agent's links."""
PROGRAMS = "cil_"
"""Prefixes of the names of its programs, on any device."""
PINS = ("cilium_", "hive_")
OWN_CNI_FILES = (
    "00-cilium-cni.conf",
    "05-cilium-cni.conf",
    "05-cilium.conf",
    "05-cilium.conflist",
    "10-cilium-cni.conf",
)
BACKUP = ".cilium_bak"
_INGRESS, _EGRESS = 0xFFFFFFF2, 0xFFFFFFF3  # linux/pkt_sched.h: TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_…)


class NotRemovedError(Exception):
    """Some objects could not be removed; ``removed`` has the names of the others."""

    def __init__(self, text: str, removed: list[str]) -> None:
        super().__init__(text)
        self.removed = removed


def each(names: Iterable[str], remove: Callable[[str], None]) -> list[str]:
    """Remove objects one by one, despite failures; return the removed names. Raises NotRemovedError."""
    removed, faults = [], []
    for name in names:
        try:
            remove(name)
        except OSError as error:
            faults.append(f"{name}: {error.strerror or error}")
        else:
            removed.append(name)
    if faults:
        raise NotRemovedError("; ".join(faults), removed)
    return removed


def remove_tree(directory: Path) -> list[str]:
    """Remove a directory with its content."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return []
    return [str(directory)]


def remove_pins(directory: Path) -> list[str]:
    """Remove the pins of our maps; other pins in the directory stay."""
    if not directory.is_dir():
        return []
    pins = sorted(str(path) for path in directory.iterdir() if path.name.startswith(PINS))
    return each(pins, lambda pin: Path(pin).unlink())


def unmount(directory: Path) -> list[str]:
    """Unmount a directory lazily, once its last user has ended."""
    if not directory.is_mount():
        return []
    syscalls.unmount(directory, syscalls.MNT_DETACH)
    return [str(directory)]


def remove_cni_configuration(directory: Path, written: str) -> list[str]:
    """Restore others' configurations, then remove our own, including ``written``."""
    if directory.is_dir():
        for backup in sorted(directory.glob(f"*{BACKUP}")):
            backup.rename(backup.with_name(backup.name.removesuffix(BACKUP)))
    ours = [directory / name for name in OWN_CNI_FILES]
    if written:
        ours.append(Path(written))
    return each([str(path) for path in ours if path.is_file()], lambda path: Path(path).unlink())


def remove_namespaces() -> list[str]:
    """Remove named network namespaces of the agent."""
    from pyroute2 import netns

    names = [name for name in netns.listnetns() if name.startswith("cilium-")]
    return each(names, netns.remove)


def remove_links() -> list[str]:
    """Delete our links, those of pods first; the kernel deletes their routes and addresses."""
    with _routes() as routes:
        indexes = {link.get("ifname"): link["index"] for link in routes.get_links()}
        names = sorted((name for name in indexes if name.startswith(LINKS)), reverse=True)
        return each(names, lambda name: _delete_link(routes, indexes[name]))


def pod_links() -> list[str]:
    """Return the names of existing pod links."""
    with _routes() as routes:
        names = (str(link.get("ifname")) for link in routes.get_links())
        return sorted(name for name in names if name.startswith(POD_LINKS))


def remove_rules() -> list[str]:
    """Delete routing rules and routes of packets to proxies, and the nftables table."""
    from cells.netlink import nftables
    from cells.netlink.connection import NetlinkError
    from cells.netlink.network import remove_local_delivery
    from cells.proxy.dns.port import MARKED

    with _routes() as routes:
        found = {
            family
            for family in (AF_INET, AF_INET6)
            for each in routes.get_rules(family=family, FRA_TABLE=MARKED.table)
            if (each.get("priority"), each.get("fwmark")) == (MARKED.priority, MARKED.mark)
        }
    remove_local_delivery(MARKED, found)
    names = [f"the rule for table {MARKED.table}, IPv{4 if one == AF_INET else 6}" for one in sorted(found)]
    try:
        if nftables.remove_table(nftables.OWN_TABLE):
            names.append(f"the table inet {nftables.OWN_TABLE} of nftables")
    except NetlinkError as error:
        if error.errno not in nftables.NOT_SUPPORTED:
            raise
    return names


def detach_programs() -> list[str]:
    """Detach our programs from all devices; others' filters stay."""
    with _routes() as routes:
        removed = []
        for link, parent, entry in list(_filters(routes)):
            where = {"parent": parent, "info": entry["info"], "handle": entry["handle"]}
            routes.tc("del-filter", "bpf", link["index"], **where)
            removed.append(f"{_program(entry)} from {link.get('ifname')}")
        for link in routes.get_links():
            removed += _detach_xdp(link["index"], link.get("ifname"))
        return removed


def _detach_xdp(ifindex: int, name: str) -> list[str]:
    """Detach our XDP program from a device, if there is one."""
    from cells.datapath.attachments import is_ours
    from cells.maps.bpf import program_by_id
    from cells.netlink.links import detach_xdp, xdp_of

    removed = []
    for number, generic in zip(xdp_of(ifindex), (False, True), strict=True):
        if is_ours(number):
            program = program_by_id(number)
            try:
                detach_xdp(ifindex, program, generic=generic)
            finally:
                os.close(program)
            removed.append(f"cil_xdp_entry from {name}")
    return removed


def _filters(routes: "IPRoute") -> Iterator[tuple[Any, int, Any]]:
    for link in routes.get_links():
        for parent in (_INGRESS, _EGRESS):
            for entry in routes.get_filters(link["index"], parent=parent):
                if _program(entry).startswith(PROGRAMS):
                    yield link, parent, entry


def _program(entry: Any) -> str:
    """Return the name of a filter's program; filters of other kinds and the list's head have none."""
    options = entry.get_attr("TCA_OPTIONS") if entry.get_attr("TCA_KIND") == "bpf" else None
    name = options.get_attr("TCA_BPF_NAME") if options else None
    return str(name or "").partition(":")[0]


def _delete_link(routes: "IPRoute", index: int) -> None:
    from pyroute2 import NetlinkError

    try:
        routes.link("del", index=index)
    except NetlinkError as error:
        if error.code != errno.ENODEV:  # deleted with its peer
            raise OSError(error.code, str(error)) from error


@contextmanager
def _routes() -> "Iterator[IPRoute]":
    from pyroute2 import IPRoute, NetlinkError

    try:
        with IPRoute() as routes:
            yield routes
    except NetlinkError as error:
        raise OSError(error.code, str(error)) from error
