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
    for hint in types:
        if not _is_hint(hint):
            raise TypeError(f"after({hint!r}): expected a type, as a constructor would ask for it")

    def mark(call: T) -> T:
        earlier = vars(call).get(_MARK, ()) if hasattr(call, "__dict__") else ()
        setattr(call, _MARK, (*types, *(hint for hint in earlier if hint not in types)))
        return call

    return mark


def orders_of(call: object) -> tuple[object, ...]:
    """Return the types of after() of a function or class; for a class also those of its bases."""
    orders: tuple[object, ...] = getattr(call, _MARK, ())
    if not orders or not inspect.isclass(call):
        return orders
    every = (hint for base in call.__mro__ for hint in vars(base).get(_MARK, ()))
    return tuple(dict.fromkeys(every))


def _is_hint(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Hashable):
        return False
    return (
        isinstance(value, type | typing.NewType) or typing.get_origin(value) is not None or _is_alias(value)
    )


def _is_alias(value: object) -> bool:
    """Whether it is an alias, ``type X = ...``."""
    return type(value).__name__ == "TypeAliasType"
