"""Order without use: a constructor that starts after a type that it does not receive."""

import inspect
import typing
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

__all__ = ["after", "orders_of"]

T = TypeVar("T", bound=Callable[..., object])
_MARK = "__comes_after__"


def after(*types: Any) -> Callable[[T], T]:
    """Start the hooks of a constructor or invoked function after those of the providers of these types.

    It depends on each of them as with a parameter of that type, without receiving it: they are built before
    it, their hooks start before its own, and stop after its own. A type that nothing provides is a fault of
    the graph, unless it is written ``X | None``; ``list[Member[T]]`` stands for a whole group. A subclass
    inherits the order of its bases. Raises TypeError for values that are not types.

        @after(Database)
        class Server:  # its port opens when the database runs, although it never uses it
    """
    if not types:
        raise TypeError("after() without a type: name what it comes after, as in @after(Database)")
    for one in types:
        if not _is_hint(one):
            raise TypeError(f"after({one!r}): expected a type, as a constructor would ask for it")

    def mark(call: T) -> T:
        known = vars(call).get(_MARK, ()) if hasattr(call, "__dict__") else ()
        setattr(call, _MARK, (*types, *(one for one in known if one not in types)))
        return call

    return mark


def orders_of(call: object) -> tuple[object, ...]:
    """Return the types of after() of a function or class; for a class also those of its bases."""
    found: tuple[object, ...] = getattr(call, _MARK, ())
    if not found or not inspect.isclass(call):
        return found
    every = (one for base in call.__mro__ for one in vars(base).get(_MARK, ()))
    return tuple(dict.fromkeys(every))


def _is_hint(one: object) -> bool:
    if isinstance(one, str) or not isinstance(one, Hashable):
        return False
    return isinstance(one, type | typing.NewType) or typing.get_origin(one) is not None or _is_alias(one)


def _is_alias(one: object) -> bool:
    """Whether it is an alias, ``type X = ...``."""
    return type(one).__name__ == "TypeAliasType"
