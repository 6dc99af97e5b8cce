"""Checks hooks and jobs when they are registered, so that errors name that place, not a later call."""

import contextlib
import functools
import inspect
import math
import types
import typing
from collections.abc import Awaitable, Callable
from typing import Any

from lifecycle.hints.keys import type_name
from lifecycle.hints.places import Place, has_place, place_of

__all__ = ["awaitable", "check_async", "check_context", "check_iterates", "check_seconds"]


def check_async(call: object, subject: str, place: Place) -> None:
    """Raise TypeError if a call does not return an awaitable.

    Coroutine functions pass, and functions with an awaitable result in their hints. The result of a lambda is
    checked only when it is called.
    """
    if (why := _not_async(call)) is not None:
        raise TypeError(
            f"{subject} at {place}: {_named(call)} {why}: expected a coroutine function (async def)"
        )


def awaitable(result: Awaitable[object], call: object, role: str) -> Awaitable[object]:
    """Return the result of a call. Raises TypeError if it is not awaitable, as a lambda's may be."""
    if type(result) is not types.CoroutineType and not isinstance(result, Awaitable):
        text = f"its {role} returned {result!r}, nothing to await: expected a coroutine function"
        raise TypeError(f"{text}, not {_named(call)}")
    return result


def check_context(make: object, subject: str, place: Place) -> None:
    """Raise TypeError unless a call makes an asynchronous context manager."""
    if hasattr(type(make), "__aenter__") and not isinstance(make, type):
        why = "is a context manager itself: give the function that makes it, without calling it"
    elif not callable(make):
        why = "cannot be called: expected a function that makes an asynchronous context manager"
    elif isinstance(make, type) and not hasattr(make, "__aenter__"):
        why = "is not an asynchronous context manager: it has no __aenter__"
    elif _is_kind(make, inspect.iscoroutinefunction, inspect.isasyncgenfunction):
        why = "makes no context manager: decorate it with contextlib.asynccontextmanager"
    elif _is_kind(_inner(make), inspect.isgeneratorfunction, unwrap=True):
        why = "is not asynchronous: decorate an `async def` with contextlib.asynccontextmanager"
    else:
        return
    raise TypeError(f"{subject} at {place}: {_named(make)} {why}")


def check_iterates(make: object, subject: str, place: Place) -> None:
    """Raise TypeError unless a call makes an asynchronous iterable."""
    if not callable(make):
        why = "cannot be called: give the function that makes the iteration"
    elif _is_kind(_inner(make), inspect.iscoroutinefunction, inspect.isgeneratorfunction):
        why = (
            "makes no asynchronous iteration: expected an async generator, or a method such as table.changes"
        )
    else:
        return
    raise TypeError(f"{subject} at {place}: {_named(make)} {why}")


def check_seconds(value: object, subject: str, place: Place, *, zero: bool = False) -> None:
    """Raise TypeError if a value is not a number of seconds, ValueError if it is not positive.

    `zero` also allows zero; infinity is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{subject} at {place} is {value!r}: expected a number of seconds")
    if math.isnan(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(
            f"{subject} at {place} is {value!r}: expected {'0 or more' if zero else 'more than 0'} seconds"
        )


def _not_async(call: object) -> str | None:
    """Return why awaiting the result of a call would fail; None if it would not, or is unknown."""
    function = getattr(call, "__func__", call)
    if isinstance(function, types.FunctionType) and function.__code__.co_flags & inspect.CO_COROUTINE:
        return None  # fast path
    if not callable(call):
        return "cannot be called"
    inner = _inner(call)
    if hasattr(call, "_is_coroutine") or _is_kind(inner, inspect.iscoroutinefunction, unwrap=True):
        return None
    if _is_kind(inner, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        return "is a generator"
    if isinstance(inner, type):
        return None if hasattr(inner, "__await__") else "is a class"
    return _not_awaitable(inner)


def _not_awaitable(function: Any) -> str | None:
    """Return why the result of a synchronous function cannot be awaited, by its hints."""
    if getattr(function, "__name__", "") == "<lambda>" or not inspect.isroutine(function):
        return None
    try:
        hint = typing.get_type_hints(function).get("return", inspect.Parameter.empty)
    except (NameError, TypeError):  # unresolvable here
        return None
    if hint is inspect.Parameter.empty:
        return "is not async"
    kind = typing.get_origin(hint) or hint
    if not isinstance(kind, type) or kind is object or hasattr(kind, "__await__"):
        return None
    return f"is not async, it returns {type_name(hint)}"


def _inner(call: Any) -> Any:
    """Return the function behind partials, methods and objects with ``__call__``."""
    while isinstance(call, functools.partial):
        call = call.func
    if not isinstance(call, type) and not inspect.isroutine(call):
        call = type(call).__call__ if callable(call) else call
    return getattr(call, "__func__", call)


def _is_kind(call: Any, *kinds: Callable[[Any], bool], unwrap: bool = False) -> bool:
    return any(kind(call) or (unwrap and kind(inspect.unwrap(call))) for kind in kinds)


def _named(call: Any) -> str:
    """Return name and place of a callable, if it has them."""
    inner = call.func if isinstance(call, functools.partial) else call
    if not has_place(inner):
        return repr(call)
    with contextlib.suppress(TypeError, OSError):
        return f"{type_name(inner)} ({place_of(inner)})"
    return type_name(inner)
