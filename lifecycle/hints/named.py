"""Marks on hints: one type twice, one of many, several results.

    def http_port(settings: WebSettings) -> Annotated[int, Named("http")]: ...     # one of two ints
    def status_route(health: HealthTree) -> Member[Route]: ...                     # one of many routes
    def server(port: Annotated[int, Named("http")], routes: list[Member[Route]]) -> Server: ...

To a type checker the marks are not there: an int is an int, a route a route.
"""

import dataclasses
import typing
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

__all__ = ["MEMBER", "Mark", "Member", "Named", "fields_of", "is_results", "results"]

T = TypeVar("T")


class Named(msgspec.Struct, frozen=True):
    """Distinguishes values of one type: ``Annotated[int, Named("http")]`` is another key than ``int``."""

    name: str


class _Membership(msgspec.Struct, frozen=True):
    """One of many values; a list parameter receives them all."""


Mark = Named | _Membership
MEMBER: Final = _Membership()

Member: TypeAlias = Annotated[T, MEMBER]
"""As the result of a constructor, one of many values. ``list[Member[T]]`` or ``tuple[Member[T], ...]``
receives all of them in the order of the cells; empty if there are none.
"""

_RESULTS = "__lifecycle_results__"


def results(kind: type[T]) -> type[T]:
    """Marks a dataclass as several results: a constructor that returns it provides the type of each field.

    Raises TypeError if it is not a dataclass.
    """
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"@results goes above @dataclass: {kind.__qualname__} is not a dataclass")
    setattr(kind, _RESULTS, True)
    return kind


def is_results(kind: object) -> bool:
    """Whether a class itself (not only its base) is marked with @results."""
    return isinstance(kind, type) and _RESULTS in vars(kind)


def fields_of(kind: Any) -> dict[str, Any]:
    """Return the hints of the fields of a class that is marked with @results.

    Raises NameError as get_type_hints() does.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
