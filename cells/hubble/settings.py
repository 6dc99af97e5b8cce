"""Settings of Hubble's core: what it keeps, drops and hides.

Source: Cilium 1.17, options ``enable-hubble`` and ``hubble-*``.
"""

from __future__ import annotations

import os
from typing import Final

from cells.hubble.ring import check_capacity
from lifecycle import Settings

MONITOR_EVENTS: Final = {
    "drop": 1,
    "debug": 2,
    "capture": 3,
    "trace": 4,
    "policy-verdict": 5,
    "recorder": 6,
    "trace-sock": 7,
    "l7": 129,
    "agent": 130,
}
"""Kinds of events by the names that ``hubble-monitor-events`` has for them."""
