"""The value of a setting with its origin, and how messages show it.

Values of secrets are never shown.
"""

import functools
import reprlib
from collections.abc import Mapping
from typing import Literal

import msgspec

from lifecycle.errors import Fault
from lifecycle.settings.options import CONFIG_DIR, Option, env_name
from lifecycle.settings.secrets import HIDDEN

__all__ = ["Findings", "Layer", "RawValue", "Unknown", "hides", "masked", "nearest", "quoted", "unknown"]


class RawValue(msgspec.Struct, frozen=True):
    """A value from a source, not parsed yet."""

    raw: object
    """A text, the texts of a repeated flag, or in code any value."""
    name: str
    """The name under which it was given: options have old names, too, and secrets the name of a file."""
    place: str
    """Its place, for origins."""
    shown: str
    """For errors: place and value as the user wrote them."""
    unitless: bool = False
    """Whether a bare integer is a duration in nanoseconds, as Cilium reads files and variables."""

    def __repr__(self) -> str:
        return self.shown


Unknown = Literal["warn", "refuse", "ignore"]
"""The treatment of keys that no option knows."""


class Findings(msgspec.Struct):
    """Faults and warnings."""

    faults: list[Fault] = msgspec.field(default_factory=list)
    warnings: list[str] = msgspec.field(default_factory=list)
    unknown: Unknown = "ignore"
    others: frozenset[str] = frozenset()
    """Keys that other programs read from the same source."""
    part: bool = False
    """Whether more options exist than are known here, so that an unknown flag may be one of them."""

    def fault(self, text: str) -> None:
        """Record a fault of the settings."""
        self.faults.append(Fault("setting", text))

    def report_unknown(self, shown: str, name: str, names: Mapping[str, Option], prefix: str = "") -> None:
        """Record an unknown key; `shown` is its place, without the value, which might be secret."""
        if name.replace("_", "-") in self.others:
            return
        if self.unknown == "refuse":
            self.fault(unknown(shown, name, names, prefix))
        elif self.unknown == "warn":
            self.warnings.append(f"{unknown(shown, name, names, prefix)}; it is ignored")


_SHOWN = 200
"""Number of characters of a value that an error shows."""

_brief = reprlib.Repr()
_brief.maxlevel, _brief.maxlist, _brief.maxdict = 2, 20, 20
_brief.maxstring = _brief.maxother = _SHOWN

Layer = dict[str, RawValue]
"""The values of one source: by the name under which they were given or, after by_option(), by option."""


def hides(name: str, option: Option | None) -> bool:
    """Whether the value of that name must not be shown; the path of a secret's file may be."""
    return option is not None and option.secret and name != option.file_name


def masked(text: str, name: str, option: Option | None) -> str:
    if hides(name, option):
        return HIDDEN
    return text if text.isprintable() and len(text) <= _SHOWN else quoted(text)


def quoted(value: object) -> str:
    """Return a value in Python's syntax, shortened: a file may contain a megabyte, or nested lists."""
    if not isinstance(value, str):
        return _brief.repr(value)
    return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}... ({len(value)} characters)"


def unknown(shown: str, name: str, names: Mapping[str, Option], prefix: str = "") -> str:
    current = (
        current_name for current_name, option in names.items() if current_name not in option.renamed_from
    )
    near = nearest(name.replace("_", "-"), tuple(current))
    if near and prefix != "--" and prefix:
        near = env_name(near, "")
    hint = f"; did you mean {prefix}{near}?" if near else ""
    return f"{shown}: no such setting{hint}"


@functools.cache
def nearest(name: str, names: tuple[str, ...]) -> str | None:
    import difflib  # imported only for errors

    matches = difflib.get_close_matches(name, (*names, CONFIG_DIR), 1)
    return matches[0] if matches else None
