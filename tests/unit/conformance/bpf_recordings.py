"""Recordings of map readers: the output of `cilium-dbg bpf ...` for given bytes.

Every file of index.json (bpf/) is replayed or excluded with a reason.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Final

from tests.support.recordings import INDEX, recorded
from tests.unit.conformance.recordings import Json

NO_MAP: Final = "reads no map"
NOT_MADE: Final = "reads maps of features that are not built; the agent does not create them"
CRASHES: Final = "the client crashes at an API answer that our agent never gives"
SWEPT: Final = "the agent removes maps with another version's layout, see tests/kernel/maps"
NEWER_LAYOUT: Final = "reads a map layout of 1.19"

COMMANDS: Final = {
    *("config", "ct", "egress", "endpoint", "ipcache", "lb", "metrics", "nat", "nodeid", "policy", "tunnel")
}
"""Commands that read maps of our agent."""

_EXCLUDED: Final = {
    "ct_list_config_without_addressing": CRASHES,
    "ct_list_config_without_addressing_client1.19": CRASHES,
    "egress_list_1_19_client1.19": NEWER_LAYOUT,
    "ipcache_list_v2_client1.19": NEWER_LAYOUT,
    "metrics_list_other_max_entries_removes_pin_client1.19": "our map has the size that the client expects",
    "nat_list_status_without_clock_source": "the API answer lacks a field that ours always has",
    "nodeid_list_v1_only": "reads a map of an older version",
    "policy_get_all_mixed_layouts": SWEPT,
    "policy_get_all_mixed_layouts_client1.19": SWEPT,
    "policy_get_v2_client1.19": NEWER_LAYOUT,
    "policy_get_v2_without_stats_map_client1.19": NEWER_LAYOUT,
}


@cache
def load(name: str) -> Json:
    """Load a recording such as ``bpf/endpoint_list``."""
    return json.loads(recorded(name).read_text())


def _reason(row: Json) -> str | None:
    name = row["file"].removesuffix(".json").removeprefix("bpf/")
    command = row["argv"].split()[2]
    if command == "fs" or name.startswith("no_pins_"):
        return NO_MAP
    if command not in COMMANDS:
        return NOT_MADE
    return _EXCLUDED.get(name)


def _decide() -> tuple[tuple[str, ...], dict[str, str]]:
    index = json.loads(INDEX.read_text())
    reasons = {row["file"].removesuffix(".json"): _reason(row) for row in index["bpf"]}
    replayed = tuple(name for name, reason in reasons.items() if reason is None)
    return replayed, {name: reason for name, reason in reasons.items() if reason is not None}


REPLAYED, EXCLUDED = _decide()


def maps(name: str) -> dict[str, Json]:
    """Return the maps of a recording, by the name of their pin."""
    return {table["pin"].rpartition("/")[2]: table for table in load(name)["maps"]}


def entries(table: Json) -> list[tuple[bytes, bytes]]:
    """Return keys and values as bytes of the kernel."""
    return [(bytes.fromhex(row["key"]), bytes.fromhex(row["value"])) for row in table["entries"]]


def printed(name: str) -> set[str]:
    """Return the set of printed lines, with runs of blanks as one: rows come in the kernel's order."""
    lines = (" ".join(line.split()) for line in load(name)["stdout"].splitlines())
    return {line for line in lines if line}
