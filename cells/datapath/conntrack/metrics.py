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
_NAT: Final = {"cilium_snat_v4_external": "ipv4", "cilium_snat_v6_external": "ipv6"}


def families(rows: Iterable[ConntrackMap], passes: Passes) -> Iterator[Family]:
    """How often connections were removed, how long that took, how many there are."""
    all_maps = list(rows)
    found = {_MAPS[row.map]: row for row in all_maps if row.map in _MAPS}
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
    nat = {_NAT[row.map]: row for row in all_maps if row.map in _NAT}
    yield gauge(
        "hive_nat_gc_entries",
        "Alive and deleted entries of translated flows, two a flow, at the end of a garbage collector run",
        {
            (family, state): getattr(row, state)
            for family, row in nat.items()
            for state in ("alive", "deleted")
        },
        "family status",
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
        {row.map.removeprefix("cilium_"): row.alive / row.max_entries for row in all_maps if row.alive},
        "map_name",
        fixed=True,
    )
