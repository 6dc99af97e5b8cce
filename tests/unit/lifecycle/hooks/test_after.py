"""Order without use: after()."""

import functools
from typing import Annotated, Generic, TypeVar

import pytest

from lifecycle import (
    GraphError,
    Hive,
    Hook,
    Lifecycle,
    Member,
    Named,
    after,
    decorate,
    invoke,
    module,
    provide,
    provide_private,
    replace,
    supply,
)
from lifecycle.graph import Edge
from lifecycle.testing import Recorder, started, unused_parameters

pytestmark = pytest.mark.anyio

T = TypeVar("T")


class Log(list[str]):
    """What happened."""


class Database:
    def __init__(self, log: Log, lifecycle: Lifecycle) -> None:
        record(log, lifecycle, "database")


@after(Database)
class Server:
    """Opens its port when there is a database, though it never talks to it."""

    def __init__(self, log: Log, lifecycle: Lifecycle) -> None:
        record(log, lifecycle, "server")


class Route:
    pass


def record(log: Log, lifecycle: Lifecycle, name: str) -> None:
    async def start() -> None:
        log.append(f"{name} starts")

    async def stop() -> None:
        log.append(f"{name} stops")

    lifecycle.append(Hook(name, start, stop))


def edges(hive: Hive) -> list[tuple[str, str, bool]]:
    return [(edge.source, edge.target, edge.order) for edge in hive.graph().edges]


async def test_after_orders_start_and_stop_without_injection() -> None:
    log = Log()
    for seed in range(8):
        log.clear()
        recorder = Recorder(seed)
        async with recorder.started(provide(Server, Database), supply(log), invoke(Server)):
            recorder.assert_before((Database, Server))
        assert log == ["database starts", "server starts", "server stops", "database stops"]


async def test_the_target_of_after_is_built_without_other_users() -> None:
    async with started(provide(Server, Database), supply(Log()), invoke(Server)) as hive:
        assert isinstance(hive.get(Database), Database)


async def test_invoked_functions_and_decorators_have_an_order_too() -> None:
    log = Log()

    @after(Database)
    def warm(lifecycle: Lifecycle) -> None:
        record(log, lifecycle, "warm")

    @after(Database)
    def traced(route: Route, lifecycle: Lifecycle) -> Route:
        record(log, lifecycle, "traced")
        return route

    cells = provide(Database, Route), decorate(traced), invoke(warm, Route), supply(log)
    async with started(*cells):
        assert log[0] == "database starts"
        assert sorted(log[1:]) == ["traced starts", "warm starts"]


async def test_a_subclass_comes_after_what_its_base_does_and_more() -> None:
    @after(Route)
    class Safe(Server):
        pass

    graph = Hive(provide(Safe, Database, Route), supply(Log()), invoke(Safe)).graph()
    assert {edge.target for edge in graph.edges if edge.order} == {"hive/Database", "hive/Route"}
    plain = Hive(provide(Server, Database), supply(Log()), invoke(Server)).graph()
    assert {edge.target for edge in plain.edges if edge.order} == {"hive/Database"}


async def test_a_group_a_name_and_a_generic_stand_in_it_as_in_a_parameter() -> None:
    class Box(Generic[T]):
        pass

    @after(list[Member[Route]], Annotated[Route, Named("main")], Box[int])
    def last() -> None: ...

    def one() -> Member[Route]:
        return Route()

    def other() -> Member[Route]:
        return Route()

    def box() -> Box[int]:
        return Box()

    graph = Hive(provide(one, other, box), provide(Route, name="main"), invoke(last)).graph()
    names = {node.id: node.provides for node in graph.constructors}
    assert all(edge.order for edge in graph.edges)
    assert [names[edge.target] for edge in graph.edges] == [
        "Member[Route]",
        "Member[Route]",
        "Route named 'main'",
        "Box[int]",
    ]


