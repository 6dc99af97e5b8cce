"""What is near a type that nothing provides.

Needs:  constructors.
Gives:  near(), lines that say what the user may have meant.
"""

from collections.abc import Iterable, Iterator

from lifecycle.constructors import Constructor
from lifecycle.fakes import members
from lifecycle.keys import Key, full_name, origin_class, type_name

__all__ = ["near"]


def near(key: Key, provided: Iterable[Constructor]) -> Iterator[str]:
    """One line for each constructor whose result is almost `key`: by what it is, then by its name."""
    names = {}
    for node in provided:
        names[type_name(node.key)] = node
        if (line := _related(key, node)) is not None:
            yield line
    import difflib  # only mistakes need it

    for match in difflib.get_close_matches(type_name(key), names, 2, 0.8):
        if match != type_name(key) and _related(key, names[match]) is None:
            yield f"a similar name, {match}, is provided by {names[match]}"


def _related(key: Key, node: Constructor) -> str | None:
    name, wanted, has = type_name(key), origin_class(key), origin_class(node.key)
    given = f"{type_name(node.key)} is provided by {node}"
    line: str | None = None
    if type_name(node.key) == name:
        line = f"{full_name(node.key)}, not {full_name(key)}, is provided by {node}"
    elif has is None or wanted is None:
        pass
    elif has is wanted:
        line = given
    elif getattr(wanted, "_is_protocol", False):
        if members(wanted) and all(hasattr(has, member) for member in members(wanted)):
            line = f"{given} and has its methods: provide it with `-> {name}`"
    elif getattr(has, "_is_protocol", False):
        pass  # issubclass() would refuse, and a protocol is not what the user meant by a class
    elif issubclass(has, wanted):
        line = f"{given}, a subclass: provide it with `-> {name}`"
    elif issubclass(wanted, has) and has is not object:
        line = f"{given}, a base class of it"
    return line
