"""The age of the process, including the time before our code runs."""

import os
import time
from pathlib import Path

__all__ = ["process_age"]

_STARTED = 19  # field 22 of proc_pid_stat(5), counted after the command's name


def process_age() -> float:
    """Seconds since the start of the process, with a precision of 10 ms."""
    text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    started = int(text.rpartition(")")[2].split()[_STARTED]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
