"""Several results, optional dependencies, and how all this shows in the graph."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

import pytest

from lifecycle import (
    BuildError,
    Cell,
    GraphError,
    Hive,
    HiveError,
    Member,
    Named,
    NotStartedError,
    invoke,
    module,
    provide,
    provide_private,
    replace,
    results,
    supply,
)

pytestmark = pytest.mark.anyio

HTTP = Annotated[int, Named("http")]
HTTPS = Annotated[int, Named("https")]


class Route:
    def __init__(self, path: str) -> None:
        self.path = path


class Clock: ...


class Store: ...


def http() -> HTTP:
    return 80


def status() -> Member[Route]:
    return Route("/status")


def metrics(store: Store) -> Member[Route]:
    return Route("/metrics")


class Web:
    def __init__(self, routes: list[Member[Route]]) -> None:
        self.paths = [route.path for route in routes]


# --- several results ------------------------------------------------------------------------------------


@results
@dataclass(frozen=True)
class Opened:
    store: Store
    status: Member[Route]
    port: HTTP


async def test_a_tuple_provides_each_of_its_types_from_one_call() -> None:
    calls: list[int] = []

    def both() -> tuple[Clock, Store]:
        calls.append(1)
        return Clock(), Store()

    async with Hive(provide(both), invoke(Clock, Store)).started() as hive:
        assert isinstance(hive.get(Clock), Clock)
        assert isinstance(hive.get(Store), Store)
        assert calls == [1]


async def test_only_the_results_that_are_needed_count_as_built() -> None:
    def both() -> tuple[Clock, Store]:
        return Clock(), Store()

    async with Hive(provide(both), invoke(Clock)).started() as hive:
        with pytest.raises(NotStartedError, match=r"Store was not built.*invoke\(Store\)"):
            hive.get(Store)


async def test_a_dataclass_of_results_may_hold_names_and_members() -> None:
    def opened() -> Opened:
        return Opened(Store(), Route("/status"), 80)

    async with Hive(provide(opened, Web), invoke(Web, Store, HTTP)).started() as hive:
        assert hive.get(Web).paths == ["/status"]
        assert hive.get(HTTP) == 80
        assert isinstance(hive.get(Store), Store)
        with pytest.raises(HiveError, match="nothing in hive provides Opened"):
            hive.get(Opened)


async def test_a_constructor_with_only_replaced_results_is_not_called() -> None:
    def both(missing: str) -> tuple[Clock, Store]:
        raise AssertionError("not to be called")

    fakes = (replace(Clock, Clock()), replace(Store, Store()))
    async with Hive(provide(both), invoke(Clock, Store), *fakes).started():
        pass
    with pytest.raises(GraphError, match="nothing provides str"):
        Hive(provide(both), invoke(Clock, Store), fakes[0]).check()


async def test_a_tuple_of_any_length_and_a_named_one_are_single_results() -> None:
    class Pair(NamedTuple):
        left: int
        right: int

    def pair(numbers: tuple[int, ...]) -> Pair:
        return Pair(*numbers)

    def numbers() -> tuple[int, ...]:
        return (1, 2)

    async with Hive(provide(pair, numbers), invoke(Pair)).started() as hive:
        assert hive.get(Pair) == (1, 2)


def test_only_a_dataclass_can_be_marked_as_results() -> None:
    with pytest.raises(TypeError, match="@results goes above @dataclass: Clock is not a dataclass"):
        results(Clock)


# --- optional, defaults ---------------------------------------------------------------------------------


async def test_what_is_optional_is_none_only_when_nothing_provides_it() -> None:
    class Patient:
        def __init__(
            self, port: HTTP | None, https: Annotated[int | None, Named("https")], n: int = 3
        ) -> None:
            self.all = port, https, n

    async with Hive(provide(Patient), invoke(Patient)).started() as hive:
        assert hive.get(Patient).all == (None, None, 3)
    async with Hive(provide(Patient, http), supply(9, HTTPS), supply(5), invoke(Patient)).started() as hive:
        assert hive.get(Patient).all == (80, 9, 5)


async def test_what_is_private_elsewhere_is_not_there_for_an_optional() -> None:
    def user(clock: Clock | None) -> Store:
        assert clock is None
        return Store()

    hidden = module("hidden", "Hidden", provide_private(Clock), invoke(Clock))
    async with Hive(hidden, provide(user), invoke(Store)).started() as hive:
        assert isinstance(hive.get(Store), Store)


async def test_one_result_instead_of_two_raises_build_error() -> None:
    def one() -> tuple[Clock, Store]:
        return Clock()  # type: ignore[return-value]  # the mistake

    with pytest.raises(BuildError, match="returned one Clock instead of Clock and Store"):
        await Hive(provide(one), invoke(Store)).start()


# --- the graph ------------------------------------------------------------------------------------------


def test_the_graph_shows_names_members_and_results() -> None:
    def both() -> tuple[Clock, Store]:
        return Clock(), Store()

    graph = Hive(provide(both, status, metrics, http, Web), invoke(Web, HTTP)).graph()
    assert graph.tree() == (
        "hive\n"
        "  · provide Clock and Store from both\n"
        "  · provide Member[Route] from status\n"
        "  · provide Member[Route] from metrics <- Store\n"
        "  · provide int named 'http' from http\n"
        "  · provide Web <- 2 x Member[Route]\n"
        "  · invoke  Web <- Web\n"
        "  · invoke  int named 'http' <- int named 'http'\n"
    )
    kinds = {node.name: (node.kind, node.provides, node.built) for node in graph.constructors}
    assert kinds["both"] == ("provide", "Clock and Store", True)
    assert kinds["both[0]"] == ("part", "Clock", False)
    assert kinds["both[1]"] == ("part", "Store", True)
    edges = [(edge.source, edge.target, edge.parameter) for edge in graph.edges]
    assert edges[:5] == [
        ("hive/both[0]", "hive/both", "result"),
        ("hive/both[1]", "hive/both", "result"),
        ("hive/metrics", "hive/both[1]", "store"),
        ("hive/Web", "hive/status", "routes"),
        ("hive/Web", "hive/metrics", "routes"),
    ]


# --- one result under several types ---------------------------------------------------------------------


class Reads(Protocol):
    def read(self) -> str: ...


class Writes(Protocol):
    def write(self, text: str) -> None: ...


class File:
    def read(self) -> str:
        return "text"

    def write(self, text: str) -> None: ...


async def test_one_implementation_is_given_under_each_type() -> None:
    def both(reads: Reads, writes: Writes, file: File, many: list[Member[Reads]]) -> None:
        assert {id(each) for each in (reads, writes, many[0])} == {id(file)}

    hive = Hive(module("files", "Files", provide(File, as_=(Reads, Writes, Member[Reads])), invoke(both)))
    async with hive.started():
        assert hive.get(Reads) is hive.get(File)


async def test_what_replaces_the_implementation_is_given_under_each_type() -> None:
    fake = File()
    hive = Hive(provide(File, as_=(Reads,)), invoke(Reads), replace(File, fake))
    async with hive.started():
        assert hive.get(Reads) is fake


async def test_one_of_its_types_may_be_replaced_alone() -> None:
    fake = File()
    hive = Hive(provide(File, as_=(Reads, Writes)), invoke(Reads, Writes), replace(Reads, fake))
    async with hive.started():
        assert hive.get(Reads) is fake
        assert hive.get(Writes) is hive.get(File) is not fake


def test_a_private_provider_is_private_under_each_type() -> None:
    hive = Hive(module("files", "Files", provide_private(File, as_=(Reads,))), invoke(Reads))
    with pytest.raises(GraphError, match="Reads is private to files"):
        hive.check()


@pytest.mark.parametrize(
    ("cell", "fault"),
    [
        (provide(Store, as_=(Reads,)), "provided as Reads, which it is not: Store has no read"),
        (provide(Store, as_=(Clock,)), "provided as Clock, which it is not: Store does not derive from it"),
        (provide(Store, Clock, as_=(Reads,)), "as_ is for one constructor"),
        (provide(Store, as_=Reads), "as_ is Reads: expected a tuple of types"),  # type: ignore[arg-type]  # the mistake
        (provide(Opened, as_=(Reads,)), "@results class"),
    ],
)
def test_provide_as_an_unrelated_type_is_refused(cell: Cell, fault: str) -> None:
    with pytest.raises(GraphError, match=fault):
        Hive(cell).check()
