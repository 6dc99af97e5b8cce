"""Dependency injection: cells, their constructors, the graph of dependencies, its faults, construction."""

from lifecycle.injection.cells import (
    Cell,
    config,
    config_private,
    decorate,
    group,
    invoke,
    module,
    provide,
    provide_private,
    replace,
    supply,
)
from lifecycle.injection.constructors import ModuleId
from lifecycle.injection.ordering import after
from lifecycle.injection.profile import Profile, Step, Timing

__all__ = [
    "Cell",
    "ModuleId",
    "Profile",
    "Step",
    "Timing",
    "after",
    "config",
    "config_private",
    "decorate",
    "group",
    "invoke",
    "module",
    "provide",
    "provide_private",
    "replace",
    "supply",
]
