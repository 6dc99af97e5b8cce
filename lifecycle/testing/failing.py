"""Makes every hook of a hive fail in turn, and checks that the hive ends cleanly each time."""

from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Literal

import anyio
import msgspec

from lifecycle.errors import ShutdownRequestedError, StartError, StopError, leaves
from lifecycle.hooks.nodes import HookNode
from lifecycle.injection.cells import Cell
from lifecycle.settings.sources import Sources
from lifecycle.testing.leaks import no_leaks
from lifecycle.testing.observed import Context, Observed
from lifecycle.testing.recorder import Recorder

__all__ = ["Failure", "InjectedError", "fail_each_hook"]

Phase = Literal["start", "interrupt", "stop"]

MOST_INTERRUPTS = 8
"""Maximum number of suspensions at which a start is interrupted; the first ones."""


class InjectedError(Exception):
    """The error of a hook that is made to fail."""


class Failure(msgspec.Struct, frozen=True):
    """One hook that was made to fail."""

    hook: str
    module: str
    phase: Phase
    sequential: bool = False
    suspension: int = 0
    """The number of the suspension at which it was interrupted."""

    def __str__(self) -> str:
        mode = "sequential" if self.sequential else "parallel"
        how = f"failing to {self.phase}, {mode}"
        if self.phase == "interrupt":
            how = f"interrupted while starting, where it awaits for time {self.suspension}"
        return f"hook {self.hook!r} ({self.module}) {how}"


async def fail_each_hook(
    *cells: Cell,
    fakes: Callable[[], Iterable[Cell]] = tuple,
    settings: Sources | Mapping[str, object] | None = None,
    seed: int | None = None,
    within: float = 10.0,
    only: Callable[[Failure], bool] = lambda _: True,
) -> list[Failure]:
    """Start and stop the cells repeatedly, each time with one hook that fails in one way.

    At start, it raises instead of starting; at stop, it raises after its own stop; both with parallel and
    with sequential siblings. In addition, its start is interrupted wherever it awaits, as by a signal that
    ends the hive. Each time, the hive must raise just that error, start nothing that needs the failed hook,
    stop all that has started, users first, and leave no task, descriptor or thread, within the given seconds.
    `fakes` returns new replacements for every run. `only` selects the failures, for a hive that starts too
    slowly for all of them. Returns the failures; raises AssertionError with each run that was not clean.
    """
    made: list[Failure] = []
    wrong: list[str] = []

    async def run(failure: Failure | None, number: int | None, *, sequential: bool) -> _Trial:
        trial = _Trial(failure, number, Recorder(seed))
        trial.hive = Observed(*cells, *fakes(), settings=settings, around=trial.around, sequential=sequential)
        try:
            async with no_leaks():
                with anyio.fail_after(within):
                    await trial.run()
            trial.recorder.assert_clean()
        except Exception as error:  # noqa: BLE001  # collected: every failed run is reported
            wrong.append(f"- {failure or 'with no hook failing'}: {type(error).__name__}: {error}")
        if failure is not None and trial.reached:
            made.append(failure)
        return trial

    for sequential in (False, True):
        hooks = (await run(None, None, sequential=sequential)).hive.hooks
        if wrong:
            break
        for number, node in enumerate(hooks):
            for failure in filter(only, _failures(node, sequential)):
                trial = await run(failure, number, sequential=sequential)
                if not trial.reached:  # the start ended before: all suspensions are done
                    break
    if wrong:
        raise AssertionError("\n".join((f"{len(wrong)} of {len(made) or 1} runs were not clean:", *wrong)))
    return made


def _failures(node: HookNode, sequential: bool) -> Iterator[Failure]:
    """Yield the ways in which a hook fails; interruptions last, as there may be fewer."""
    for phase in ("start", "stop"):
        yield Failure(node.name, node.module, phase, sequential)
    for suspension in range(1, 1 if sequential else MOST_INTERRUPTS + 1):
        yield Failure(node.name, node.module, "interrupt", suspension=suspension)


class _Trial:
    """One run, with the hook that fails and how."""

    hive: Observed

    def __init__(self, failure: Failure | None, number: int | None, recorder: Recorder) -> None:
        self.failure = failure
        self.number = number
        self.recorder = recorder
        self.error: Exception = InjectedError("made to fail")
        self.reached = False
        """Whether the failure happened."""

    async def run(self) -> None:
        """Start and stop. Raises AssertionError unless exactly the failure was raised."""
        raised: StartError | StopError | None = None
        try:
            await self.hive.start()
            await self.hive.stop()
        except (StartError, StopError) as error:
            raised = error
        if not self.reached:
            if raised is not None:
                raise raised
            if self.failure is not None and self.failure.phase != "interrupt":
                raise AssertionError("it did not come to that")
            return
        self._look_at(raised)

    def _look_at(self, raised: StartError | StopError | None) -> None:
        if raised is None:
            raise AssertionError("nothing was raised")
        phase = self.failure.phase if self.failure is not None else None
        if isinstance(raised, StopError) != (phase == "stop"):
            raise AssertionError(
                f"it failed to {'stop' if phase == 'start' else 'start'}: {raised}"
            ) from raised
        errors = list(leaves(raised))
        interrupted = phase == "interrupt" and all(
            isinstance(error, ShutdownRequestedError) for error in errors
        )
        if errors != [self.error] and not interrupted:
            raise AssertionError(f"other errors came with it: {raised}") from raised
        started = {event.node for event in self.recorder.events if event.phase == "start"}
        if phase == "start" and self.number is not None:
            failed = self.hive.hooks[self.number]
            if users := [node for node in self.hive.hooks if node in started and failed in node.needs]:
                raise AssertionError(f"started all the same, needing it: {', '.join(map(str, users))}")

    def around(self, node: HookNode, context: Context) -> AbstractAsyncContextManager[object]:
        """The hook's own context, or a failing one for the hook that must fail."""
        if self.number is None or self.hive.hooks[self.number] is not node:
            return self.recorder.around(node, context)
        return self.recorder.around(node, lambda: _Failing(context, self))


class _Failing:
    """The context of a hook that fails in one way."""

    def __init__(self, context: Context, trial: _Trial) -> None:
        self._context = context
        self._trial = trial
        self._failure = trial.failure

    async def __aenter__(self) -> Any:
        trial, failure = self._trial, self._failure
        if failure is not None and failure.phase == "start":
            trial.reached = True
            raise trial.error
        self._entered = self._context()
        if failure is not None and failure.phase == "interrupt":
            return await _Interrupted(self._entered.__aenter__(), failure.suspension, self._interrupt)
        return await self._entered.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        swallowed = await self._entered.__aexit__(kind, error, trace)
        if self._failure is not None and self._failure.phase == "stop":
            self._trial.reached = True
            raise self._trial.error
        return swallowed

    def _interrupt(self) -> None:
        self._trial.reached = True
        self._trial.hive.shutdown.request()


class _Interrupted:
    """Awaits, and calls back at a numbered suspension."""

    def __init__(self, awaited: Awaitable[object], suspension: int, call: Callable[[], None]) -> None:
        self._awaited = awaited
        self._left = suspension
        self._call = call

    def __await__(self) -> Generator[Any, Any, Any]:
        inner: Any = self._awaited.__await__()
        step, value = inner.send, None
        while True:
            try:
                waits_for = step(value)
            except StopIteration as done:
                return done.value
            self._left -= 1
            if self._left == 0:
                self._call()
            try:
                step, value = inner.send, (yield waits_for)
            except BaseException as error:  # noqa: BLE001  # thrown into the inner coroutine, as `yield from` does
                step, value = inner.throw, error
