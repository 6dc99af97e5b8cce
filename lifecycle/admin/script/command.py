"""Commands of scripts and shells: what they are called, what they take, what they do.

Example::

    async def greet(state: State, given: Arguments) -> None:
        await state.print(f"hello {given.words[0]}")

    def greetings() -> Member[Commands]:
        return Commands(Command("greet", "Say hello", greet, "name"))
"""

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import anyio
import msgspec

from lifecycle.settings import Duration

__all__ = [
    "Arguments",
    "Command",
    "CommandError",
    "Commands",
    "ConfirmationNeededError",
    "Flag",
    "State",
    "StopScript",
]


class CommandError(Exception):
    """A command failed; its text is the message for the user."""


class ConfirmationNeededError(CommandError):
    """The command has changed nothing yet: the text is its plan, which ``--yes`` executes."""


class StopScript(Exception):  # noqa: N818  # it ends a script well
    """The script ends here, successfully."""


class Flag(msgspec.Struct, frozen=True):
    """An option of a command: ``--format=json``, ``-format json``, ``-f json``; a switch has no value."""

    name: str
    help: str
    kind: Literal["text", "switch", "time"] = "text"
    default: str = ""
    short: str = ""
    choices: tuple[str, ...] = ()


class Arguments(msgspec.Struct, frozen=True):
    """The arguments of a command."""

    words: tuple[str, ...]
    flags: dict[str, str]
    """By name, with defaults; a switch is ``true`` or empty."""

    def seconds(self, flag: str) -> float:
        """Return the value of a flag of kind time."""
        return float(Duration.parse(self.flags[flag]))

    def parts(self, flag: str) -> list[str]:
        """Return the parts of a list with commas."""
        return [part for part in self.flags[flag].split(",") if part]


class State:
    """The state that commands of one script or shell share: variables, files, the last output."""

    def __init__(
        self,
        directory: Path | None = None,
        write: Callable[[str], Awaitable[None]] | None = None,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self.directory = directory
        """Directory of files; None if commands may not use files."""
        self.variables: dict[str, str] = {} if directory is None else {"WORK": str(directory)}
        self.stdout = ""
        """Output of the previous command."""
        self.stderr = ""
        """Error of the previous command."""
        self.goldens: dict[str, str] = {}
        """Corrected contents of files, if comparisons update them instead of failing."""
        self.updates = False
        self.now = now
        """Seconds, on the clock that sleep() uses."""
        self.sleep = pause
        """Wait for a number of seconds."""
        self.width: int | None = None
        """Columns of the terminal; None for lines of any length."""
        self._printed: list[str] = []
        self._write = write

    async def print(self, text: str) -> None:
        """Print one or more lines. A shell shows them at once."""
        line = text if text.endswith("\n") else f"{text}\n"
        self._printed.append(line)
        if self._write is not None:
            await self._write(line)

    def take(self) -> str:
        """Return the output since the last call."""
        text = "".join(self._printed)
        self._printed.clear()
        return text

    def path(self, name: str) -> Path:
        """Return the file of that name. Raises CommandError if files are not available or it is outside."""
        if self.directory is None:
            raise CommandError(f"{name}: files are for scripts; in a shell, take what is printed")
        path = (self.directory / name).resolve()
        if not path.is_relative_to(self.directory.resolve()):
            raise CommandError(f"{name}: expected a file inside the script's directory")
        return path

    def text_of(self, name: str) -> str:
        """Return the contents of a file, or of ``stdout`` or ``stderr``. Raises CommandError."""
        if name in {"stdout", "stderr"}:
            return self.stdout if name == "stdout" else self.stderr
        try:
            return self.path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise CommandError(f"{name}: {(reason or str(error)).lower()}") from None


Run = Callable[[State, Arguments], Awaitable[None]]
Complete = Callable[[Sequence[str], str], Iterable[str]]
"""Completions of the current word, from the arguments before it."""


class Command(msgspec.Struct, frozen=True):
    """A command for scripts and shells."""

    name: str
    summary: str
    run: Run
    """Prints, and raises CommandError."""
    synopsis: str = ""
    """A word for each argument, such as ``table [key]`` or ``file...``."""
    flags: tuple[Flag, ...] = ()
    help: str = ""
    """Additional text below the summary; may have several lines."""
    complete: Complete | None = None
    endless: bool = False
    """Whether it runs until the caller stops it."""
    changes: Callable[[], str] | None = None
    """What it changes, for the log of a server; None for a command that only reads."""

    def usage(self) -> str:
        """Return the usage, in one line."""
        flags = [
            f"[--{flag.name}]" if flag.kind == "switch" else f"[--{flag.name}=...]" for flag in self.flags
        ]
        return " ".join(filter(None, (self.name, *flags, self.synopsis)))

    def _takes(self, count: int) -> bool:
        """Whether it accepts this number of arguments; those in brackets are optional."""
        words, least, depth = self.synopsis.split(), 0, 0
        for word in words:
            least += depth == 0 and not word.startswith("[")
            depth += word.count("[") - word.count("]")
        return least <= count and (count <= len(words) or "..." in self.synopsis)

    def arguments(self, words: Sequence[str]) -> Arguments:
        """Parse words to arguments and flags. Raises CommandError with the usage."""
        flags = {name: flag for flag in self.flags for name in (flag.name, flag.short) if name}
        values = {flag.name: flag.default for flag in self.flags}
        positional: list[str] = []
        pending = list(reversed(words))
        while pending:
            word = pending.pop()
            if word == "--":
                positional += reversed(pending)
                break
            if not word.startswith("-") or word == "-":
                positional.append(word)
                continue
            name, equals, value = word.lstrip("-").partition("=")
            if (flag := flags.get(name)) is None:
                raise CommandError(f"{word}: no such flag; usage: {self.usage()}")
            if flag.kind == "switch":
                if equals and value not in {"true", "false"}:
                    raise CommandError(f"{word}: expected true or false")
                value = "" if value == "false" else "true"
            elif not equals:
                if not pending:
                    raise CommandError(f"--{flag.name}: needs a value, as in --{flag.name}=VALUE")
                value = pending.pop()
            _check(flag, value)
            values[flag.name] = value
        if not self._takes(len(positional)):
            raise CommandError(f"usage: {self.usage()}")
        return Arguments(tuple(positional), values)


class Commands:
    """Related commands; a cell contributes them as ``Member[Commands]``."""

    def __init__(self, *commands: Command) -> None:
        self._commands = commands

    def __iter__(self) -> Iterator[Command]:
        return iter(self._commands)


def _check(flag: Flag, value: str) -> None:
    if flag.choices and value not in flag.choices:
        raise CommandError(f"--{flag.name}={value}: expected {' or '.join(flag.choices)}")
    if flag.kind == "time":
        try:
            Duration.parse(value)
        except ValueError as error:
            raise CommandError(f"--{flag.name}={value}: {error}") from None
