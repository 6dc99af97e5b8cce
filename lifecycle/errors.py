"""The errors of a hive, and what a person is told about them.

Needs:  nothing.
Gives:  HiveError and its kinds (one clear line, an exit code), StartError and StopError (groups that name
        the hook), and how any error becomes an exit code and a text for the terminal.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

import msgspec

__all__ = [
    "BuildError",
    "Fault",
    "GraphError",
    "HiveError",
    "HookTimeoutError",
    "NotStartedError",
    "SettingsError",
    "ShutdownRequestedError",
    "StartError",
    "StopError",
    "UsageError",
    "exit_code",
    "explain",
    "leaves",
    "texts",
]


class HiveError(Exception):
    """A fault that the person running the hive can act on, told in one line. A run ends with exit code 1."""

    exit_code: ClassVar[int] = 1


class UsageError(HiveError):
    """The hive was called or configured wrongly. A run ends with exit code 2."""

    exit_code: ClassVar[int] = 2


class NotStartedError(HiveError):
    """Something was asked for that exists only once the hive, or the hook that makes it, has started."""


class ShutdownRequestedError(HiveError):
    """Someone asked the hive to end while it started."""


class BuildError(HiveError):
    """A constructor or invoked function raised, or returned what it must not. The original is `__cause__`."""


class Fault(msgspec.Struct, frozen=True):
    """One thing wrong with a hive: what, and below it where and what would help."""

    kind: str
    """missing, private, optional, cycle, duplicate, constructor, invoke, decorate, replace, module or
    setting."""
    text: str
    details: tuple[str, ...] = ()

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


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors behind groups and build errors, in order."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    elif isinstance(error, BuildError) and error.__cause__ is not None:
        yield from leaves(error.__cause__)
    else:
        yield error


def exit_code(error: BaseException) -> int:
    """The exit code of a run that this error ended: 2 for usage and configuration, 1 otherwise."""
    codes = [leaf.exit_code for leaf in leaves(error) if isinstance(leaf, HiveError)]
    return codes[0] if codes else 1


def explain(error: BaseException) -> str | None:
    """What to tell the user when every error behind `error` is one they can act on; None for our own bugs.

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
    return list(found)
