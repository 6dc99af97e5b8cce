"""What tests of a hive need: fakes, a started hive, a clock of one's own, order, failures, leaks.

Needs:  lifecycle and the standard library; no test framework. Imported by tests only.
Gives:  fake, started, VirtualClock, eventually, Recorder, fail_each_hook, no_leaks and their errors.
"""

from lifecycle.testing.clock import VirtualClock
from lifecycle.testing.failing import Failure, InjectedError, fail_each_hook
from lifecycle.testing.fakes import fake
from lifecycle.testing.leaks import LeakError, no_leaks
from lifecycle.testing.observed import started
from lifecycle.testing.recorder import Event, Recorder
from lifecycle.testing.waiting import eventually

__all__ = [
    "Event",
    "Failure",
    "InjectedError",
    "LeakError",
    "Recorder",
    "VirtualClock",
    "eventually",
    "fail_each_hook",
    "fake",
    "no_leaks",
    "started",
]
