"""One type twice, one of many, generic: what a hint can ask for and give."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Generic, List, NamedTuple, Protocol, Self, Tuple, TypeVar  # noqa: UP035  # both spellings

import msgspec
import pytest

from lifecycle import (
    GraphError,
    Hive,
    Hook,
    Lifecycle,
    Member,
    Named,
    NotStartedError,
    Settings,
    config,
    invoke,
    module,
    provide,
    provide_private,
    replace,
    supply,
)
from lifecycle.injection.signatures import _arguments

pytestmark = pytest.mark.anyio

T = TypeVar("T")
K = TypeVar("K")
Value_co = TypeVar("Value_co", covariant=True)
HTTP = Annotated[int, Named("http")]
HTTPS = Annotated[int, Named("https")]


class Route:
    def __init__(self, path: str) -> None:
        self.path = path


class Clock: ...


class Store: ...


class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value


class Ports(Settings, frozen=True):
    """Settings."""

    https_port: int = 443


def http() -> HTTP:
    return 80


def https(ports: Ports) -> HTTPS:
    return ports.https_port


def status() -> Member[Route]:
    return Route("/status")


def metrics(store: Store) -> Member[Route]:
    return Route("/metrics")


class Web:
    def __init__(self, routes: list[Member[Route]]) -> None:
        self.paths = [route.path for route in routes]


# --- names ----------------------------------------------------------------------------------------------


async def test_two_instances_of_a_type_are_distinguished_by_name() -> None:
    class Listener:
        def __init__(self, http: HTTP, https: HTTPS, plain: int) -> None:
            self.ports = (http, https, plain)

    cells = (config(Ports), provide(http, https, Listener), supply(7), invoke(Listener))
    async with Hive(*cells, settings={"https-port": 8443}).started() as hive:
        assert hive.get(Listener).ports == (80, 8443, 7)
        assert hive.get(HTTPS) == 8443


async def test_a_value_may_be_supplied_and_replaced_by_name() -> None:
    async with Hive(
        supply(1, HTTP), supply(2, HTTPS), invoke(HTTP, HTTPS), replace(HTTP, 3)
    ).started() as hive:
        assert (hive.get(HTTP), hive.get(HTTPS)) == (3, 2)


async def test_annotations_without_a_name_change_nothing() -> None:
    def doubled(value: Annotated[int, "seconds"]) -> Annotated[float, "a doc"]:
        return value * 2.0

    async with Hive(supply(4), provide(doubled), invoke(float)).started() as hive:
        assert hive.get(float) == 8.0


async def test_one_type_may_be_spelt_in_two_ways() -> None:
    def names() -> List[str]:  # noqa: UP006  # the other spelling
        return ["a"]

    def pairs() -> Sequence[Tuple[int, ...]]:  # noqa: UP006
        return [(1,)]

    class User:
        def __init__(self, names: list[str], pairs: Sequence[tuple[int, ...]]) -> None:
            self.all = names, pairs

    async with Hive(provide(names, pairs, User), invoke(User)).started() as hive:
        assert hive.get(User).all == (["a"], [(1,)])


# --- members --------------------------------------------------------------------------------------------


async def test_a_list_of_members_holds_what_everyone_contributes_in_the_order_of_the_cells() -> None:
    late = module("late", "Late", supply(Route("/late"), Member[Route]))
    web = module("web", "Web", provide(Web), invoke(Web))
    async with Hive(provide(status), web, provide(metrics, Store), late).started() as hive:
        assert hive.get(Web).paths == ["/status", "/metrics", "/late"]
        assert [route.path for route in hive.get(list[Member[Route]])] == ["/status", "/metrics", "/late"]


async def test_members_are_the_same_objects_for_all_who_ask_in_a_list_of_their_own() -> None:
    seen: list[object] = []

    def one(routes: list[Member[Route]]) -> None:
        seen.append(routes[0])
        routes.clear()

    def two(routes: tuple[Member[Route], ...]) -> None:
        seen.extend(routes)

    def three(routes: Sequence[Member[Route]]) -> None:
        seen.extend(routes)

    async with Hive(provide(status), invoke(one, two, three)).started():
        assert len(seen) == 3
        assert seen[0] is seen[1] is seen[2]


async def test_a_group_without_members_is_empty_or_the_default() -> None:
    def default(routes: tuple[Member[Route], ...] = (Route("/none"),)) -> Store:
        return seen.extend(routes) or Store()  # type: ignore[func-returns-value]

    seen: list[Route] = []
    async with Hive(provide(Web, default), invoke(Web, Store, list[Member[Route]])).started() as hive:
        assert hive.get(Web).paths == []
        assert [route.path for route in seen] == ["/none"]
        assert hive.get(list[Member[Route]]) == []


async def test_groups_may_have_names() -> None:
    Admin = Member[Annotated[Route, Named("admin")]]  # noqa: N806  # a type

    def debug() -> Member[Annotated[Route, Named("admin")]]:
        return Route("/debug")

    class AdminWeb:
        def __init__(self, routes: list[Member[Annotated[Route, Named("admin")]]]) -> None:
            self.paths = [route.path for route in routes]

    cells = (provide(status, debug, AdminWeb, Web), supply(Route("/x"), Admin), invoke(AdminWeb, Web))
    async with Hive(*cells).started() as hive:
        assert hive.get(AdminWeb).paths == ["/debug", "/x"]
        assert hive.get(Web).paths == ["/status"]


async def test_private_members_are_for_their_module_and_below() -> None:
    inner = module("inner", "Inner", provide_private(status), provide(Web), invoke(Web))

    def outside(routes: list[Member[Route]]) -> Store:
        assert routes == []
        return Store()

    async with Hive(inner, provide(outside), invoke(Store)).started() as hive:
        assert hive.get(Web).paths == ["/status"]


async def test_members_and_whole_groups_may_be_replaced() -> None:
    cells = (provide(status, metrics, Store, Web), invoke(Web))
    async with Hive(*cells, replace(Member[Route], Route("/fake"))).started() as hive:
        assert hive.get(Web).paths == ["/fake"]
    async with Hive(*cells, replace(list[Member[Route]], [])).started() as hive:
        assert hive.get(Web).paths == []
        with pytest.raises(NotStartedError, match="Store was not built"):
            hive.get(Store)


async def test_hooks_of_members_start_before_those_of_who_asks_for_them() -> None:
    order: list[str] = []

    async def note(what: str) -> None:
        order.append(what)

    def slow(lifecycle: Lifecycle) -> Member[Route]:
        lifecycle.append(Hook("slow", start=lambda: note("member")))
        return Route("/slow")

    def serve(routes: list[Member[Route]], lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("serve", start=lambda: note("web")))

    async with Hive(provide(slow), invoke(serve)).started():
        assert order == ["member", "web"]


# --- generics, classes of all kinds ---------------------------------------------------------------------


class IntBox(Box[int]):
    """Inherits a constructor with an int as its T."""


class Keyed(Box[T], Generic[K, T]):
    def __init__(self, key: K, value: T) -> None:
        super().__init__(value)
        self.key = key


class Both(Keyed[str, int]): ...


async def test_a_generic_class_is_built_for_the_type_it_is_provided_with() -> None:
    cells = provide(Box[int], Box[str], IntBox, Keyed[str, int], Both)
    wanted = invoke(Box[int], Box[str], IntBox, Keyed[str, int], Both)
    async with Hive(cells, supply(7), supply("seven"), wanted).started() as hive:
        assert (hive.get(Box[int]).value, hive.get(Box[str]).value, hive.get(IntBox).value) == (7, "seven", 7)
        assert (hive.get(Keyed[str, int]).key, hive.get(Both).value) == ("seven", 7)


class Struct(msgspec.Struct):
    clock: Clock
    tries: int = 3


class Single:
    def __new__(cls, clock: Clock) -> "Single":
        self = super().__new__(cls)
        self.clock = clock
        return self

    clock: Clock


class Meta(type):
    def __call__(cls, *args: object, **kwargs: object) -> object:
        return super().__call__(*args, **kwargs)


class Odd(metaclass=Meta):
    def __init__(self, clock: Clock, /, *, tries: "int" = 4) -> None:
        self.clock, self.tries = clock, tries


class Tupled(NamedTuple):
    clock: Clock
    tries: int = 5


class Speaks(Protocol[Value_co]):
    def speak(self) -> Value_co: ...


class Dog(Speaks[str]):
    """Has no constructor but the one that typing gives to what derives from a Protocol."""

    def speak(self) -> str:
        return "woof"


class Bare(Generic[T]): ...


async def test_classes_without_a_constructor_need_nothing() -> None:
    def speaks(dog: Dog) -> Speaks[str]:
        return dog

    async with Hive(provide(Dog, speaks, Bare[int]), invoke(Speaks[str], Bare[int])).started() as hive:
        assert hive.get(Speaks[str]).speak() == "woof"
        assert isinstance(hive.get(Bare[int]), Bare)


async def test_constructors_are_read_however_a_class_is_made() -> None:
    kinds = (Struct, Single, Tupled)
    async with Hive(provide(Clock, *kinds), invoke(*kinds)).started() as hive:
        clock = hive.get(Clock)
        assert hive.get(Struct) == Struct(clock, 3)
        assert hive.get(Single).clock is clock
        assert hive.get(Tupled) == Tupled(clock, 5)


class Made(Box[str]):
    @classmethod
    def of(cls, clock: Clock) -> Self:
        return cls(type(clock).__name__)


async def test_a_classmethod_provides_its_class() -> None:
    async with Hive(provide(Made.of, Clock), invoke(Made)).started() as hive:
        assert hive.get(Made).value == "Clock"


def _plain(a: int, b: "str" = "b", /, c: float = 1.0, *, d: int, e: int = 5) -> int:
    return 0


def _starred(a: int, *args: int, b: int = 2, **kwargs: int) -> int:
    return 0


@functools.wraps(_plain)
def _wrapped(*args: object, **kwargs: object) -> int:
    return 0


@pytest.mark.parametrize(
    "call",
    [_plain, _starred, _wrapped, Clock, Keyed, Struct, Single, Tupled, Made.of, Odd, Route, int.bit_count],
)
def test_parameters_are_read_as_inspect_reads_them(call: Callable[..., object]) -> None:
    kind = call if isinstance(call, type) else None
    read = [(found.name, found.default, found.positional, found.stars) for found in _arguments(call, kind)]
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    assert read == [
        (each.name, each.default, each.kind is each.POSITIONAL_ONLY, stars.get(each.kind.name, ""))
        for each in inspect.signature(call).parameters.values()
    ]


async def test_a_metaclass_that_hides_its_parameters_is_refused() -> None:
    with pytest.raises(GraphError, match=r"\*args cannot be filled"):
        Hive(provide(Odd, Clock)).check()


async def test_positional_parameters_are_filled() -> None:
    def odd(clock: Clock, route: Route = Route("/"), /, *, tries: "int" = 4) -> Box[str]:  # noqa: B008
        return Box(f"{type(clock).__name__} {route.path} {tries}")

    async with Hive(provide(odd, Clock), supply(6), invoke(Box[str])).started() as hive:
        assert hive.get(Box[str]).value == "Clock / 6"
