"""Passes over the conntrack maps as Cilium's metrics.

For:    Metrics. Needs: Table[ConntrackMap], Passes. Gives: families().
Source: Cilium 1.17, cilium_datapath_conntrack_gc_*, and cilium_bpf_map_pressure of these maps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from cells.datapath.conntrack.gc import ConntrackMap, Passes
from cells.observe.metrics import Family, counter, gauge, histogram

_MAPS: Final = {
    "cilium_ct4_global": ("ipv4", "TCP"),
    "cilium_ct_any4_global": ("ipv4", "non-TCP"),
    "cilium_ct6_global": ("ipv6", "TCP"),
    "cilium_ct_any6_global": ("ipv6", "non-TCP"),
}


def families(rows: Iterable[ConntrackMap], passes: Passes) -> Iterator[Family]:
    """How often connections were removed, how long that took, how many there are."""
    found = {_MAPS[row.map]: row for row in rows}
    runs = {(*what, "completed"): row.passes for what, row in found.items()}
    runs |= {(*what, "uncompleted"): passes.failed for what in _MAPS.values()} if passes.failed else {}
    entries: dict[tuple[str, str, str], int] = {}
    for what, row in found.items():
        entries |= {(*what, "alive"): row.alive, (*what, "deleted"): row.deleted}
    labels = "family protocol status"
    yield counter(
        "cilium_datapath_conntrack_gc_runs_total",
        "Number of times that the conntrack garbage collector process was run",
        runs,
        labels,
    )
    yield gauge(
        "cilium_datapath_conntrack_gc_entries",
        "The number of alive and deleted conntrack entries at the end of a garbage collector run",
        entries,
        labels,
    )
    yield histogram(
        "cilium_datapath_conntrack_gc_duration_seconds",
        "Duration in seconds of the garbage collector process; one walk goes over all maps",
        {(*what, "completed"): passes.durations for what in found},
        labels,
    )
    yield gauge(
        "cilium_bpf_map_pressure",
        "Fill percentage of map, tagged by map name",
        {row.map.removeprefix("cilium_"): row.alive / row.max_entries for row in found.values() if row.alive},
        "map_name",
        fixed=True,
    )
