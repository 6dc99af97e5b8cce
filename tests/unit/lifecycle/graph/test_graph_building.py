"""What gets built, from what, and what is refused."""

from dataclasses import dataclass
from typing import Generic, NewType, Protocol, TypeVar

import pytest

from lifecycle import (
    BuildError,
    Cell,
    Health,
    Hive,
    HiveError,
    Lifecycle,
    Logger,
    NotStartedError,
    Promise,
    Settings,
    Shutdown,
    Table,
    UsageError,
    config,
    group,
    invoke,
    module,
    provide,
    provide_private,
    replace,
    supply,
)

pytestmark = pytest.mark.anyio

T = TypeVar("T")
NodeName = NewType("NodeName", str)


class Clock(Protocol):
    def now(self) -> float: ...


class Wall:
    def now(self) -> float:
        return 1.0


class Frozen:
    def now(self) -> float:
        return 42.0


class Counter:
    made = 0

    def __init__(self) -> None:
        type(self).made += 1


@dataclass(frozen=True)
class Pair:
    counter: Counter
    clock: Clock


class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value


class Greeter:
    def __init__(self, name: NodeName, *, clock: Clock) -> None:
        self.text = f"{name} at {clock.now()}"
        self.spoken = ""

    def greet(self, box: Box[int]) -> None:
        self.spoken = f"{self.text}, {box.value}"


def clock() -> Clock:
    return Wall()


def box_of_int() -> Box[int]:
    return Box(7)


def box_of_str() -> Box[str]:
    return Box("seven")


greeting = group(
    supply(NodeName("node-1"), type=NodeName),
    provide(Greeter, clock, box_of_int, box_of_str),
    invoke(Greeter.greet),
)


async def test_constructors_are_wired_by_their_hints() -> None:
    async with Hive(greeting).started() as hive:
        greeter = hive.get(Greeter)
    assert greeter.spoken == "node-1 at 1.0, 7"


async def test_generics_protocols_and_new_types_are_keys_of_their_own() -> None:
    async with Hive(greeting, invoke(Box[str], NodeName)).started() as hive:
        assert hive.get(Box[str]).value == "seven"
        assert hive.get(Box[int]).value == 7
        assert hive.get(NodeName) == "node-1"
        assert isinstance(hive.get(Clock), Wall)


async def test_only_what_invoked_functions_need_is_built_and_only_once() -> None:
    Counter.made = 0
    seen: list[object] = []

    def first(pair: Pair, counter: Counter) -> None:
        seen.extend((pair.counter, counter))

    async with Hive(
        provide(Counter, Pair, clock, Greeter), supply(NodeName("n"), NodeName), invoke(first)
    ).started() as hive:
        with pytest.raises(NotStartedError, match=r"Greeter was not built.*invoke\(Greeter\)"):
            hive.get(Greeter)
    assert Counter.made == 1
    assert seen[0] is seen[1]


async def test_a_class_invoked_is_its_instance_in_the_graph() -> None:
    async with Hive(provide(Counter), invoke(Counter)).started() as hive:
        assert isinstance(hive.get(Counter), Counter)


async def test_an_inherited_method_is_invoked_on_the_class_the_graph_has() -> None:
    class Loud(Greeter):
        pass

    async with Hive(
        supply(NodeName("n"), NodeName), provide(Loud, clock, box_of_int), invoke(Greeter.greet)
    ).started() as hive:
        assert hive.get(Loud).spoken == "n at 1.0, 7"


async def test_defaults_stand_in_for_what_nothing_provides() -> None:
    class Patient:
        def __init__(self, clock: Clock | None, counter: Counter | None = None, tries: int = 3) -> None:
            self.all = (clock, counter, tries)

    async with Hive(provide(Patient), invoke(Patient)).started() as hive:
        assert hive.get(Patient).all == (None, None, 3)
    async with Hive(provide(Patient, clock), supply(5), invoke(Patient)).started() as hive:
        found = hive.get(Patient).all
    assert isinstance(found[0], Wall)
    assert found[1:] == (None, 5)


async def test_private_constructors_are_seen_in_their_module_and_below_only() -> None:
    seen: dict[str, int] = {}

    def left(box: Box[int]) -> None:
        seen["left"] = box.value

    def right(box: Box[int]) -> None:
        seen["right"] = box.value

    def eight() -> Box[int]:
        return Box(8)

    def side(name: str, make: object, use: object) -> Cell:
        return module(name, name, provide_private(make), module("below", "Below", invoke(use)))  # type: ignore[arg-type]

    async with Hive(side("left", box_of_int, left), side("right", eight, right)).started() as hive:
        with pytest.raises(HiveError, match="cannot choose"):
            hive.get(Box[int])
    assert seen == {"left": 7, "right": 8}


