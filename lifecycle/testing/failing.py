"""Every hook of a hive fails in turn, and the hive must end cleanly each time.

Needs:  Hive.
Gives:  fail_each_hook(), Failure, InjectedError.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Literal

import anyio
import msgspec

from lifecycle.cells import Cell
from lifecycle.errors import StartError, StopError, leaves
from lifecycle.sources import Sources
from lifecycle.supervisor import HookNode
from lifecycle.testing.leaks import no_leaks
from lifecycle.testing.observed import Context, Observed
from lifecycle.testing.recorder import Recorder

__all__ = ["Failure", "InjectedError", "fail_each_hook"]

Phase = Literal["start", "stop"]


class InjectedError(Exception):
    """What a hook that is made to fail raises."""


class Failure(msgspec.Struct, frozen=True):
    """One hook made to fail."""

    hook: str
    module: str
    phase: Phase
    sequential: bool

    def __str__(self) -> str:
        mode = "sequential" if self.sequential else "parallel"
        return f"hook {self.hook!r} ({self.module}) failing to {self.phase}, {mode}"


async def fail_each_hook(
    *cells: Cell,
    fakes: Callable[[], Iterable[Cell]] = tuple,
    settings: Sources | Mapping[str, object] | None = None,
    seed: int | None = None,
    within: float = 10.0,
) -> list[Failure]:
    """Start and stop the cells once for each of their hooks at start and at stop, parallel and sequential.

    At start the hook raises instead of starting; at stop once its own stop is done. Each time the hive must
    raise that error and no other, start nothing that needs the failed hook, stop all that had started, users
    first, and leave no task, descriptor or thread, all of it within so many seconds. `fakes` gives the
    replacements, anew for every run. Returns what was made to fail; raises AssertionError with every run
    that was not clean.
    """
    made: list[Failure] = []
    wrong: list[str] = []
    for sequential in (False, True):
        trial = _Trial(None, "start", Recorder(seed))
        hive = Observed(*cells, *fakes(), settings=settings, around=trial.around, sequential=sequential)
        await _checked(hive, trial, within, "with no hook failing", wrong)
        if wrong:
            break
        for number, node in enumerate(hive.hooks):
            for phase in ("start", "stop"):
                failure = Failure(node.name, node.module, phase, sequential)
                made.append(failure)
                trial = _Trial(number, phase, Recorder(seed))
                again = Observed(
                    *cells, *fakes(), settings=settings, around=trial.around, sequential=sequential
                )
                await _checked(again, trial, within, str(failure), wrong)
    if wrong:
        raise AssertionError("\n".join((f"{len(wrong)} of {len(made) or 1} runs were not clean:", *wrong)))
    return made


async def _checked(hive: Observed, trial: "_Trial", within: float, what: str, wrong: list[str]) -> None:
    """Run once; what is not as it should be goes to `wrong`."""
    try:
        async with no_leaks():
            with anyio.fail_after(within):
                await _run(hive, trial)
        trial.recorder.assert_clean()
    except (AssertionError, TimeoutError, Exception) as error:  # noqa: BLE001  # each run is reported
        wrong.append(f"- {what}: {type(error).__name__}: {error}")


async def _run(hive: Observed, trial: "_Trial") -> None:
    trial.hive = hive
    raised: StartError | StopError | None = None
    try:
        await hive.start()
        try:
            await hive.stop()
        except StopError as error:
            raised = error
    except StartError as error:
        raised = error
    if trial.failing is None:
        if raised is not None:
            raise raised
        return
    if raised is None:
        raise AssertionError("nothing was raised")
    if isinstance(raised, StartError) != (trial.phase == "start"):
        raise AssertionError(
            f"it failed to {'start' if isinstance(raised, StartError) else 'stop'}: {raised}"
        )
    if list(leaves(raised)) != [trial.error]:
        raise AssertionError(f"other errors came with it: {raised}") from raised
    failed = hive.hooks[trial.failing]
    begun = {event.node for event in trial.recorder.events if event.phase == "start"}
    if trial.phase == "start" and (users := begun & set(failed.users)):
        raise AssertionError(f"started all the same, though they need it: {', '.join(map(str, users))}")


class _Trial:
    """One run: which hook fails, and when."""

    def __init__(self, failing: int | None, phase: Phase, recorder: Recorder) -> None:
        self.failing = failing
        self.phase: Phase = phase
        self.recorder = recorder
        self.error = InjectedError("made to fail")
        self.hive: Observed | None = None

    def around(self, node: HookNode, context: Context) -> AbstractAsyncContextManager[object]:
        """The hook's own context, or for the one whose turn it is one that fails."""
        failing = self.failing is not None and self.hive is not None and self.hive.hooks[self.failing] is node
        return self.recorder.around(node, (lambda: _Failing(context, self)) if failing else context)


class _Failing:
    """A hook's context that fails in one phase."""

    def __init__(self, context: Context, trial: _Trial) -> None:
        self._context = context
        self._trial = trial

    async def __aenter__(self) -> Any:
        if self._trial.phase == "start":
            raise self._trial.error
        self._entered = self._context()
        return await self._entered.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._entered.__aexit__(kind, error, trace)
        raise self._trial.error
