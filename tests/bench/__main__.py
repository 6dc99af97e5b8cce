"""``make bench``: ours and the peers in one run, in interleaved rounds, as one table of ratios.

Needs: root, gcc, nft, Debian's containernetworking-plugins; --only framework needs none of these.
Gives: the table on standard output.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench import framework, podadd, startup, traffic
from tests.bench.stats import Figure, Row, table

Measure = Callable[[Path, int], Sequence[Row | Figure]]

PARTS: dict[str, Measure] = {
    "pods": podadd.measure,
    "start": startup.measure,
    "traffic": traffic.measure,
    "framework": framework.measure,
}
UNPRIVILEGED = {"framework"}


def main() -> int:
    """Measure what was asked for and print it; a target missed is told, not failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds of each figure (7)")
    parser.add_argument("--only", choices=sorted(PARTS), help="one part only")
    options = parser.parse_args()
    if os.geteuid() != 0 and options.only not in UNPRIVILEGED:
        sys.exit("bench: network namespaces and BPF need root; run: sudo make bench")
    rows: list[Row | Figure] = []
    with tempfile.TemporaryDirectory(prefix="hive-bench-") as folder:
        for name, measure in PARTS.items():
            if options.only in (None, name):
                print(f"measuring {name} …", file=sys.stderr)
                rows += measure(Path(folder), options.rounds)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