async def test_a_fake_takes_the_place_of_what_is_provided_and_of_what_that_needs() -> None:
    def expensive(missing: Table[int, int]) -> Clock:
        raise AssertionError("not to be called")

    cell = group(
        supply(NodeName("n"), NodeName), provide(Greeter, expensive, box_of_int), invoke(Greeter.greet)
    )
    async with Hive(cell, replace(Clock, Frozen())).started() as hive:
        assert hive.get(Greeter).spoken == "n at 42.0, 7"
        assert isinstance(hive.get(Clock), Frozen)


async def test_a_fake_stands_in_for_a_type_that_nothing_provides() -> None:
    cell = group(supply(NodeName("n"), NodeName), provide(Greeter, box_of_int), invoke(Greeter.greet))
    async with Hive(cell, replace(Clock, Frozen())).started() as hive:
        assert hive.get(Greeter).text == "n at 42.0"


async def test_settings_reach_constructors_by_their_type() -> None:
    class Limits(Settings, frozen=True):
        most: int = 3

    class User:
        def __init__(self, limits: Limits) -> None:
            self.most = limits.most

    cell = module("user", "User", config(Limits), provide(User), invoke(User))
    async with Hive(cell, settings={"most": 5}).started() as hive:
        assert hive.get(User).most == 5


async def test_what_the_hive_injects_is_bound_to_who_asks() -> None:
    found: dict[str, object] = {}

    class Asker:
        def __init__(self, log: Logger, health: Health, lifecycle: Lifecycle, shutdown: Shutdown) -> None:
            found.update(log=log, lifecycle=lifecycle, shutdown=shutdown)
            health.ok("fine")

    async with Hive(module("a", "A", module("b", "B", provide(Asker), invoke(Asker)))).started() as hive:
        assert [(one.module, one.message) for one in hive.health.snapshot()] == [("a.b", "fine")]
        assert found["shutdown"] is hive.get(Shutdown)


def _none() -> Counter:
    return None  # type: ignore[return-value]  # the mistake under test


async def _later() -> Counter:
    return Counter()


def _awaitable() -> Counter:
    return _later()  # type: ignore[return-value]  # the mistake under test


def _user_error() -> Counter:
    raise UsageError("no privileges: run as root")


def _bug() -> Counter:
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("constructor", "message"),
    [
        (_none, r"_none \(hive\) at .*test_graph_building.py:\d+ returned None instead of Counter"),
        (_awaitable, r"_awaitable .* returned something to await: do the work in a hook"),
        (_user_error, r"_user_error .* raised UsageError: no privileges: run as root"),
        (_bug, r"_bug .* raised KeyError: 'oops'"),
    ],
)
async def test_a_constructor_that_misbehaves_is_named(constructor: object, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        await Hive(provide(constructor), invoke(Counter)).start()  # type: ignore[arg-type]


async def test_get_without_a_provider_names_the_reason() -> None:
    hive = Hive(provide(Counter), invoke(Counter))
    with pytest.raises(NotStartedError, match="Counter does not exist yet: hive has not started"):
        hive.get(Counter)
    with pytest.raises(HiveError, match="nothing in hive provides Wall"):
        hive.get(Wall)


async def test_a_promise_may_be_provided() -> None:
    """A container that takes awaitables for its own business would wrap it."""

    def promise() -> Promise[int]:
        return Promise()

    async with Hive(provide(promise), invoke(Promise[int])).started() as hive:
        hive.get(Promise[int]).resolve(1)
        assert await hive.get(Promise[int]).wait() == 1


def test_a_chain_of_thousands_builds_without_recursion() -> None:
    links = [type(f"Link{number}", (), {}) for number in range(1500)]

    def constructor(number: int) -> object:
        def make(before: object) -> object:
            return links[number]()

        make.__annotations__ = {"return": links[number]} | ({"before": links[number - 1]} if number else {})
        if number:
            return make

        def first() -> object:
            return links[0]()

        first.__annotations__ = {"return": links[0]}
        return first

    hive = Hive(*(provide(constructor(number)) for number in range(1500)), invoke(links[-1]))  # type: ignore[arg-type]
    graph = hive.graph()
    assert len(graph.edges) == 1500


async def test_the_provider_of_a_type_is_the_one_that_builds_it() -> None:
    hive = Hive(
        provide(Wall), module("a", "A", provide_private(Counter)), module("b", "B", provide_private(Counter))
    )
    with pytest.raises(HiveError, match=r"provider\(\) cannot choose; say of which module"):
        hive.provider(Counter)
    with pytest.raises(HiveError, match="nothing in hive provides int"):
        hive.provider(int)
    hive = Hive(provide(Wall), invoke(Wall))
    hive.build()
    assert hive.provider(Wall)() is hive.get(Wall)
