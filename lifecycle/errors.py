"""The errors of a hive, and their messages for users."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import msgspec

__all__ = [
    "BodyError",
    "BuildError",
    "ExitRequestedError",
    "Fault",
    "GraphError",
    "HiveError",
    "HookTimeoutError",
    "NotStartedError",
    "SettingsError",
    "ShutdownRequestedError",
    "StartError",
    "StopError",
    "TableClosedError",
    "UnexpectedCancelError",
    "UsageError",
    "as_failure",
    "described",
    "exit_code",
    "explain",
    "leaves",
    "suggestion",
    "texts",
    "thrown_away",
]


INTERRUPTED = 130
"""The exit code of a process that SIGINT ended, in shells."""


class HiveError(Exception):
    """A fault that the person running the hive can act on, in one line. It ends a run with exit code 1."""

    exit_code: ClassVar[int] = 1


class UsageError(HiveError):
    """The hive was called or configured wrongly. A run ends with exit code 2."""

    exit_code: ClassVar[int] = 2


class NotStartedError(HiveError):
    """Something was asked for that exists only once the hive, or the hook that makes it, has started."""


class TableClosedError(HiveError):
    """A change of a table was waited for, of which there will be none: its module was disabled."""


class ShutdownRequestedError(HiveError):
    """Someone asked the hive to end while it started."""


class ExitRequestedError(HiveError):
    """A hook, job or constructor raised SystemExit or KeyboardInterrupt: the hive ends in order, then so.

    Its exit code is that of sys.exit(); 130, as shells have it, for KeyboardInterrupt.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code  # type: ignore[misc]  # that of one exit, not of a kind of them


class UnexpectedCancelError(Exception):
    """A hook or job raised CancelledError without being cancelled. The original is `__cause__`."""


class BodyError(Exception):
    """A hook, job or constructor raised what is not an Exception. The original is `__cause__`."""


class BuildError(HiveError):
    """A constructor or invoked function raised, or returned what it must not. The original is `__cause__`."""


class Fault(msgspec.Struct, frozen=True):
    """One thing wrong with a hive: what, and below it where and what would help."""

    kind: str
    """missing, private, optional, cycle, duplicate, constructor, invoke, decorate, replace, module, circle
    or setting."""
    text: str
    details: tuple[str, ...] = ()
    concerns: tuple[Any, ...] = ()
    """The constructors it is about; those of a cycle in its order."""
    lacks: str = ""
    """The type that someone needs and does not get."""

    def __str__(self) -> str:
        return "\n".join((f"{self.kind}: {self.text}", *(f"    {line}" for line in self.details)))


class GraphError(HiveError):
    """The hive cannot be built. Its text holds every fault there is, not only the first."""

    def __init__(self, name: str, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__("\n".join((f"{self.headline(name)}: {count}", *map(str, self.faults))))

    @staticmethod
    def headline(name: str) -> str:
        """What the faults prevent."""
        return f"{name} cannot be built"


class SettingsError(GraphError):
    """The graph is sound but the settings are not: the user's mistake, so a run ends with exit code 2."""

    exit_code: ClassVar[int] = 2

    @staticmethod
    def headline(name: str) -> str:
        """What the faults prevent."""
        return f"{name} cannot be built from these settings"


class HookTimeoutError(TimeoutError):
    """A hook was overdue. Its text lists the hooks that were pending and what each awaited."""


class _HookErrors(ExceptionGroup[Exception]):
    """The errors of hooks, under a message that names each hook."""

    def __str__(self) -> str:
        return self.message

    def derive(self, excs: Sequence[Exception], /) -> Self:  # type: ignore[override]  # typeshed widens the result to plain groups
        return type(self)(self.message, excs)


class StartError(_HookErrors):
    """The hive did not start; whatever had started was stopped again."""


class StopError(_HookErrors):
    """A hook failed while the hive ran or stopped; every other hook was stopped all the same."""


def as_failure(error: BaseException, who: str) -> Exception:
    """What a hook, job or constructor failed with: one rule for all it may raise without being asked to end.

    An Exception is that failure. CancelledError means that it awaited something that was cancelled, or that
    its task was cancelled by someone else: UnexpectedCancelError. SystemExit and KeyboardInterrupt ask the
    process to end, which it does in order: ExitRequestedError. Anything else is a BodyError.
    """
    failure: Exception
    if isinstance(error, Exception):
        return error
    if isinstance(error, asyncio.CancelledError):
        failure = UnexpectedCancelError(
            "it awaited something that was cancelled, or its task was cancelled: "
            "await a cancelled task under contextlib.suppress(asyncio.CancelledError)"
        )
    elif (exits := _exit(error)) is not None:
        failure = _exit_requested(exits, who)
    else:
        failure = BodyError(f"it raised {type(error).__name__}, which is not an Exception: {error}")
    failure.__cause__ = error
    return failure


def thrown_away(task: "asyncio.Task[Any] | None") -> bool:
    """Whether the coroutine of `task` is collected as garbage, with no event loop to run it."""
    try:
        return asyncio.current_task() is not task
    except RuntimeError:
        return True


def _exit(error: BaseException) -> SystemExit | KeyboardInterrupt | None:
    """What asks for the end of the process, alone or among others."""
    return next((one for one in leaves(error) if isinstance(one, SystemExit | KeyboardInterrupt)), None)


def _exit_requested(error: SystemExit | KeyboardInterrupt, who: str) -> ExitRequestedError:
    if isinstance(error, KeyboardInterrupt):
        return ExitRequestedError(f"{who} was interrupted", INTERRUPTED)
    if error.code is None or isinstance(error.code, int):
        code = error.code or 0
        return ExitRequestedError(f"{who} called sys.exit({code})", code)
    return ExitRequestedError(str(error.code), 1)  # as Python has it: sys.exit("why")


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors behind groups and build errors, in order."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    elif isinstance(error, BuildError) and error.__cause__ is not None:
        yield from leaves(error.__cause__)
    else:
        yield error


def described(error: BaseException) -> str:
    """Its type and text in one line; of a task group, which only counts its errors, theirs."""
    if isinstance(error, BaseExceptionGroup) and not isinstance(error, _HookErrors):
        return "; ".join(dict.fromkeys(map(described, error.exceptions)))
    return f"{type(error).__name__}: {error}"


def exit_code(error: BaseException) -> int:
    """The exit code of a run that this error ended: 2 for usage and configuration, what sys.exit() was given,
    1 otherwise.
    """
    codes = [leaf.exit_code if isinstance(leaf, HiveError) else None for leaf in leaves(error)]
    known = [code for code in codes if code]
    return known[0] if known else int(None in codes)


def explain(error: BaseException) -> str | None:
    """The message for the user when each error behind `error` is one they can act on; None for our own bugs.

    A line for each fault; below a graph at fault or an overdue hook more lines, indented.
    """
    return "\n".join(texts(error)) or None


def texts(error: BaseException) -> list[str]:
    """As explain(), a text for each fault; none for our own bugs."""
    found: dict[str, None] = {}
    for leaf in leaves(error):
        if not isinstance(leaf, HiveError | HookTimeoutError):
            return []
        faults = leaf.faults if isinstance(leaf, SettingsError) else ()
        found |= dict.fromkeys((fault.text for fault in faults) if faults else [str(leaf)])
        found |= dict.fromkeys(getattr(leaf, "__notes__", ()))
    return list(found)


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not `known`: the nearest one that is, if any is near."""
    import difflib  # only mistakes need it

    found = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""
