"""Durations in settings: ``15s``, ``2m0s``, ``100ms``."""

import math
import re
from typing import Self

__all__ = ["Duration", "milliseconds", "minutes", "seconds"]

_US, _MS, _S = 10**3, 10**6, 10**9
_UNITS = {"ns": 1, "us": _US, "µs": _US, "μs": _US, "ms": _MS, "s": _S, "m": 60 * _S, "h": 3600 * _S}
"""Unit -> nanoseconds; integers keep sums exact."""

_TERM = re.compile(r"(?:(\d{1,30})(?:\.(\d{0,30}))?|\.(\d{1,30}))(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_LONGEST = 2**63 - 1
"""The longest duration in Go, in nanoseconds: 292 years."""


class Duration(float):
    """A duration: a number of seconds, printed in Go's syntax."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the duration in Go's syntax: ``1h30m``, ``1.5s``, ``-2ms``, ``0``.

        Raises ValueError for others.
        """
        sign, body = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
        if body == "0":
            return cls(0)
        total, end = 0, 0
        while (term := _TERM.match(body, end)) is not None:
            part = term[2] or term[3] or ""
            total += int((term[1] or "") + part) * _UNITS[term[4]] // 10 ** len(part)
            end = term.end()
        if not body or end != len(body) or total > _LONGEST:
            raise ValueError("expected a duration such as 15s, 2m0s or 100ms")
        return cls(sign * total / _S)

    def __str__(self) -> str:
        if not math.isfinite(self):
            return repr(float(self))
        sign, seconds = ("-", -float(self)) if self < 0 else ("", float(self))
        if seconds == 0:
            return "0s"
        for unit in ("s", "ms", "us", "ns"):
            if seconds * _S >= _UNITS[unit] or unit == "ns":
                break
        if unit != "s":
            return f"{sign}{_trim(seconds * _S / _UNITS[unit])}{unit}"
        whole, second = divmod(round(seconds, 9), 60)
        hour, minute = divmod(int(whole), 60)
        parts = (f"{hour}h" if hour else "", f"{minute}m" if hour or minute else "", f"{_trim(second)}s")
        return sign + "".join(parts)

    __repr__ = __str__


def _trim(number: float) -> str:
    return f"{number:.9f}".rstrip("0").rstrip(".")


def seconds(number: float) -> Duration:
    """Return a duration of seconds."""
    return Duration(number)


def milliseconds(number: float) -> Duration:
    """Return a duration of milliseconds."""
    return Duration(number / 1000)


def minutes(number: float) -> Duration:
    """Return a duration of minutes."""
    return Duration(number * 60)
