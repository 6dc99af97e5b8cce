"""``make bench``: hive and its peers in one run, in interleaved rounds, as one table of ratios."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from cells.datapath.build import OBJECTS, are_current
from tests.bench import (
    across,
    across_packets,
    agreeing,
    bootstrap,
    bursts,
    clients,
    cluster_sizes,
    egress_packets,
    framework,
    hostile,
    http_requests,
    hubble,
    hubble_adds,
    hubble_packets,
    incremental,
    inspect_page,
    lag,
    losses,
    names,
    node_port_packets,
    node_ranges,
    objects,
    operators,
    packets,
    podadd,
    policies,
    policy_events,
    policy_maps,
    polling,
    probes,
    restore,
    service_events,
    service_start,
    service_sync,
    services,
    speakers,
    startup,
    tables,
    traffic,
    watching,
)
from tests.bench.stats import Figure, Row, table

Measure = Callable[[Path, int], Sequence[Row | Figure]]

PARTS: dict[str, Measure] = {
    "pods": podadd.measure,
    "polling": polling.measure,
    "hostile": hostile.measure,
    "start": startup.starts,
    "memory": startup.memories,
    "restore": restore.measure,
    "bootstrap": bootstrap.measure,
    "answers": clients.answers,
    "commands": clients.commands,
    "watching": watching.measure,
    "lag": lag.measure,
    "packets": packets.measure,
    "traffic": traffic.measure,
    "across": across.traffic,
    "across-packets": across_packets.measure,
    "shared": across.shared,
    "encrypted": across.encrypted,
    "egress-packets": egress_packets.measure,
    "agreeing": agreeing.measure,
    "probes": probes.measure,
    "crowded": across.crowded,
    "framework": framework.measure,
    "tables": tables.measure,
    "incremental": incremental.measure,
    "inspect-page": inspect_page.measure,
    "node-ranges": node_ranges.measure,
    "policies": policies.measure,
    "bursts": bursts.measure,
    "policy-events": policy_events.measure,
    "policy-maps": policy_maps.measure,
    "names": names.measure,
    "requests": http_requests.measure,
    "bgp": speakers.measure,
    "hubble": hubble.measure,
    "flows": hubble.on_a_node,
    "flows-adds": hubble_adds.measure,
    "flows-packets": hubble_packets.measure,
    "services": services.measure,
    "service-sync": service_sync.measure,
    "service-events": service_events.measure,
    "service-start": service_start.measure,
    "node-port-packets": node_port_packets.measure,
    "objects": objects.measure,
    "operators": operators.measure,
    "cluster-sizes": cluster_sizes.measure,
}
LOSSES = "losses"
"""The section that runs for --seconds, not in rounds."""
UNPRIVILEGED = {"framework", "tables", "incremental", "inspect-page", "node-ranges", "policies", "hubble"}


def main() -> int:
    """Measure the chosen sections and print the table.

    A section that fails leaves the figures of the others; the exit code is 1 then. A missed target does not
    fail the run.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds of each figure (7)")
    parser.add_argument("--seconds", type=float, default=60, help="of traffic for each figure of losses (60)")
    parser.add_argument("--only", nargs="+", choices=sorted({*PARTS, LOSSES}), help="these parts only")
    options = parser.parse_args()
    wanted = set(options.only or {*PARTS, LOSSES})
    if os.geteuid() != 0 and not wanted <= UNPRIVILEGED:
        sys.exit("bench: network namespaces and BPF need root; run: sudo make bench")
    if not are_current(OBJECTS):
        sys.exit("bench: the eBPF objects were compiled from other sources than these; run: make install")
    rows: list[Row | Figure] = []
    failed = []
    for name in [*PARTS, LOSSES]:
        if name not in wanted:
            continue
        print(f"measuring {name} …", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="hive-bench-") as folder:
            try:
                if name == LOSSES:
                    rows += losses.measure(Path(folder), options.seconds)
                else:
                    rows += PARTS[name](Path(folder), options.rounds)
            except Exception:  # noqa: BLE001  # the figures of the other parts are still printed
                traceback.print_exc()
                failed.append(name)
    print(table(rows))
    if failed:
        sys.exit(f"bench: not measured, for the reasons above: {', '.join(failed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
