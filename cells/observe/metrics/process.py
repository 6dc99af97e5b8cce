"""What the kernel knows of this process.

For:    Metrics. Needs: /proc. Gives: families().
Source: Prometheus's process collector, proc_pid_stat(5), getrlimit(2).
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cells.observe.metrics.family import Family, counter, gauge
from lifecycle.process import process_age, trouble_logged

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
# fields of /proc/self/stat, counted from behind the command's name
_USER, _SYSTEM, _VIRTUAL, _RESIDENT = 11, 12, 20, 21


def families(prefix: str) -> Iterator[Family]:
    """Time, memory, descriptors; and what was logged as warning or error. `prefix` begins every name."""
    fields = _stat()
    cpu = (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS
    facts = {
        f"{prefix}_process_open_fds": ("Number of open file descriptors.", sum(1 for _ in os.scandir(_FDS))),
        f"{prefix}_process_max_fds": (
            "Maximum number of open file descriptors.",
            _limit(resource.RLIMIT_NOFILE),
        ),
        f"{prefix}_process_virtual_memory_bytes": ("Virtual memory size in bytes.", int(fields[_VIRTUAL])),
        f"{prefix}_process_virtual_memory_max_bytes": (
            "Maximum amount of virtual memory available in bytes.",
            _limit(resource.RLIMIT_AS),
        ),
        f"{prefix}_process_resident_memory_bytes": (
            "Resident memory size in bytes.",
            int(fields[_RESIDENT]) * _PAGE,
        ),
        f"{prefix}_process_start_time_seconds": (
            "Start time of the process since unix epoch in seconds.",
            time.time() - process_age(),
        ),
    }
    yield counter(
        f"{prefix}_process_cpu_seconds_total",
        "Total user and system CPU time spent in seconds.",
        cpu,
        fixed=True,
    )
    for name, (text, value) in facts.items():
        yield gauge(name, text, value, fixed=True)
    logged: dict[tuple[str, ...], float] = {}
    for (level, module), count in trouble_logged().items():
        key = ("warning" if level == "warning" else "error", module.rpartition(".")[2] or "init")
        logged[key] = logged.get(key, 0) + count
    yield counter(
        f"{prefix}_errors_warnings_total", "Lines logged as error or warning.", logged, "level subsystem"
    )


_FDS: Final = Path("/proc/self/fd")


def _stat() -> list[str]:
    text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()


def _limit(what: int) -> float:
    soft = resource.getrlimit(what)[0]
    return float(0xFFFFFFFFFFFFFFFF if soft == resource.RLIM_INFINITY else soft)
