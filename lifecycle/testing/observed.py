"""Hives in tests: started, checked for leaks, and with wrapped hooks."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final

import msgspec

from lifecycle.hive.hive import Hive
from lifecycle.hooks.nodes import HookNode
from lifecycle.injection.build import Build
from lifecycle.injection.cells import Cell
from lifecycle.settings.sources import Sources
from lifecycle.testing.leaks import no_leaks

__all__ = ["LIMITS", "Around", "Context", "Observed", "started"]

LIMITS: Final[dict[str, Any]] = {"start_timeout": 5.0, "stop_timeout": 5.0}
"""Timeouts of a hive in a test: one that hangs fails early."""

Context = Callable[[], AbstractAsyncContextManager[object]]
Around = Callable[[HookNode, Context], AbstractAsyncContextManager[object]]
"""Returns the context to enter instead of the given context of a hook."""


@asynccontextmanager
async def started(
    *cells: Cell, settings: Sources | Mapping[str, object] | None = None, **options: Any
) -> AsyncIterator[Hive]:
    """A hive of the cells, started, and stopped at the end of the block; `options` are those of Hive.

    A hook has five seconds by default, so that a test that hangs fails early. Raises LeakError if tasks,
    descriptors or threads are left at the end, including those of the test.
    """
    async with no_leaks(), Hive(*cells, settings=settings, **(LIMITS | options)).started() as hive:
        yield hive


class Observed(Hive):
    """A hive in which `around` wraps every hook."""

    def __init__(self, *cells: Cell, around: Around, **options: Any) -> None:
        super().__init__(*cells, **options)
        self._around = around
        self.hooks: list[HookNode] = []
        """Hooks in the order of construction, set when the hive starts; those of modules that are enabled
        later are appended. Hooks of inner hives are not included.
        """

    def _hooks(self, build: Build) -> list[HookNode]:
        nodes = super()._hooks(build)
        for node in nodes:
            context = partial(self._around, node, node.spec.context)
            node.spec = msgspec.structs.replace(node.spec, context=context)
        self.hooks += nodes
        return nodes
