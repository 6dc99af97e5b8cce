"""A whole run from one seed: simulated time, tasks in any order, crashes, lost messages; replayable.

    def scenario(world: Simulation) -> None:
        kernel = FakeKernel()                              # what outlives a crash
        world.run(lambda: first(kernel), crash=True)       # ends, or crashes at a step chosen by the seed
        world.run(lambda: second(kernel))
        assert kernel.rows == {...}

    explore(scenario, seeds=range(1000))

An event loop runs what is ready in the order it became so. Nothing promises that order: here tasks that are
ready run in an order chosen by the seed, and some wait while others go on. Time passes only when nothing else
can happen, and then jumps to the next timer. Calls in worker threads run in the loop, after a while.
"""

import asyncio
import contextlib
import contextvars
import math
import random
import selectors
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
from anyio._backends._asyncio import AsyncIOBackend

from lifecycle.hooks.stacks import await_stack

__all__ = ["Simulation", "StuckError", "explore", "simulate"]

T = TypeVar("T")

LONGEST_CALL = 0.01
"""Seconds of virtual time that a call in a worker thread takes at most."""


class StuckError(AssertionError):
    """Nothing can happen any more: every task waits and no timer runs. Its text lists what they await."""


class _CrashError(BaseException):
    """The simulated process dies here."""


class Simulation:
    """One world, determined by its seed. Objects outside of run() survive a crash."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)  # noqa: S311  # an order, no secret
        """For the scenario's own choices; they replay with the seed."""
        self.crashed = False
        """Whether the last run() crashed."""
        self.turns = 0
        """Turns of the event loop in the last run()."""
        self.events: list[str] = []
        """The notes of note(), for messages and for comparing two runs."""
        self._calls_at: dict[int, Callable[[], object]] = {}
        self._dead: list[_Loop] = []

    def run(self, main: Callable[[], Coroutine[Any, Any, T]], *, crash: bool = False) -> T | None:
        """Run `main` to its end in an event loop of its own. Returns its result.

        With `crash`, it may die on the way, as by SIGKILL: from some turn of the loop on, nothing runs, not
        even ``finally``; then the result is None. Raises its error, and StuckError.
        """
        crash_at = self.random.randrange(2 ** self.random.randrange(1, 12)) + 1 if crash else 0
        loop = _Loop(self.random, crash_at, self._calls_at)
        self._calls_at, self.crashed, clean = {}, False, False
        try:
            with _randomness(self.random.random()), _calls_inline(self.random):
                result = loop.run_until_complete(main())
                loop.finish()
            clean = True
        except _CrashError:
            self.crashed = True
            return None
        else:
            return result
        finally:
            self.turns = loop.turns
            if clean:
                loop.close()
            else:
                self._dead.append(loop)

    def at(self, turn: int, call: Callable[[], object]) -> None:
        """Call a function before a turn of the loop of the next run(): a signal, a request, a fault."""
        self._calls_at[turn] = call

    def chance(self, probability: float = 0.1) -> bool:
        """Return True with this probability, for example to lose a message."""
        return self.random.random() < probability

    async def delay(self, longest: float = 1.0) -> None:
        """Wait for up to this number of seconds of virtual time."""
        await asyncio.sleep(self.random.random() * longest)

    def note(self, event: object) -> None:
        """Record an event."""
        self.events.append(str(event))

    def close(self) -> None:
        """Drop what died."""
        with _silenced():
            for loop in self._dead:
                loop.discard_tasks()
        self._dead.clear()


def simulate(scenario: Callable[[Simulation], object], seed: int) -> Simulation:
    """Run the scenario once, in the world of this seed. Raises its error, with the seed as a note."""
    world = Simulation(seed)
    try:
        scenario(world)
    except BaseException as error:
        error.add_note(f"in the simulation of seed {seed}; to replay: simulate(scenario, seed={seed})")
        raise
    finally:
        world.close()
    return world


def explore(scenario: Callable[[Simulation], object], seeds: Iterable[int] = range(200)) -> int:
    """Run the scenario in the world of each seed.

    Returns their number; raises the error of the first that fails.
    """
    count = 0
    for seed in seeds:
        simulate(scenario, seed)
        count += 1
    return count


