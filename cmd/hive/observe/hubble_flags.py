"""Parses command lines like Cilium's ``hubble``: flags anywhere, several letters in one word.

Source: pflag's syntax and texts; the hubble CLI's formats of times.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec


class CommandLineError(ValueError):
    """Raised for an invalid command line; the text is that of Cilium's client."""

    def __init__(self, text: str, plain: str = "") -> None:
        super().__init__(text)
        self.plain = plain or text
        """The text of ``hive observe``: what is wrong, and what was expected."""


class Flag(msgspec.Struct, frozen=True):
    """One flag of a command."""

    name: str
    help: str
    short: str = ""
    parse: Callable[[str], Any] = str
    """Raises ValueError."""
    default: Any = ""
    alone: str = ""
    """Its value if none follows; empty if a value is required."""
    expected: str = ""
    """Description of valid values, for errors."""
    many: bool = False
    """Whether it may be repeated, with several values."""

    @property
    def shown(self) -> str:
        """The flag as errors show it."""
        return f"-{self.short}, --{self.name}" if self.short else f"--{self.name}"


def switch(name: str, help: str, short: str = "", *, default: bool = False) -> Flag:  # noqa: A002
    """Return a flag without a value."""
    return Flag(name, help, short, parse_bool, default, "true")


def parse_bool(text: str) -> bool:
    """Parse a boolean in Go's syntax. Raises ValueError."""
    if text in {"1", "t", "T", "true", "TRUE", "True"}:
        return True
    if text in {"0", "f", "F", "false", "FALSE", "False"}:
        return False
    raise ValueError(f'strconv.ParseBool: parsing "{text}": invalid syntax')


def parse_list(text: str) -> tuple[str, ...]:
    """Split words at commas."""
    return tuple(word for word in text.split(",") if word)


class Flags:
    """The flags of one command, and their values from a command line."""

    def __init__(self, flags: Sequence[Flag]) -> None:
        self._flags = flags
        self._named = {flag.name: flag for flag in flags}
        self._short = {flag.short: flag for flag in flags if flag.short}
        self._values: dict[str, Any] = {flag.name: [] if flag.many else flag.default for flag in flags}
        self.given: set[str] = set()
        """Names of the flags on the command line."""

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def set(self, name: str, text: str) -> None:
        """Set the value of a flag. Raises CommandLineError."""
        flag = self._named[name]
        try:
            value = flag.parse(text)
        except ValueError as error:
            expected = flag.expected or _EXPECTED.get(flag.parse, "")
            raise CommandLineError(
                f'invalid argument "{text}" for "{flag.shown}" flag: {error}',
                f"--{flag.name}: {text!r}: {f'expected {expected}' if expected else error}",
            ) from error
        if flag.many:
            self._values[name] = [*self._values[name], value]
        else:
            self._values[name] = value

    def from_environment(self, environment: Mapping[str, str], names: Sequence[str]) -> None:
        """Set flags that the command line lacks from ``HUBBLE_SERVER`` and similar variables."""
        for name in names:
            text = environment.get(f"HUBBLE_{name.upper().replace('-', '_')}")
            if text is not None and name not in self.given:
                self.set(name, text)

    def parse(self, words: Sequence[str]) -> list[str]:
        """Parse a command line; return the remaining arguments. Raises CommandLineError."""
        arguments: list[str] = []
        rest = iter(words)
        for word in rest:
            if word == "--":
                arguments += rest
            elif word.startswith("--"):
                self._long(word, rest)
            elif word.startswith("-") and word != "-":
                self._letters(word, rest)
            else:
                arguments.append(word)
        return arguments

    def _long(self, word: str, rest: Iterator[str]) -> None:
        name, equals, text = word[2:].partition("=")
        flag = self._named.get(name)
        if flag is None:
            raise CommandLineError(f"unknown flag: --{name}")
        if not equals:
            text = flag.alone or self._next(rest, f"--{name}")
        self._give(flag, text)

    def _letters(self, word: str, rest: Iterator[str]) -> None:
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            flag = self._short.get(letter)
            if flag is None:
                raise CommandLineError(f"unknown shorthand flag: '{letter}' in {word}")
            if letters.startswith("="):
                text, letters = letters[1:], ""
            elif flag.alone:
                text = flag.alone
            else:
                text, letters = letters or self._next(rest, f"'{letter}' in {word}"), ""
            self._give(flag, text)

    def _give(self, flag: Flag, text: str) -> None:
        self.set(flag.name, text)
        self.given.add(flag.name)

    def _next(self, rest: Iterator[str], shown: str) -> str:
        text = next(rest, None)
        if text is None:
            raise CommandLineError(f"flag needs an argument: {shown}")
        return text

    def help(self) -> list[tuple[str, str]]:
        """Yield each flag with its description."""
        return [(flag.shown, flag.help) for flag in self._flags]


_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")


def go_seconds(text: str) -> float:
    """Return the seconds of a duration such as ``1h30m`` or ``500ms``. Raises ValueError."""
    sign = -1.0 if text.startswith("-") else 1.0
    body = text.removeprefix("-").removeprefix("+")
    if body == "0":
        return 0.0
    parts = list(_PART.finditer(body))
    if not parts or "".join(part[0] for part in parts) != body:
        raise ValueError(f'time: invalid duration "{text}"')
    return sign * sum(float(part[1]) * _UNITS[part[2]] for part in parts)


_TIME: Final = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)"
    r"(?:T(?P<hour>\d\d)(?::(?P<minute>\d\d)(?::(?P<second>\d\d)(?:[.,](?P<fraction>\d+))?)?)?"
    r"(?P<zone>Z|[+-]\d\d:\d\d))?",
    re.ASCII,
)
_EXPECTED: Final[dict[Callable[[str], Any], str]] = {
    parse_bool: "true or false",
    go_seconds: "a duration such as 5s or 1m30s",
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def parse_time(text: str) -> int:
    """Parse a relative time such as ``5m``, or RFC 3339 or RFC 1123, to nanoseconds. Raises ValueError."""
    try:
        return time.time_ns() - int(go_seconds(text) * 1e9)
    except ValueError:
        pass
    if (found := _TIME.fullmatch(text)) is not None:
        zone = found["zone"] or "Z"
        clock = f"{found['hour'] or '00'}:{found['minute'] or '00'}:{found['second'] or '00'}"
        try:
            moment = datetime.fromisoformat(f"{found['date']}T{clock}{zone}")
        except ValueError:
            raise ValueError(f"failed to convert {text} to time") from None
        return _nanoseconds(moment) + int((found["fraction"] or "")[:9].ljust(9, "0"))
    try:
        return _nanoseconds(datetime.strptime(text, "%a, %d %b %Y %H:%M:%S %z"))
    except ValueError:
        raise ValueError(f"failed to convert {text} to time") from None


def _nanoseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(seconds=1) * 1_000_000_000
