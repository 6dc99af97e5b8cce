"""Reads links, addresses, routes and rules of the node and of a pod, in the recordings' form.

As in the recordings, lo, link-local and multicast entries are left out.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

from cells.netlink import messages
from cells.netlink.connection import Connection, open_socket
from cells.netlink.rows import read_name, read_offloads
from tests.support.namespaces import Namespaces, inside

Json = Any

POD: Final = "testpod"
"""The pod's namespace under /var/run/netns."""


def read_state() -> Json:
    """Return the present state of the node and the pod as in ``kernel_after``."""
    return {"host": _namespace([]), "pod": _namespace(["-n", POD])}


def _namespace(where: list[str]) -> Json:
    addresses = [
        {"ifname": link["ifname"], **address}
        for link in _ip(where, "address", "show")
        for address in link["addr_info"]
        if link["ifname"] != "lo" and address["scope"] != "link"
    ]
    limits = _ipv4_limits(where)
    return {
        "links": [
            {**_link(link, where), **limits[link["ifname"]]}
            for link in _ip(where, "link", "show")
            if link["ifname"] != "lo"
        ],
        "addrs": addresses,
        "routes4": _routes(where, "-4"),
        "routes6": _routes(where, "-6"),
        "rules4": _ip(where, "-4", "rule", "show"),
        "rules6": _ip(where, "-6", "rule", "show"),
        "sysctl": {
            name: _sysctl(where, name)
            for name in ("net.ipv4.ip_local_reserved_ports", "net.ipv6.conf.all.disable_ipv6")
        },
    }


def _link(link: Json, where: list[str]) -> Json:
    if not where:
        name = f"net.ipv4.conf.{link['ifname']}.rp_filter"
        link["sysctl"] = {"net.ipv4.conf.<if>.rp_filter": _sysctl(where, name)}
    return link


def _ipv4_limits(where: list[str]) -> dict[str, dict[str, int]]:
    """Return the GSO and GRO limits for IPv4, by link: ip(8) prints them only since version 6.3."""
    if not where:
        return _limits_here()
    pod = Namespaces.open(f"/var/run/netns/{POD}")
    try:
        with inside(pod):
            return _limits_here()
    finally:
        pod.close()


def _limits_here() -> dict[str, dict[str, int]]:
    fd = open_socket()
    try:
        rows = Connection(fd).dump(messages.dump_links())
    finally:
        os.close(fd)
    found = {read_name(row): read_offloads(row).limits for row in rows}
    return {
        name: {"gso_ipv4_max_size": each.gso_ipv4, "gro_ipv4_max_size": each.gro_ipv4}
        for name, each in found.items()
    }


def _retained(route: Json) -> bool:
    destination = str(route["dst"])
    return (
        route.get("dev") != "lo"
        and route.get("type") not in {"multicast", "anycast"}
        and not destination.startswith(("fe80:", "ff00:"))
    )


def _routes(where: list[str], family: str) -> list[Json]:
    usual = {"type": "unicast", "table": "main", "scope": "global"}
    shown = _ip(where, family, "route", "show", "table", "all")
    return [{**usual, **route} for route in shown if _retained(route)]


def _ip(where: list[str], *command: str) -> list[Json]:
    done = subprocess.run(
        ["ip", "-d", "-j", *where, *command], capture_output=True, text=True, check=True, timeout=30
    )
    return json.loads(done.stdout) if done.stdout.strip() else []


def _sysctl(where: list[str], name: str) -> str:
    path = "/proc/sys/" + name.replace(".", "/")
    if not where:
        return Path(path).read_text(encoding="ascii").strip()
    read = ["ip", "netns", "exec", POD, "cat", path]
    return subprocess.run(read, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
