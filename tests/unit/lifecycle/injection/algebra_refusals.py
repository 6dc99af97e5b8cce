"""Constructors that cannot be used, and some that prove unusable only when they are called.

As algebra_cells.py: a function is a case, with a file of its name in golden/.
"""

import abc
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from lifecycle import Hive, Member, decorate, invoke, module, provide, results, supply
from tests.unit.lifecycle.injection.algebra_cells import CASES, Box, Device, Kernel, Link, Route, case

if TYPE_CHECKING:
    from decimal import Decimal

__all__ = ["CASES"]

T = TypeVar("T")


# --- constructors that cannot be used -------------------------------------------------------------------


def no_result():  # type: ignore[no-untyped-def]  # the mistake
    return Device()


def nothing() -> None: ...


async def asynchronous() -> Device:
    return Device()


def awaitable() -> Awaitable[Device]:
    raise AssertionError


def generator() -> Iterator[Device]:
    yield Device()


async def async_generator() -> AsyncIterator[Device]:
    yield Device()


def stars(*devices: Device, **named: Device) -> Link:
    return Link()


def unhinted(device) -> Link:  # type: ignore[no-untyped-def]  # the mistake
    return Link()


def unknown_name(price: "Decimal") -> Link:
    return Link()


def union(either: Device | Link) -> Device | Link:
    return either


def open_type(value: T) -> Box[T]:
    return Box(value)


def one_member(route: Member[Route]) -> list[Member[Route]]:
    return [route]


def no_parts() -> tuple[()]:
    return ()


def odd_parts() -> tuple[Device, None, Device | Link]:
    raise AssertionError


@results
@dataclass
class Results:
    """A class of results, which is for returning."""

    device: Device


class Abstract(abc.ABC):
    @abc.abstractmethod
    def work(self) -> None: ...


class Task:
    def __await__(self) -> Iterator[None]:
        yield


def decorated_member(route: Member[Route]) -> Member[Route]:
    return route


@case
def constructors_that_cannot_be_used() -> Hive:
    """Every one is refused before anything is called."""
    return Hive(
        provide(no_result, nothing, asynchronous, awaitable, generator, async_generator),
        provide(stars, unhinted, unknown_name, union, open_type, Box, one_member),
        provide(no_parts, odd_parts, Results, Abstract, Kernel, Task),
        provide(3),  # type: ignore[arg-type]  # the mistake
        supply(None),
        supply(3, Device | Link),
        supply([Route()], list[Member[Route]]),
        invoke(asynchronous, stars),
        decorate(decorated_member, invoke(list[Member[Route]])),
    )


# --- while building -------------------------------------------------------------------------------------


def returns_none() -> Device:
    return None  # type: ignore[return-value]  # the mistake


@case
def built_none() -> Hive:
    """Hints do not show it."""
    return Hive(module("devices", "Devices", provide(returns_none), invoke(Device)))


async def later() -> Device:
    return Device()


def returns_awaitable() -> Device:
    return later()  # type: ignore[return-value]  # the mistake


@case
def built_something_to_await() -> Hive:
    """Hints do not show it."""
    return Hive(module("devices", "Devices", provide(returns_awaitable), invoke(Device)))


def returns_three() -> tuple[Device, Link]:
    return (Device(), Link(), Link())  # type: ignore[return-value]  # the mistake


@case
def built_other_results() -> Hive:
    """Three where two were promised."""
    return Hive(provide(returns_three), invoke(Device))


def returns_half() -> tuple[Device, Link]:
    return (Device(), None)  # type: ignore[return-value]  # the mistake


@case
def built_half_the_results() -> Hive:
    """One of them is None."""
    return Hive(provide(returns_half), invoke(Link))
