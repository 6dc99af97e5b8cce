"""Hives with something wrong, each for one golden file: a small daemon, and the mistakes people make in it.

A function here is a case; its name is that of its file in golden/, its docstring the mistake. The messages
hold lines of this file: after an edit, write the golden files again (see test_golden_messages.py).
"""

from collections.abc import Callable
from typing import Annotated, Generic, NewType, Protocol, TypeVar

import msgspec

from lifecycle import (
    Health,
    Hive,
    Logger,
    Member,
    Named,
    Settings,
    Table,
    after,
    config,
    decorate,
    group,
    invoke,
    module,
    provide,
    provide_private,
    replace,
    supply,
)

T = TypeVar("T")
Case = Callable[[], Hive]
CASES: dict[str, Case] = {}
NodeName = NewType("NodeName", str)


def case(make: Case) -> Case:
    CASES[make.__name__] = make
    return make


class Device(msgspec.Struct, frozen=True): ...


class Link(msgspec.Struct, frozen=True): ...


class Route(msgspec.Struct, frozen=True): ...


class Kernel(Protocol):
    async def dump(self) -> list[str]: ...
    async def put(self, name: str, *, mode: int) -> None: ...


class Netlink:
    async def dump(self) -> list[str]:
        return []

    async def put(self, name: str, *, mode: int) -> None: ...


class Store: ...


class FileStore(Store): ...


class Ipam:
    def __init__(self, devices: Table[int, Device]) -> None: ...


class Server:
    def __init__(self, ipam: Ipam, kernel: Kernel) -> None: ...

    def serve(self) -> None: ...


class Idle:
    def __init__(self, devices: Table[int, Device]) -> None: ...


class Box(Generic[T]):
    def __init__(self, value: T) -> None: ...


def links() -> Table[int, Link]:
    return Table("links", key=id)


def http_port() -> Annotated[int, Named("http")]:
    return 80


def status_route() -> Member[Route]:
    return Route()


# --- missing --------------------------------------------------------------------------------------------


@case
def missing_with_chain() -> Hive:
    """Two constructors need what is not there; something invoked needs one of them, in the end."""
    return Hive(
        module("ipam", "Addresses", provide(Ipam, Idle)),
        module("server", "Server", provide(Server), invoke(Server.serve)),
        module("netlink", "Netlink", provide(Netlink, links)),
    )


class Uses:
    """Asks for what is nearly there, each in another way."""

    def __init__(
        self,
        store: Store,
        specific: "SqlStore",
        devices: Table[int, Device],
        kernel: Kernel,
        name: "Nodename",
        port: int,
        https: Annotated[int, Named("https")],
        routes: list[Route],
        route: Route,
    ) -> None: ...


class Nodename: ...


class SqlStore(FileStore): ...


@case
def missing_with_candidates() -> Hive:
    """The name elsewhere, a subtype, a base, another argument, the methods, a like name, another mark."""

    def other() -> type:
        class Store: ...

        return Store

    return Hive(
        provide(Uses, other(), FileStore, Netlink, links, http_port, status_route),
        supply(NodeName("n"), NodeName),
    )


@case
def missing_for_many() -> Hive:
    """Only the first few who need it are listed."""

    def user(number: int) -> type:
        def init(self: object, store: Store) -> None: ...

        return type(f"User{number}", (), {"__init__": init})

    return Hive(provide(*(user(number) for number in range(8))))


@case
def missing_with_many_candidates() -> Hive:
    """The nearest few are enough; what is private is not for the taking."""
    derived = [type(f"Store{number}", (Store,), {}) for number in range(8)]
    hidden = module("hidden", "Hidden", provide_private(derived[0]))
    return Hive(hidden, provide(*derived[1:]), invoke(Store))


# --- private, optional ----------------------------------------------------------------------------------


def opened(store: Store) -> Ipam:
    raise AssertionError


@case
def private_access() -> Hive:
    """What another module keeps to itself is not missing: it is private."""
    return Hive(
        module("store", "Keeps things", provide_private(Store)),
        module("ipam", "Addresses", provide(opened), invoke(Ipam)),
    )


class Patient:
    def __init__(self, ipam: Ipam | None, kernel: Kernel | None, tries: int = 3) -> None: ...


@case
def optional_hides_nothing() -> Hive:
    """Kernel is absent, which is fine; Ipam is there but cannot be built, which None must not hide."""

    def ipam(devices: Table[int, Device], store: Store) -> Ipam:
        raise AssertionError

    return Hive(provide(Patient, ipam, Store), invoke(Patient))


# --- cycles ---------------------------------------------------------------------------------------------


class A:
    def __init__(self, b: "B") -> None: ...


class B:
    def __init__(self, c: "C") -> None: ...