class _Loop(asyncio.SelectorEventLoop):
    """An event loop with simulated time and an order of callbacks that the seed determines."""

    _ready: Any
    _scheduled: Any

    def __init__(
        self, choices: random.Random, crash_at: int, calls_at: dict[int, Callable[[], object]]
    ) -> None:
        self._nanoseconds = 0
        super().__init__(_Selector(self))
        self._choices = choices
        self._crash_at = crash_at
        self._calls_at = calls_at
        self._delayed: list[asyncio.Handle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._clock_resolution = 1e-9
        self.turns = 0
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]  # typeshed wants every overload

    def time(self) -> float:
        """Seconds since the world began."""
        return self._nanoseconds / 1e9

    def advance_to_next_timer(self) -> None:
        """Jump to the next timer. Raises StuckError if there is none."""
        if not self._scheduled or math.isinf(self._scheduled[0].when()):
            raise StuckError("\n".join(("nothing can happen any more; what waits:", *self._waiting())))
        due = self._scheduled[0].when()
        self._nanoseconds = max(self._nanoseconds, math.ceil(due * 1e9))
        while self.time() < due:  # exact to the last bit, so that no caller waits again
            self._nanoseconds += 1

    def finish(self) -> None:
        """Cancel remaining tasks, as asyncio.run() does."""
        left = [task for task in self._tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.run_until_complete(self.shutdown_asyncgens())

    def discard_tasks(self) -> None:
        """Drop tasks that will never run again."""
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001  # it died with the rest
                with contextlib.suppress(BaseException):
                    task.get_coro().close()
        self._ready.clear()
        self._scheduled.clear()
        self.close()

    def run_in_executor(  # type: ignore[override]  # its types are those of one call
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Run the call in the loop, a little later."""
        del executor
        future = self.create_future()

        def call() -> None:
            if not future.cancelled():
                try:
                    future.set_result(func(*args))
                except Exception as error:  # noqa: BLE001  # raised where the future is awaited
                    future.set_exception(error)

        self.call_later(self._choices.random() * LONGEST_CALL, call)
        return future

    def _run_once(self) -> None:
        self.turns += 1
        if self.turns == self._crash_at:
            raise _CrashError
        if (call := self._calls_at.pop(self.turns, None)) is not None:
            call()
        self._shuffle()
        super()._run_once()  # type: ignore[misc]  # asyncio's own

    def _shuffle(self) -> None:
        """Reorder the ready tasks, and let some of them wait."""
        handles = [*self._ready, *self._delayed]
        self._delayed = []
        steps = {
            number: task for number, handle in enumerate(handles) if (task := _task_of(handle)) is not None
        }
        if len(steps) < 2:
            self._ready.clear()
            self._ready.extend(handles)
            return
        mixed = sorted(steps, key=lambda number: steps[number]._simulated)  # type: ignore[attr-defined]  # noqa: SLF001
        self._choices.shuffle(mixed)
        go = self._choices.randint(1, len(mixed)) if self._choices.random() < 0.5 else len(mixed)
        order = iter([handles[number] for number in mixed])
        places = set(sorted(steps)[:go])
        self._ready.clear()
        for number, handle in enumerate(handles):
            if number in places:
                self._ready.append(next(order))
            elif number not in steps:
                self._ready.append(handle)
        self._delayed = list(order)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        task._simulated = len(self._tasks)  # type: ignore[attr-defined]  # noqa: SLF001  # the same in every run
        self._tasks.append(task)
        return task

    def _waiting(self) -> Iterator[str]:
        for task in self._tasks:
            if not task.done():
                yield f"    {task.get_name()}"
                yield from (f"        in {frame}" for frame in await_stack(task, below=frozenset()))


class _Selector(selectors.PollSelector):
    """Never waits: if there is nothing to read, time passes."""

    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and (timeout is None or timeout > 0):
            self._loop.advance_to_next_timer()
        return events


def _task_of(handle: asyncio.Handle) -> asyncio.Task[Any] | None:
    owner = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]  # noqa: SLF001
    return owner if isinstance(owner, asyncio.Task) and not handle.cancelled() else None


@contextmanager
def _randomness(seed: float) -> Iterator[None]:
    """Make the interpreter's own random numbers the same in every run."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


@contextmanager
def _calls_inline(choices: random.Random) -> Iterator[None]:
    """Run calls in anyio's worker threads in the loop, a little later."""
    name = "run_sync_in_worker_thread"
    before = vars(AsyncIOBackend)[name]

    async def call(
        cls: Any,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        abandon_on_cancel: bool = False,
        limiter: Any = None,
    ) -> Any:
        await cls.checkpoint()
        async with limiter or cls.current_default_thread_limiter():
            with anyio.CancelScope(shield=not abandon_on_cancel):
                await asyncio.sleep(choices.random() * LONGEST_CALL)
                return contextvars.copy_context().run(func, *args)

    setattr(AsyncIOBackend, name, classmethod(call))
    try:
        yield
    finally:
        setattr(AsyncIOBackend, name, before)


@contextmanager
def _silenced() -> Iterator[None]:
    """Silence warnings and unraisable errors of coroutines that a simulated crash drops."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # some coroutines never ran
            yield
    finally:
        sys.unraisablehook = hook
