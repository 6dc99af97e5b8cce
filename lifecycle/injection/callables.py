"""Callables that are neither functions nor classes: partials, and objects with ``__call__``."""

import functools
import inspect
from typing import Any

from lifecycle.hints.generics import class_of
from lifecycle.hints.places import has_place
from lifecycle.injection.ordering import after, orders_of
from lifecycle.injection.signatures import read_hints

__all__ = ["as_function"]


def as_function(call: Any) -> Any:
    """Wrap `call` in a function with the hints and the place of the function behind it.

    Functions, classes, and objects that cannot be called are returned unchanged.
    """
    if has_place(call) or not callable(call):
        return call
    inner, bound = call, set[str]()
    while isinstance(inner, functools.partial):
        bound |= inner.keywords.keys()
        inner = inner.func
    if not has_place(inner):  # an object: its class's __call__ has a place
        inner = type(inner).__call__

    def function(*args: object, **kwargs: object) -> object:
        return call(*args, **kwargs)

    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # written in C, without a signature
        return call
    remaining = [parameter for parameter in signature.parameters.values() if parameter.name not in bound]
    function.__signature__ = signature.replace(parameters=remaining)  # type: ignore[attr-defined]  # as documented
    function.__annotations__ = _hints(inner)
    name = getattr(inner if inner is not type(call).__call__ else type(call), "__qualname__", repr(call))
    function.__name__, function.__qualname__ = name.rpartition(".")[2], name
    function.__module__ = getattr(inner, "__module__", __name__)
    if orders := orders_of(inner):
        function = after(*orders)(function)
    function.__wrapped__ = inner  # type: ignore[attr-defined]  # messages and hints go by what is called
    return function


def _hints(inner: Any) -> dict[str, Any]:
    kind = class_of(inner)
    if kind is None:
        return dict(getattr(inner, "__annotations__", {}))
    return {**read_hints(inner, kind), "return": inner}