class C:
    def __init__(self, a: A, b: B) -> None: ...


class Selfish:
    def __init__(self, me: "Selfish") -> None: ...


class Entrance:
    def __init__(self, a: A) -> None: ...


@case
def cycles_that_share() -> Hive:
    """Mending one of two cycles that share constructors leaves the other: both are reported."""
    return Hive(module("knot", "Knot", provide(Entrance, A, B, C, Selfish)))


class Router:
    def __init__(self, routes: list[Member[Route]]) -> None: ...


def own_route(router: Router) -> Member[Route]:
    return Route()


def pair(link: Link) -> tuple[Device, Store]:
    return Device(), Store()


def link_of(device: Device) -> Link:
    return Link()


class Audit:
    def __init__(self, ipam: Ipam) -> None: ...


def audited(ipam: Ipam, audit: Audit) -> Ipam:
    raise AssertionError


@case
def cycles_through_groups_parts_and_decorators() -> Hive:
    """Whatever an arrow goes through, a line names the function and what it asks for."""
    return Hive(
        provide(Router, own_route),
        provide(pair, link_of),
        provide(Ipam),
        supply(Table("devices", key=id), Table[int, Device]),
        decorate(audited, provide(Audit)),
    )


@after(Table[int, Device])
class Cache: ...


def devices_of_cache(cache: Cache) -> Table[int, Device]:
    del cache
    return Table("devices", key=id)


@case
def cycle_of_order() -> Hive:
    """One arrow of it is only about the order."""
    return Hive(provide(Cache, devices_of_cache))


# --- duplicates -----------------------------------------------------------------------------------------


def device() -> Device:
    return Device()


class Sizes(Settings, frozen=True):
    """Settings."""

    mtu: int = 0
    """Bytes of the largest packet."""


class OtherSizes(Settings, frozen=True):
    """Settings."""

    mtu: int = 1


def health() -> Health:
    raise AssertionError


def cached(store: Store) -> Store:
    return store


def logged(store: Store) -> Store:
    return store


shared = group(provide(links))


@case
def duplicates_of_one_function() -> Hive:
    """The places of the cells distinguish them; a cell that is there twice is one too many."""
    return Hive(
        module("one", "One", provide(device)),
        module("two", "Two", provide(device)),
        module("three", "Three", shared),
        module("four", "Four", shared),
    )


@case
def duplicates() -> Hive:
    """Both places, whatever they are: constructors, values, settings, decorators, modules, fakes."""
    return Hive(
        module("one", "One", provide(Device), config(Sizes)),
        module("two", "Two", provide_private(device), config(OtherSizes)),
        module("two", "Two again", provide(http_port), supply(8080, Annotated[int, Named("http")])),
        provide(Store, health, pair, link_of),
        decorate(cached),
        decorate(logged),
        group(invoke(Link), replace(Link, Link()), replace(Link, Link())),
    )


# --- decorators and fakes -------------------------------------------------------------------------------


class CachingStore(Store):
    def __init__(self, store: Store) -> None: ...


def with_context(log: Logger) -> Logger:
    return log


def counted(links: Table[int, Link]) -> Table[int, Link]:
    return links


@case
def decorators_of_nothing() -> Hive:
    """Under the wrong type, of what the hive gives, of what is not there."""
    return Hive(
        provide(Store),
        decorate(CachingStore, invoke(Store)),
        decorate(with_context),
        decorate(counted),
    )


class HalfNetlink:
    def dump(self) -> list[str]:
        return []

    async def put(self, name: str) -> None: ...


@case
def fakes_unlike_their_type() -> Hive:
    """A fake is checked against what it stands in for; one for nothing is a typing mistake."""
    return Hive(
        supply(Ipam(Table("devices", key=id)), Ipam),
        provide(Server, links, device),
        invoke(Server, Device),
        replace(Kernel, HalfNetlink()),
        replace(Device, 3),
        replace(Table[int, Device], Table("devices", key=id)),
        replace(Health, 1),
        replace(list[Member[Route]], [Route(), 3]),
        invoke(list[Member[Route]]),
    )


# --- together -------------------------------------------------------------------------------------------


def nothing() -> None: ...


@case
def everything_at_once() -> Hive:
    """Faults do not hide each other, nor do they wait for someone to invoke what has them."""
    return Hive(
        module("Bad_Id", "Bad"),
        module("ipam", "Addresses", provide(Ipam, Patient), config(Sizes)),
        module("store", "Keeps", provide_private(Store), provide(links, links)),
        module("knot", "Knot", provide(A, B, C)),
        provide(nothing),
        decorate(cached, invoke(Store)),
        replace(Kernel, HalfNetlink()),
        settings={"mtu": "wide", "mtv": 5},
    )
