"""Checks that a fake can replace a type, and that a value is an instance of a type.

A fake need not derive from the type. It must have the type's public methods, asynchronous if those are, and
callable with their parameters.
"""

import functools
import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any, is_typeddict

from lifecycle.hints.keys import Key, is_member, member_of, origin_class, plain, type_name

__all__ = ["fake_mismatches", "members", "type_mismatches", "value_mismatches"]


def fake_mismatches(fake: object, key: Key) -> Iterator[str]:
    """Return why `fake` cannot replace `key`; empty if it can."""
    if (member := member_of(key)) is not None:
        yield from _members_mismatches(fake, member)
        return
    kind = origin_class(key)
    if kind is None or kind in type(fake).__mro__:  # a NewType has no runtime type
        return
    promised = members(kind)
    if isinstance(fake, type):
        yield f"{type_name(fake)} is a class: give an instance of it"
    elif not promised and not getattr(kind, "_is_protocol", False):
        yield f"it is of type {type_name(type(fake))}"
    else:
        for name, expected in promised.items():
            yield from _member_mismatches(fake, name, getattr(expected, "__func__", expected))


def value_mismatches(value: object, key: Key) -> Iterator[str]:
    """Return why a value is not of the type under which it is provided; empty if it is.

    Instances of the class and implementations of a Protocol are. An int is also a float, as for type
    checkers.
    """
    bare = plain(key)
    if typing.get_origin(bare) is typing.Literal:
        if value not in typing.get_args(bare):
            yield f"it is {value!r}"
        return
    while (kind := origin_class(bare)) is None and hasattr(bare, "__supertype__"):  # a NewType
        bare = bare.__supertype__
    if kind is None or (kind in {float, complex} and isinstance(value, int | float)):
        return
    if getattr(kind, "_is_protocol", False):
        if isinstance(value, type):
            yield f"{type_name(value)} is a class: give an instance of it"
        elif kind not in type(value).__mro__:
            yield from _lacks(value, kind)
        return
    try:
        fits = isinstance(value, dict if is_typeddict(kind) else kind)
    except TypeError:  # a class without support for isinstance()
        return
    if fits:
        yield from _holds_others(value, kind, bare)
    else:
        yield f"it is of type {type_name(type(value))}"


def type_mismatches(has: Key, key: Key) -> Iterator[str]:
    """Return why no value of the type `has` can be of the type `key`, from the classes alone.

    Attributes that __init__ sets are visible only on a value (value_mismatches()).
    """
    kind, required = origin_class(plain(has)), origin_class(plain(key))
    if kind is None or required is None or required in kind.__mro__:
        return
    if not getattr(required, "_is_protocol", False):
        if not getattr(kind, "_is_protocol", False) and not issubclass(required, kind):
            yield f"{type_name(has)} does not derive from it"
        return
    for name, member in members(required).items():
        if inspect.isfunction(member):
            actual = inspect.getattr_static(kind, name, _MISSING)
            if actual is _MISSING:
                yield f"{type_name(has)} has no {name}"
            elif _is_plain(actual) and inspect.iscoroutinefunction(member):
                yield f"its {name} is not async"


def _is_plain(member: object) -> bool:
    return inspect.isfunction(member) and not inspect.iscoroutinefunction(member)


def _holds_others(value: Any, kind: type, key: Key) -> Iterator[str]:
    """Return the first element of a list or set that is not of its element type."""
    if kind not in {list, set, frozenset} or not (args := typing.get_args(key)) or is_member(args[0]):
        return
    for element in value:
        if (fault := next(value_mismatches(element, args[0]), None)) is not None:
            yield f"it holds {element!r}: {fault}"
            return


@functools.cache
def _promised(kind: type) -> tuple[tuple[str, bool], ...]:
    """Return the members of a Protocol, and whether each is a method."""
    return tuple((name, inspect.isfunction(member)) for name, member in members(kind).items())


def _lacks(value: object, protocol: type) -> Iterator[str]:
    """Return the members of a Protocol that a value lacks, without running a property."""
    for name, is_method in _promised(protocol):
        attribute = getattr(type(value), name, _MISSING)
        if attribute is _MISSING:
            attribute = inspect.getattr_static(value, name, _MISSING)
        if attribute is _MISSING:
            yield f"it has no {name}"
        elif is_method and not callable(attribute) and not hasattr(type(attribute), "__get__"):
            yield f"its {name} is not a method"


def _members_mismatches(fake: object, member: Key) -> Iterator[str]:
    if not isinstance(fake, list):
        yield f"it is not a list, it is of type {type_name(type(fake))}"
        return
    for number, element in enumerate(fake):
        yield from (f"[{number}]: {fault}" for fault in fake_mismatches(element, member))


def members(kind: type) -> Mapping[str, object]:
    """Return public methods and properties of a class, and the attributes it declares."""
    attributes: dict[str, object] = {}
    for base in reversed(kind.__mro__):
        if base is not object and base.__module__ != "typing":
            attributes |= dict.fromkeys(inspect.get_annotations(base))
            attributes |= vars(base)
    return {name: member for name, member in attributes.items() if not name.startswith("_")}


def _member_mismatches(fake: object, name: str, expected: object) -> Iterator[str]:
    if inspect.getattr_static(fake, name, _MISSING) is _MISSING:  # getattr_static runs no property
        yield f"it has no {name}"
        return
    if not inspect.isfunction(expected):
        return
    actual = getattr(fake, name)
    if not callable(actual):
        yield f"its {name} is not a method"
        return
    if (
        inspect.iscoroutinefunction(expected)
        and inspect.isroutine(actual)
        and not inspect.iscoroutinefunction(actual)
    ):
        yield f"its {name} is not async"
    try:
        signature = inspect.signature(actual)
    except ValueError:  # written in C, without a signature
        return
    parameters = list(inspect.signature(expected).parameters.values())[1:]
    try:
        signature.bind(
            *(p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}),
            **{p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY},
        )
    except TypeError as error:
        yield f"its {name}{signature} cannot be called as {name}{inspect.signature(expected)}: {error}"


_MISSING = object()
