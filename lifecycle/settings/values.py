"""Parses texts of settings into values, by type.

Spellings are Cilium's (Go's): booleans ``true t 1 false f 0``, durations ``15s``, lists split at commas and
white space, maps ``key=value,key1=value1`` or JSON. Quantities are Kubernetes': ``512Mi``.
"""

import enum
import functools
import math
import typing
from collections.abc import Callable, Mapping
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

from lifecycle.hints.keys import is_union, origin_class, type_name, unaliased
from lifecycle.settings.durations import Duration
from lifecycle.settings.macs import MAC
from lifecycle.settings.mappings import join, split
from lifecycle.settings.quantities import Quantity
from lifecycle.settings.secrets import Secret

__all__ = [
    "accept",
    "bare",
    "choices",
    "expects",
    "is_list",
    "is_map",
    "is_secret",
    "items",
    "known",
    "parse",
    "parse_all",
    "show",
    "type_text",
]

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
    if not text or "\0" in text:
        raise ValueError("expected a path, not nothing")
    return Path(text)


_PARSERS: dict[object, tuple[Callable[[str], object], str]] = {
    str: (str, "text"),
    bool: (_boolean, "true or false"),
    int: (functools.partial(int, base=0), "a whole number"),
    float: (_number, "a number"),
    Path: (_path, "a path"),
    Duration: (Duration.parse, "a duration such as 15s, 2m0s or 100ms"),
    Quantity: (Quantity.parse, "a whole quantity such as 512Mi, 1.5G or 1000"),
    Secret: (Secret, "a secret text"),
    MAC: (MAC.parse, "a MAC address such as 02:00:00:00:00:01"),
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
    """Parse a text into a value of this type. Raises ValueError("expected ...") for an invalid text."""
    base, optional = bare(kind)
    if optional and text == "":
        return None
    if (known_parser := _PARSERS.get(base)) is not None:
        try:
            return known_parser[0](text)
        except ValueError:
            raise ValueError(f"expected {known_parser[1]}") from None
    if is_list(base):
        item, make = items(base)
        return make(parse(part, item) for part in text.replace(",", " ").split())
    if is_map(base):
        return accept(_split(text, base), base)
    for choice in choices(base):
        if text == show(choice):
            return choice
    raise ValueError(f"expected {expects(kind)}")


def parse_all(texts: list[str], kind: object) -> object:
    """Parse the texts of a repeated flag: lists are concatenated, in maps the last value of a key applies."""
    base, _ = bare(kind)
    if not is_map(base):
        return parse(",".join(texts), kind)
    return accept({key: value for text in texts for key, value in _split(text, base).items()}, base)


def accept(value: object, kind: object) -> object:
    """Convert a value given in code to the type; texts are parsed. Raises ValueError for a mismatch."""
    base, optional = bare(kind)
    if value is None and optional:
        return None
    for choice in choices(base):
        spellings = (choice, choice.value) if isinstance(choice, enum.Enum) else (choice,)
        if any(type(spelling) is type(value) and spelling == value for spelling in spellings):
            return choice
    if isinstance(value, str) and base is not str:
        return parse(value, kind)
    if is_list(base) and isinstance(value, list | tuple | set | frozenset):
        item, make = items(base)
        return make(accept(part, item) for part in value)
    if is_map(base) and isinstance(value, Mapping):
        return _accept_map(value, base)
    if _is_of(value, base):
        make = {Duration: Duration, Quantity: Quantity}.get(base)  # type: ignore[call-overload]  # any hashable
        return make(value) if make else value
    raise ValueError(f"expected {expects(kind)}")


def _split(text: str, kind: object) -> dict[str, object]:
    try:
        return split(text)
    except ValueError:
        raise ValueError(f"expected {expects(kind)}") from None


def _accept_map(value: Mapping[object, object], kind: object) -> dict[object, object]:
    key_kind, item = _pair(kind)
    found = {}
    for key, part in value.items():
        try:
            found[accept(key, key_kind)] = accept(part, item)
        except ValueError as error:
            raise ValueError(f"key {key!r}: {error}") from None
    return found


def expects(kind: object) -> str:
    """Describe valid values of a type, in words that follow 'expected'."""
    base, optional = bare(kind)
    if base in _PARSERS:
        words = _PARSERS[base][1]
    elif is_list(base):
        words = f"a list (commas or spaces between), each {expects(items(base)[0])}"
    elif is_map(base):
        words = f"key=value,key1=value1 or a JSON object, each value {expects(_pair(base)[1])}"
    else:
        words = "one of " + ", ".join(map(show, choices(base)))
    return f"{words}, or nothing" if optional else words


def known(kind: object) -> bool:
    """Whether settings can have this type."""
    base, _ = bare(kind)
    if base in _PARSERS:
        return True
    if is_list(base):
        item = items(base)[0]
        return known(item) and not is_list(item) and not is_map(item)
    if is_map(base):
        key, item = _pair(base)
        return known(key) and known(item) and not (is_list(key) or is_map(key) or is_secret(key))
    return bool(choices(base))


def is_list(kind: object) -> bool:
    """Whether the type is a collection, so that its flag may be repeated."""
    return origin_class(bare(kind)[0]) in {list, tuple, set, frozenset}


def is_map(kind: object) -> bool:
    """Whether the type is a mapping."""
    return origin_class(bare(kind)[0]) in {dict, Mapping}


def is_secret(kind: object) -> bool:
    """Whether values of the type, or parts of them, must not be shown."""
    base, _ = bare(kind)
    return base is Secret or any(is_secret(arg) for arg in typing.get_args(base) if arg is not ...)


def show(value: object) -> str:
    """Return the text of a value, which parse() would accept; secrets are hidden."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case enum.Enum():
            return str(value.value)
        case list() | tuple() | set() | frozenset():
            texts = map(show, value)
            return ",".join(texts if isinstance(value, list | tuple) else sorted(texts))
        case Mapping():
            return join({show(key): show(part) for key, part in value.items()})
        case _:
            return str(value)


@functools.cache
def bare(kind: object) -> tuple[object, bool]:
    """Return the type without ``| None``, and whether it had that; other unions are unchanged."""
    kind = unaliased(kind)
    if not is_union(kind) or type(None) not in (members := typing.get_args(kind)):
        return kind, False
    remaining = tuple(member for member in members if member is not type(None))
    return typing.Union[remaining], True  # noqa: UP007  # of a tuple known only now


def items(kind: object) -> tuple[object, Callable[..., object]]:
    """Return the item type of a collection, or the value type of a map, and its constructor."""
    args = [arg for arg in typing.get_args(kind) if arg is not ...]
    make = origin_class(kind)
    return (args[-1] if args else str), typing.cast("Callable[..., object]", make)


def _pair(kind: object) -> tuple[object, object]:
    """Return the key and value types of a map."""
    args = typing.get_args(kind)
    return (args[0], args[1]) if args else (str, str)


def choices(kind: object) -> tuple[object, ...]:
    """Return the values of an enum or Literal; none for other types."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(kind)
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _is_of(value: object, kind: object) -> bool:
    if kind in {float, Duration}:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind in {int, Quantity}:
        return isinstance(value, int) and not isinstance(value, bool)
    if choices(kind) or is_list(kind) or is_map(kind):
        return False
    return isinstance(value, typing.cast("type", kind))


def type_text(kind: object) -> str:
    """Return the type in a few words, for reference tables."""
    base, optional = bare(kind)
    if values := choices(base):
        text = "|".join(map(show, values))
    elif is_list(base):
        text = f"list of {type_text(items(base)[0])}"
    elif is_map(base):
        text = f"map of {type_text(items(base)[0])}"
    else:
        text = type_name(base).lower()
    return f"{text}, optional" if optional else text
