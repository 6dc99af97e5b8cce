"""Fakes with only the members that a test needs."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, overload

from lifecycle.hints.keys import origin_class, type_name
from lifecycle.injection.fakes import fake_mismatches, members

__all__ = ["fake"]

T = TypeVar("T")


@overload
def fake(kind: type[T], /, **attributes: object) -> T: ...
@overload
def fake(
    kind: Callable[..., T], /, **attributes: object
) -> T: ...  # for Protocols, as type checkers see them
def fake(kind: object, /, **attributes: object) -> object:
    """Return a fake of a type with these methods and attributes: ``fake(Clock, now=lambda: 7.0)``.

    Pass it to replace(). A function implements a method, also an asynchronous one. Other methods raise
    AssertionError when they are called, other attributes are None. Raises TypeError if the type has no member
    of a name, or the member has other parameters.
    """
    cls, name = origin_class(kind), type_name(kind)
    if cls is None:
        raise TypeError(f"{name} is not a class: there is nothing a fake of it could do")
    promised = members(cls)
    if unknown := [member for member in attributes if member not in promised]:
        raise TypeError(f"{name} has no {' and no '.join(unknown)}")
    made = type(f"Fake{name}", (), {"__module__": __name__})()
    for member, original in promised.items():
        function = getattr(original, "__func__", original)
        if member in attributes:
            value = attributes[member]
            setattr(made, member, _as_async(value) if _needs_async(function, value) else value)
        elif inspect.isfunction(function):
            setattr(made, member, _refusing(f"{name}.{member}", function))
        else:
            setattr(made, member, None)
    if faults := list(fake_mismatches(made, kind)):
        raise TypeError(f"the fake is not like {name}: {'; '.join(faults)}")
    return made


def _needs_async(original: object, replacement: object) -> bool:
    return (
        inspect.iscoroutinefunction(original)
        and inspect.isroutine(replacement)
        and not inspect.iscoroutinefunction(replacement)
    )


def _as_async(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError(f"{name} was called, which this fake was not given")

    async def refuse_later(*_: Any, **__: Any) -> NoReturn:
        refuse()

    return refuse_later if inspect.iscoroutinefunction(original) else refuse
