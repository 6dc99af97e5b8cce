"""What is near a type that nothing provides.

Needs:  a resolution.
Gives:  near(), lines that say what the user may have meant.
"""

from collections.abc import Iterable, Iterator

from lifecycle.constructors import Constructor
from lifecycle.fakes import unlike
from lifecycle.keys import Key, full_name, origin_class, type_name

__all__ = ["near"]


def near(key: Key, provided: Iterable[Constructor]) -> Iterator[str]:
    """One line for each constructor whose result is almost `key`."""
    wanted = origin_class(key)
    names = {}
    for node in provided:
        names[type_name(node.key)] = node
        has = origin_class(node.key)
        if type_name(node.key) == type_name(key):
            yield f"another {type_name(key)}, {full_name(node.key)}, is provided by {node}; needed is {full_name(key)}"
        elif has is None or wanted is None:
            continue
        elif has is wanted:
            yield f"{type_name(node.key)} is provided by {node}"
        elif getattr(wanted, "_is_protocol", False):
            if _fits(has, wanted):
                yield f"{_as(node, key)}, which has its methods"
        elif issubclass(has, wanted):
            yield f"{_as(node, key)}, a subclass"
        elif issubclass(wanted, has) and has is not object:
            yield f"its base {type_name(node.key)} is provided by {node}"
    yield from _similar(type_name(key), names)


def _as(node: Constructor, key: Key) -> str:
    return f"{type_name(node.key)} is provided by {node}: provide it as {type_name(key)} with `-> {type_name(key)}`"


def _fits(kind: type, protocol: type) -> bool:
    """Whether a class has the methods of a Protocol that has any."""
    return any(not name.startswith("_") for name in vars(protocol)) and not any(unlike_class(kind, protocol))


def unlike_class(kind: type, protocol: type) -> Iterator[str]:
    """As unlike(), of the instances of a class, without one."""
    return unlike(object.__new__(kind), protocol) if _is_plain(kind) else iter(("not a plain class",))


def _is_plain(kind: type) -> bool:
    return kind.__new__ is object.__new__ and not getattr(kind, "__abstractmethods__", None)


def _similar(name: str, names: dict[str, Constructor]) -> Iterator[str]:
    import difflib  # only mistakes need it

    for match in difflib.get_close_matches(name, names, 2, 0.8):
        if match != name:
            yield f"a similar name, {match}, is provided by {names[match]}"
