"""Compare what the agent's API, the kernel and the disk hold for a node's pods."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_address
from pathlib import Path
from typing import Any

from cells.maps.map import open_map
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.endpoints import EndpointConfig, LxcKey, LxcValue
from hive.client import ask
from hive.lab.kernel import bpf_objects
from hive.lab.node import Lab
from tests.support.waiting import eventually

RUN = Path("/run/cilium")
GLOBALS = Path("/sys/fs/bpf/tc/globals")
POLICY_PIN = re.compile(r"cilium_policy_(\d{5})")
INIT_IDENTITY, FIRST_POD_IDENTITY = 5, 256
"""Pods that no namespace is known of are in init."""
CLSACT_INGRESS = 0xFFFFFFF2


@dataclass(frozen=True)
class Account:
    """A node's pods as each source shows them; if the sources agree, nothing is incomplete or left over."""

    listed: Mapping[int, tuple[str, str, int]]
    """Endpoints of the API: number -> address, link, index."""
    range: IPv4Network
    """The range of pod addresses; pods from before a change of range may have addresses outside."""
    allocated: frozenset[str]
    """Addresses that the allocator has given to pods."""
    links: Mapping[str, tuple[int, str, bool]]
    """Links at the host's end: name -> index, alias, whether it is up."""
    attached: frozenset[int]
    """Indexes of links with an attached program."""
    rows: Mapping[str, frozenset[tuple[object, ...]]]
    """Map -> rows, as (address or index, endpoint number or nothing)."""
    pins: frozenset[int]
    """Numbers of the pinned policy maps."""
    state: frozenset[str]
    """Names of the endpoints' directories below the state directory."""
    queue: frozenset[str]
    """Names of the files in the delete queue."""

    def faults(self) -> list[str]:
        """Return a sentence for each contradiction between the sources."""
        listed = self.listed.items()
        wanted: dict[str, tuple[object, object]] = {
            "addresses": (
                self.allocated,
                {ip for ip, _, _ in self.listed.values() if ip_address(ip) in self.range},
            ),
            "links": (
                dict(self.links),
                {link: (index, f"hive endpoint {number}", True) for number, (_, link, index) in listed},
            ),
            "programs": (self.attached, {index for _, _, index in self.listed.values()}),
            "cilium_lxc": (self.rows["cilium_lxc"], {(ip, number) for number, (ip, _, _) in listed}),
            "cilium_ipcache": (self.rows["cilium_ipcache"], {(ip,) for _, (ip, _, _) in listed}),
            "hive_endpoints": (
                self.rows["hive_endpoints"],
                {(index, number) for number, (_, _, index) in listed},
            ),
            "policy maps": (self.pins, set(self.listed)),
            "state": (self.state, set(map(str, self.listed))),
            "delete queue": (self.queue, set()),
        }
        return [
            f"{what}: there is {found}, listed endpoints mean {expected}"
            for what, (found, expected) in wanted.items()
            if found != expected
        ]


def account(lab: Lab) -> Account:
    """Read every source; the agent must serve."""
    with lab.open() as node:
        return node.run(_account)


def agreed(lab: Lab) -> Account:
    """Wait until the sources agree: links are removed a little after their DEL is answered."""
    seen: list[Account] = []

    def agree() -> bool:
        seen.append(account(lab))
        return not seen[-1].faults()

    try:
        eventually(agree)
    except AssertionError:
        raise AssertionError("\n".join(seen[-1].faults())) from None
    return seen[-1]


def _account() -> Account:
    endpoints = ask("/v1/endpoint")
    allocations = ask("/v1/healthz")["ipam"]["allocations"]
    links, attached = _links()
    return Account(
        listed={one["id"]: _listed(one) for one in endpoints},
        range=IPv4Network(ask("/v1/config")["status"]["addressing"]["ipv4"]["alloc-range"]),
        allocated=frozenset(ip for ip, owner in allocations.items() if owner not in {"router", "node-ip"}),
        links=links,
        attached=attached,
        rows={
            "cilium_lxc": frozenset(_lxc()),
            "cilium_ipcache": frozenset(_ipcache()),
            "hive_endpoints": frozenset(_configs()),
        },
        pins=frozenset(int(found[1]) for pin in GLOBALS.iterdir() if (found := POLICY_PIN.match(pin.name))),
        state=frozenset(entry.name for entry in (RUN / "state").iterdir() if entry.is_dir()),
        queue=frozenset(entry.name for entry in (RUN / "deleteQueue").glob("*.delete")),
    )


def _listed(endpoint: Mapping[str, Any]) -> tuple[str, str, int]:
    networking = endpoint["status"]["networking"]
    return networking["addressing"][0]["ipv4"], networking["interface-name"], networking["interface-index"]


def _links() -> tuple[dict[str, tuple[int, str, bool]], frozenset[int]]:
    from pyroute2 import IPRoute

    links = {}
    attached = set()
    with IPRoute() as ip:
        for link in ip.get_links():
            if link.get("ifname").startswith("lxc"):
                index = link["index"]
                links[link.get("ifname")] = (index, link.get("ifalias") or "", link["state"] == "up")
                if any(ip.get_filters(index=index, parent=CLSACT_INGRESS)):
                    attached.add(index)
    return links, frozenset(attached)


def _lxc() -> Iterator[tuple[object, ...]]:
    with open_map(GLOBALS / "cilium_lxc") as table:
        for key, value in table.items():
            row = LxcValue.unpack(value)
            if not row.is_host:
                yield str(LxcKey.unpack(key).ip), row.endpoint_id


def _ipcache() -> Iterator[tuple[object, ...]]:
    with open_map(GLOBALS / "cilium_ipcache") as table:
        for key, value in table.items():
            identity = IpcacheValue.unpack(value).identity
            if identity == INIT_IDENTITY or identity >= FIRST_POD_IDENTITY:
                yield (str(IpcacheKey.unpack(key).ip),)


def _configs() -> Iterator[tuple[object, ...]]:
    with open_map(GLOBALS / "hive_endpoints") as table:
        for key, value in table.items():
            yield *struct.unpack("<I", key), EndpointConfig.unpack(value).endpoint_id


def in_kernel() -> tuple[dict[str, int], dict[str, int], dict[int, int]]:
    """Return the ids of what is pinned and attached, without the pool of empty policy maps."""
    seen = bpf_objects()
    return seen.maps, seen.programs, seen.entries
