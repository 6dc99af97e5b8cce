"""Tests of hives: fakes, started hives, a virtual clock, order of hooks, failures, leaks."""

from lifecycle.testing.clock import VirtualClock
from lifecycle.testing.failing import Failure, InjectedError, fail_each_hook
from lifecycle.testing.fakes import fake
from lifecycle.testing.leaks import LeakError, no_leaks
from lifecycle.testing.observed import started
from lifecycle.testing.recorder import Event, Recorder
from lifecycle.testing.script import ScriptError, run_script, scripts
from lifecycle.testing.simulation import Simulation, StuckError, explore, simulate
from lifecycle.testing.starter import HiveStarter
from lifecycle.testing.trace import Trace
from lifecycle.testing.unused import unused_parameters
from lifecycle.testing.waiting import eventually

__all__ = [
    "Event",
    "Failure",
    "HiveStarter",
    "InjectedError",
    "LeakError",
    "Recorder",
    "ScriptError",
    "Simulation",
    "StuckError",
    "Trace",
    "VirtualClock",
    "eventually",
    "explore",
    "fail_each_hook",
    "fake",
    "no_leaks",
    "run_script",
    "scripts",
    "simulate",
    "started",
    "unused_parameters",
]