async def test_after_with_an_unprovided_type_is_a_fault_unless_optional() -> None:
    @after(Route)
    def needs() -> None: ...

    @after(Route | None)
    def may_need() -> None: ...

    with pytest.raises(GraphError) as caught:
        Hive(invoke(needs)).check()
    assert "nothing provides Route" in str(caught.value)
    assert "to come after it" in str(caught.value)
    Hive(invoke(may_need)).check()
    assert [order for *_, order in edges(Hive(provide(Route), invoke(may_need)))] == [True]


async def test_what_is_private_elsewhere_cannot_be_come_after() -> None:
    @after(Route)
    def needs() -> None: ...

    with pytest.raises(GraphError, match="Route is private to inside"):
        Hive(module("inside", "Inside", provide_private(Route)), invoke(needs)).check()


async def test_a_circle_is_reported_with_its_order_only_edges() -> None:
    @after(Server)
    def database(log: Log, lifecycle: Lifecycle) -> Database:
        return Database(log, lifecycle)

    with pytest.raises(GraphError) as caught:
        Hive(provide(database, Server), supply(Log()), invoke(Server)).check()
    message = str(caught.value)
    assert "comes after Server" in message
    assert "comes after Database" in message
    assert "leave out the after() that is not needed" in message
    graph = Hive(provide(database, Server), supply(Log()), invoke(Server)).graph(faulty=True)
    assert [fault.kind for fault in graph.faults] == ["cycle"]


async def test_a_fake_replaces_the_target_of_after() -> None:
    log = Log()
    async with started(
        provide(Server, Database), supply(log), invoke(Server), replace(Database, Database.__new__(Database))
    ):
        assert log == ["server starts"]


async def test_a_partial_and_a_callable_object_keep_their_order() -> None:
    class Maker:
        @after(Route)
        def __call__(self) -> Database:
            return Database.__new__(Database)

    for made in (Maker(), functools.partial(functools.partial(Maker()))):
        hive = Hive(provide(made, Route), invoke(Database))
        assert [target for _, target, order in edges(hive) if order] == ["hive/Route"]


@pytest.mark.parametrize("wrong", [(), ("Route",), (3,), (Route(),), (lambda: None,), ([Route],)])
async def test_after_with_a_value_that_is_not_a_type_is_refused_at_its_line(
    wrong: tuple[object, ...],
) -> None:
    with pytest.raises(TypeError, match=r"^after\("):
        after(*wrong)


async def test_a_type_that_nothing_can_provide_is_a_fault() -> None:
    @after(int | str)
    def needs() -> None: ...

    with pytest.raises(GraphError, match=r"in after\(\): int \| str is not a single type to inject"):
        Hive(invoke(needs)).check()


async def test_every_drawing_distinguishes_order_from_dependency() -> None:
    hive = Hive(provide(Server, Database), supply(Log()), invoke(Server))
    graph = hive.graph()
    assert Edge("hive/Server", "hive/Database", "", order=True) in graph.edges
    assert "· provide Server <- Log after Database\n" in graph.tree()
    assert '"hive/Server" -> "hive/Database" [style=dashed];' in graph.dot()
    assert '"hive/Server" -> "hive/Log";' in graph.dot()
    assert graph.mermaid().count("-.->") == 1


def looks_at(log: Log, route: Route) -> Log:
    del log
    return Log([type(route).__name__])


def hands_on(log: Log, route: Route) -> list[str]:
    def later() -> str:
        return type(route).__name__

    return [*log, later()]


class Keeps:
    def __init__(self, log: Log, *, unread: Route) -> None:
        self.log = log


async def test_unused_parameters_are_found() -> None:
    found = unused_parameters(
        module("m", "M", provide(looks_at, hands_on, Keeps), invoke(Route, Keeps)),
        provide(Route),
        supply(Log()),
    )
    assert [line.partition(" at ")[0] for line in found] == [
        "'log' of looks_at (m)",
        "'unread' of Keeps (m)",
    ]
