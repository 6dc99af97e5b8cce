"""Records the order in which hooks start and stop."""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Literal

import anyio
import msgspec

from lifecycle.hints.keys import type_name
from lifecycle.hive.hive import Hive
from lifecycle.hooks.nodes import HookNode
from lifecycle.injection.cells import Cell
from lifecycle.settings.sources import Sources
from lifecycle.testing.leaks import no_leaks
from lifecycle.testing.observed import Context, Observed

__all__ = ["Event", "Phase", "Recorder"]

Phase = Literal["start", "started", "failed", "stop", "stopped", "mark"]

_TURNS = 64
"""Maximum number of turns of the loop for which a seed lets a hook wait."""


class Event(msgspec.Struct, frozen=True):
    """An event, in order."""

    phase: Phase
    hook: str
    """The name of a hook or of a mark."""
    node: HookNode | None = None

    def __str__(self) -> str:
        return f"{self.phase} {self.hook!r}{f' ({self.node.module})' if self.node else ''}"


class Recorder:
    """Records when hooks begin and end to start and to stop, and checks their order.

    A `seed` shuffles hooks that do not depend on each other: each waits for a number of turns of the event
    loop, chosen by the seed, before it starts and before it stops. An order that holds for several seeds
    follows from the graph, not from luck; the same seed gives the same waits.

    A hook may be given by its name, the id of its module, the type that its constructor provides, or the
    constructor or invoked function itself: then it means all hooks that match.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.events: list[Event] = []
        self._seed = seed

    @asynccontextmanager
    async def started(
        self, *cells: Cell, settings: Sources | Mapping[str, object] | None = None, **options: Any
    ) -> AsyncIterator[Hive]:
        """A recorded hive, started; stopped at the end of the block. Raises LeakError."""
        async with (
            no_leaks(),
            Observed(*cells, settings=settings, around=self.around, **options).started() as hive,
        ):
            yield hive

    def mark(self, name: str) -> None:
        """Record an event of the test, such as an answered request or a row that a fake wrote."""
        self.events.append(Event("mark", name))

    def around(self, node: HookNode, context: Context) -> AbstractAsyncContextManager[object]:
        """The context of a hook, recorded."""
        return _Recorded(self, node, context)

    def assert_before(self, *pairs: tuple[object, object]) -> None:
        """For each pair, the first had started or was marked before the second began.

        Raises AssertionError with every pair that is not so or that names an unknown hook.
        """
        if wrong := [text for first, second in pairs if (text := self._order_fault(first, second))]:
            raise AssertionError("\n- ".join((f"not in order (seed {self._seed}):", *wrong)))

    def assert_clean(self) -> None:
        """Every hook that started was stopped once, after all hooks that need it had stopped.

        Raises AssertionError with every one that was not.
        """
        first: dict[tuple[HookNode, Phase], int] = {}
        wrong = []
        for number, event in enumerate(self.events):
            if event.node is not None and first.setdefault((event.node, event.phase), number) != number:
                wrong.append(f"twice: {event}")
        users: dict[HookNode, dict[HookNode, None]] = {}
        for node, _ in first:
            for need in node.needs:
                users.setdefault(need, {})[node] = None
        for node, phase in first:
            if phase == "started":
                wrong += _unclean(node, users.get(node, ()), first)
        if wrong:
            raise AssertionError("\n- ".join(("not clean:", *wrong)))

    def order(self, phase: Phase = "started") -> list[str]:
        """Return the names of the hooks in the order in which they reached a phase."""
        return [event.hook for event in self.events if event.phase == phase]

    async def shuffle(self, node: HookNode, phase: Phase) -> None:
        """Wait for the number of turns of the loop that the seed gives this hook and phase."""
        if self._seed is not None:
            turns = random.Random(f"{self._seed}/{phase}/{node.module}/{node.name}").randrange(_TURNS)  # noqa: S311  # an order, no secret
            for _ in range(turns):
                await asyncio.sleep(0)

    def note(self, node: HookNode, phase: Phase) -> None:
        """Record a phase of a hook."""
        self.events.append(Event(phase, node.name, node))

    def _order_fault(self, first: object, second: object) -> str | None:
        ends = self._numbers(first, {"started", "mark"})
        begins = self._numbers(second, {"start", "mark"})
        for subject, numbers in ((first, ends), (second, begins)):
            if not numbers:
                return f"{_name(subject)} never started; what did: {', '.join(self.order()) or 'nothing'}"
        if max(ends) < min(begins):
            return None
        early, late = self.events[min(begins)], self.events[max(ends)]
        return f"{_name(first)} before {_name(second)}: {early} came before {late}"

    def _numbers(self, subject: object, phases: set[Phase]) -> list[int]:
        return [
            number
            for number, event in enumerate(self.events)
            if event.phase in phases and _fits(event, subject)
        ]


def _unclean(
    node: HookNode, users: Iterable[HookNode], first: dict[tuple[HookNode, Phase], int]
) -> Iterator[str]:
    """What is wrong with a hook that started, from the numbers of its first events."""
    if (node, "stopped") not in first:
        yield f"{node} was not stopped"
    for user in users:
        if first.get((user, "start"), math.inf) < first[node, "started"]:
            yield f"{user} began to start before {node}, which it needs"
        if first.get((user, "stopped"), 0) > first.get((node, "stop"), 0):
            yield f"{node} stopped before {user}, which needs it"


def _fits(event: Event, subject: object) -> bool:
    if event.node is None:
        return subject == event.hook
    owner = event.node.owner
    return subject in (event.hook, event.node.module, owner.key) or subject is owner.call


def _name(subject: object) -> str:
    return repr(subject) if isinstance(subject, str) else type_name(subject)


class _Recorded:
    """The context of a hook, recorded."""

    def __init__(self, recorder: Recorder, node: HookNode, context: Context) -> None:
        self._recorder = recorder
        self._node = node
        self._context = context

    async def __aenter__(self) -> None:
        await self._recorder.shuffle(self._node, "start")
        self._recorder.note(self._node, "start")
        self._entered = self._context()
        try:
            await self._entered.__aenter__()
        except BaseException:
            self._recorder.note(self._node, "failed")
            raise
        self._recorder.note(self._node, "started")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        with anyio.CancelScope(shield=True):
            await self._recorder.shuffle(self._node, "stop")
        self._recorder.note(self._node, "stop")
        try:
            return await self._entered.__aexit__(kind, error, trace)
        finally:
            self._recorder.note(self._node, "stopped")
