"""Spans of time as settings write them: ``15s``, ``2m0s``, ``100ms``.

Needs:  nothing.
Gives:  Duration and how to make one. The syntax is Go's (time.ParseDuration), as in Cilium's options.
"""

import math
import re
from typing import Self

__all__ = ["Duration", "milliseconds", "minutes", "seconds"]

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_TERM = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)


class Duration(float):
    """A span of time: a number of seconds that prints as people write it."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """The duration in Go's syntax: ``1h30m``, ``1.5s``, ``-2ms``, ``0``. Raises ValueError for others."""
        sign, body = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
        if body == "0":
            return cls(0)
        total, end = 0.0, 0
        for term in _TERM.finditer(body):
            if term.start() != end:
                break
            total += float(term[1]) * _UNITS[term[2]]
            end = term.end()
        if not body or end != len(body):
            raise ValueError("expected a duration such as 15s, 2m0s or 100ms")
        return cls(sign * total)

    def __str__(self) -> str:
        if not math.isfinite(self):
            return repr(float(self))
        sign, rest = ("-", -float(self)) if self < 0 else ("", float(self))
        if rest == 0:
            return "0s"
        for unit in ("s", "ms", "us", "ns"):
            if rest >= _UNITS[unit] or unit == "ns":
                break
        if unit != "s":
            return f"{sign}{_trim(rest / _UNITS[unit])}{unit}"
        whole, second = divmod(round(rest, 9), 60)
        hour, minute = divmod(int(whole), 60)
        parts = (f"{hour}h" if hour else "", f"{minute}m" if hour or minute else "", f"{_trim(second)}s")
        return sign + "".join(parts)

    __repr__ = __str__


def _trim(number: float) -> str:
    return f"{number:.9f}".rstrip("0").rstrip(".")


def seconds(number: float) -> Duration:
    """So many seconds."""
    return Duration(number)


def milliseconds(number: float) -> Duration:
    """So many thousandths of a second."""
    return Duration(number / 1000)


def minutes(number: float) -> Duration:
    """So many minutes."""
    return Duration(number * 60)
