"""Hooks: code that runs when a hive starts and stops, in the order of its graph."""

from lifecycle.hooks.events import Event, Events, HookEvent, JobEvent, ModuleEvent
from lifecycle.hooks.hooks import Hook, Lifecycle
from lifecycle.hooks.promise import Promise
from lifecycle.hooks.shutdown import Shutdown

__all__ = [
    "Event",
    "Events",
    "Hook",
    "HookEvent",
    "JobEvent",
    "Lifecycle",
    "ModuleEvent",
    "Promise",
    "Shutdown",
]
