"""The recordings of map readers: what `cilium-dbg bpf ...` printed of which bytes.

Needs: tests/conformance_data.   Gives: EXCLUDED, REPLAYED, entries(), printed().
Every file of index.json (bpf/) is replayed or excluded with a reason.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Final

from tests.unit.conformance.recordings import DATA, Json

NEWER_CLIENT: Final = "client 1.19: a later issue"
NO_MAP: Final = "reads no map"
LATER: Final = "maps of load balancing, NAT, tunnels and other features: later issues"

OURS: Final = {
    "cilium_ct4_global",
    "cilium_ct6_global",
    "cilium_ct_any4_global",
    "cilium_ct_any6_global",
    "cilium_ipcache",
    "cilium_lxc",
    "cilium_metrics",
    "cilium_policy_01234",
}
"""The maps of the recordings that the agent has."""

_EXCLUDED: Final = {
    "ct_list_config_without_addressing": "the client crashes at an answer of the API that ours never gives",
    "ct_list_global_only_v4_maps": "the client misses maps that our agent always makes",
    "policy_get_all_mixed_layouts": "maps of another version's layout: swept, see tests/kernel/maps",
}


@cache
def load(name: str) -> Json:
    """A recording such as ``bpf/endpoint_list``."""
    return json.loads((DATA / f"{name}.json").read_text())


def _reason(row: Json) -> str | None:
    name = row["file"].removesuffix(".json").removeprefix("bpf/")
    command = row["argv"].split()[2]
    if not row["client_version"].startswith("1.17"):
        return NEWER_CLIENT
    if command == "fs" or name.startswith("no_pins_"):
        return NO_MAP
    if command not in {"ct", "endpoint", "ipcache", "metrics", "policy"}:
        return LATER
    return _EXCLUDED.get(name)


def _decide() -> tuple[tuple[str, ...], dict[str, str]]:
    index = json.loads((DATA / "index.json").read_text())
    reasons = {row["file"].removesuffix(".json"): _reason(row) for row in index["bpf"]}
    replayed = tuple(name for name, reason in reasons.items() if reason is None)
    return replayed, {name: reason for name, reason in reasons.items() if reason is not None}


REPLAYED, EXCLUDED = _decide()


def maps(name: str) -> dict[str, Json]:
    """The maps of a recording, by the name of their pin."""
    return {table["pin"].rpartition("/")[2]: table for table in load(name)["maps"]}


def entries(table: Json) -> list[tuple[bytes, bytes]]:
    """Keys and values, as they were in the kernel."""
    return [(bytes.fromhex(row["key"]), bytes.fromhex(row["value"])) for row in table["entries"]]


def printed(name: str) -> set[str]:
    """The lines the client printed, runs of blanks as one: rows come in the kernel's order."""
    lines = (" ".join(line.split()) for line in load(name)["stdout"].splitlines())
    return {line for line in lines if line}
