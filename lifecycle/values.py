"""Texts of settings into values, by type.

Needs:  a type as it stands in a Settings struct.
Gives:  parse() for texts (flags, environment, files), accept() for values given in code, what a type
        expects in words, and how a value is shown.

Spellings are Cilium's (Go's): booleans ``true t 1 false f 0``, durations ``15s``, lists split at commas and
white space.
"""

import enum
import functools
import math
import typing
from collections.abc import Callable
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    ip_address,
    ip_network,
)
from pathlib import Path

from lifecycle.durations import Duration
from lifecycle.keys import is_union, origin_class, type_name

__all__ = ["accept", "expects", "is_list", "known", "parse", "show", "type_text"]

_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})


def _boolean(text: str) -> bool:
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("expected true or false")


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError("expected a number")
    return number


def _path(text: str) -> Path:
    if not text:
        raise ValueError("expected a path, not nothing")
    return Path(text)


_PARSERS: dict[object, tuple[Callable[[str], object], str]] = {
    str: (str, "text"),
    bool: (_boolean, "true or false"),
    int: (functools.partial(int, base=0), "a whole number"),
    float: (_number, "a number"),
    Path: (_path, "a path"),
    Duration: (Duration.parse, "a duration such as 15s, 2m0s or 100ms"),
    IPv4Address: (IPv4Address, "an IPv4 address such as 10.0.0.1"),
    IPv4Interface: (IPv4Interface, "an IPv4 address with its prefix length such as 10.0.0.1/24"),
    IPv4Network: (IPv4Network, "an IPv4 network such as 10.0.0.0/16, without host bits"),
    IPv6Address: (IPv6Address, "an IPv6 address such as fd00::1"),
    IPv6Interface: (IPv6Interface, "an IPv6 address with its prefix length such as fd00::1/64"),
    IPv6Network: (IPv6Network, "an IPv6 network such as fd00::/64, without host bits"),
    IPv4Address | IPv6Address: (ip_address, "an IP address"),
    IPv4Network | IPv6Network: (ip_network, "an IP network, without host bits"),
}


def parse(text: str, kind: object) -> object:
    """The value that `text` stands for. Raises ValueError("expected ...") when it stands for none."""
    bare, optional = _optional(kind)
    if optional and text == "":
        return None
    if (known_parser := _PARSERS.get(bare)) is not None:
        try:
            return known_parser[0](text)
        except ValueError:
            raise ValueError(f"expected {known_parser[1]}") from None
    if is_list(bare):
        item, make = _items(bare)
        return make(parse(part, item) for part in text.replace(",", " ").split())
    for choice in _choices(bare):
        if text == show(choice):
            return choice
    raise ValueError(f"expected {expects(kind)}")


def accept(value: object, kind: object) -> object:
    """A value given in code, as the type wants it; texts are parsed. Raises ValueError if it does not fit."""
    bare, optional = _optional(kind)
    if value is None and optional:
        return None
    if isinstance(value, str) and bare is not str and value not in _choices(bare):
        return parse(value, kind)
    if is_list(bare) and isinstance(value, list | tuple | set | frozenset):
        item, make = _items(bare)
        return make(accept(part, item) for part in value)
    if _is_of(value, bare):
        return Duration(value) if bare is Duration else value  # type: ignore[arg-type]  # _is_of: a number
    raise ValueError(f"expected {expects(kind)}")


def expects(kind: object) -> str:
    """What a type wants, in words that follow 'expected'."""
    bare, optional = _optional(kind)
    if bare in _PARSERS:
        words = _PARSERS[bare][1]
    elif is_list(bare):
        words = f"a list (commas or spaces between), each {expects(_items(bare)[0])}"
    else:
        words = "one of " + ", ".join(map(show, _choices(bare)))
    return f"{words}, or nothing" if optional else words


def known(kind: object) -> bool:
    """Whether settings of this type can be read at all."""
    bare, _ = _optional(kind)
    if bare in _PARSERS:
        return True
    return known(_items(bare)[0]) if is_list(bare) else bool(_choices(bare))


def is_list(kind: object) -> bool:
    """Whether the type holds several values, so that a flag may be given more than once."""
    return origin_class(_optional(kind)[0]) in {list, tuple, set, frozenset}


def show(value: object) -> str:
    """A value as its text: what parse() would read back."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case enum.Enum():
            return str(value.value)
        case list() | tuple() | set() | frozenset():
            return ",".join(map(show, value))
        case _:
            return str(value)


def _optional(kind: object) -> tuple[object, bool]:
    """The type without ``| None``, unions of several kept as they are."""
    if not is_union(kind) or type(None) not in (members := typing.get_args(kind)):
        return kind, False
    rest = tuple(member for member in members if member is not type(None))
    return typing.Union[rest], True  # noqa: UP007  # of a tuple known only now


def _items(kind: object) -> tuple[object, Callable[..., object]]:
    """What a list type holds, and how to make one."""
    args = [arg for arg in typing.get_args(kind) if arg is not ...]
    make = origin_class(kind)
    return (args[0] if args else str), typing.cast("Callable[..., object]", make)


def _choices(kind: object) -> tuple[object, ...]:
    """The values of an enum or Literal."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(kind)
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _is_of(value: object, kind: object) -> bool:
    if kind in {float, Duration}:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if choices := _choices(kind):
        return value in choices
    return isinstance(value, typing.cast("type", kind))


def type_text(kind: object) -> str:
    """The type in a word or two, for reference tables."""
    bare, optional = _optional(kind)
    choices = _choices(bare)
    text = "|".join(map(show, choices)) if choices else type_name(bare).lower()
    return f"{text}, optional" if optional else text
