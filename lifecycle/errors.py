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
    "is_garbage_collected",
    "leaves",
    "suggestion",
    "texts",
]


INTERRUPTED = 130
"""The exit code of a process that SIGINT ended, as in shells."""


class HiveError(Exception):
    """A fault that the user of the hive can correct, in one line. It ends a run with exit code 1."""

    exit_code: ClassVar[int] = 1


class UsageError(HiveError):
    """Wrong usage or configuration of the hive. It ends a run with exit code 2."""

    exit_code: ClassVar[int] = 2


class NotStartedError(HiveError):
    """Access to a value that exists only after the start of the hive, or of the hook that makes it."""


class TableClosedError(HiveError):
    """A wait for a change of a table that cannot arrive, since its module was disabled."""


class ShutdownRequestedError(HiveError):
    """A request to end the hive during its start."""


class ExitRequestedError(HiveError):
    """A hook, job or constructor raised SystemExit or KeyboardInterrupt, so the hive stops in order.

    Its exit code is that of sys.exit(), or 130 for KeyboardInterrupt, as in shells.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code  # type: ignore[misc]  # that of one exit, not of a kind of them


class UnexpectedCancelError(Exception):
    """A hook or job raised CancelledError without being cancelled. The original is `__cause__`."""


class BodyError(Exception):
    """A hook, job or constructor raised a BaseException that is not an Exception. The original is
    `__cause__`.
    """


class BuildError(HiveError):
    """A constructor or invoked function raised, or returned an invalid value. The original is `__cause__`."""


class Fault(msgspec.Struct, frozen=True):
    """One fault of a hive: a message, and lines below it with the place and a suggestion."""

    kind: str
    """missing, private, optional, cycle, duplicate, constructor, invoke, decorate, replace, module, circle
    or setting."""
    text: str
    details: tuple[str, ...] = ()
    concerns: tuple[Any, ...] = ()
    """The constructors concerned; those of a cycle in its order."""
    lacks: str = ""
    """The type that is needed and not provided."""

    def __str__(self) -> str:
        return "\n".join((f"{self.kind}: {self.text}", *(f"    {line}" for line in self.details)))


class GraphError(HiveError):
    """The hive cannot be built. Its text contains all faults, not only the first."""

    def __init__(self, name: str, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__("\n".join((f"{self.headline(name)}: {count}", *map(str, self.faults))))

    @staticmethod
    def headline(name: str) -> str:
        """Return the consequence of the faults."""
        return f"{name} cannot be built"


class SettingsError(GraphError):
    """Invalid settings of a valid graph. This is the user's mistake, so a run ends with exit code 2."""

    exit_code: ClassVar[int] = 2

    @staticmethod
    def headline(name: str) -> str:
        """Return the consequence of the faults."""
        return f"{name} cannot be built from these settings"


class HookTimeoutError(TimeoutError):
    """A hook exceeded its timeout. Its text lists the pending hooks and what each awaited."""


class _HookErrors(ExceptionGroup[Exception]):
    """The errors of hooks, below a message that names each hook."""

    def __str__(self) -> str:
        return self.message

    def derive(self, excs: Sequence[Exception], /) -> Self:  # type: ignore[override]  # typeshed widens the result to plain groups
        return type(self)(self.message, excs)


class StartError(_HookErrors):
    """The hive did not start; all that had started was stopped again."""


class StopError(_HookErrors):
    """A hook failed while the hive ran or stopped; every other hook was stopped nevertheless."""


def as_failure(error: BaseException, source: str) -> Exception:
    """Return the failure of a hook, job or constructor, for anything it raises without being cancelled.

    An Exception is the failure itself. A CancelledError means that it awaited something that was cancelled,
    or that other code cancelled its task: UnexpectedCancelError. SystemExit and KeyboardInterrupt request the
    end of the process: ExitRequestedError. Anything else becomes a BodyError.
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
        failure = _exit_requested(exits, source)
    else:
        failure = BodyError(f"it raised {type(error).__name__}, which is not an Exception: {error}")
    failure.__cause__ = error
    return failure


def is_garbage_collected(task: "asyncio.Task[Any] | None") -> bool:
    """Whether the coroutine of `task` is garbage-collected without a running event loop."""
    try:
        return asyncio.current_task() is not task
    except RuntimeError:
        return True


def _exit(error: BaseException) -> SystemExit | KeyboardInterrupt | None:
    """Return the request to end the process, alone or in a group, or None."""
    return next((leaf for leaf in leaves(error) if isinstance(leaf, SystemExit | KeyboardInterrupt)), None)


def _exit_requested(error: SystemExit | KeyboardInterrupt, source: str) -> ExitRequestedError:
    if isinstance(error, KeyboardInterrupt):
        return ExitRequestedError(f"{source} was interrupted", INTERRUPTED)
    if error.code is None or isinstance(error.code, int):
        code = error.code or 0
        return ExitRequestedError(f"{source} called sys.exit({code})", code)
    return ExitRequestedError(str(error.code), 1)  # like Python for sys.exit("why")


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in groups and behind build errors, in order."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    elif isinstance(error, BuildError) and error.__cause__ is not None:
        yield from leaves(error.__cause__)
    else:
        yield error


def described(error: BaseException) -> str:
    """Return type and text of an error in one line; of the contained errors for a task group."""
    if isinstance(error, BaseExceptionGroup) and not isinstance(error, _HookErrors):
        return "; ".join(dict.fromkeys(map(described, error.exceptions)))
    return f"{type(error).__name__}: {error}"


def exit_code(error: BaseException) -> int:
    """Return the exit code of a run that this error ended.

    2 for usage and configuration, the code of sys.exit(), otherwise 1.
    """
    codes = [leaf.exit_code if isinstance(leaf, HiveError) else None for leaf in leaves(error)]
    nonzero = [code for code in codes if code]
    return nonzero[0] if nonzero else int(None in codes)


def explain(error: BaseException) -> str | None:
    """Return the message for users if they can act on each error behind `error`; None for internal errors.

    One line for each fault; a graph with faults and an overdue hook have more lines, indented.
    """
    return "\n".join(texts(error)) or None


def texts(error: BaseException) -> list[str]:
    """As explain(), one text for each fault; none for internal errors."""
    unique: dict[str, None] = {}
    for leaf in leaves(error):
        if not isinstance(leaf, HiveError | HookTimeoutError):
            return []
        faults = leaf.faults if isinstance(leaf, SettingsError) else ()
        unique |= dict.fromkeys((fault.text for fault in faults) if faults else [str(leaf)])
        unique |= dict.fromkeys(getattr(leaf, "__notes__", ()))
    return list(unique)


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known name, if one is near."""
    import difflib  # imported only for errors

    matches = difflib.get_close_matches(name, list(candidates), 1)
    return f"; did you mean {matches[0]}?" if matches else ""
