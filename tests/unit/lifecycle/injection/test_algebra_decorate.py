"""decorate(): around what it returns, for the cells in it, and for no others."""

import pytest

from lifecycle import (
    Hive,
    Hook,
    Lifecycle,
    Member,
    Settings,
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

pytestmark = pytest.mark.anyio


class Client:
    def __init__(self) -> None:
        self.layers: tuple[str, ...] = ("client",)


class Layer(Client):
    def __init__(self, around: Client, name: str) -> None:
        self.layers = (name, *around.layers)


class Tracer: ...


class User:
    def __init__(self, client: Client) -> None:
        self.layers = client.layers


class Other:
    def __init__(self, client: Client) -> None:
        self.layers = client.layers


def traced(client: Client, tracer: Tracer) -> Client:
    return Layer(client, "traced")


def retried(client: Client) -> Client:
    return Layer(client, "retried")


def limited(client: Client) -> Client:
    return Layer(client, "limited")


async def test_the_cells_inside_get_the_decorated_value_and_the_others_the_plain_one() -> None:
    cells = (provide(Client, Tracer), decorate(traced, provide(User)), provide(Other), invoke(User, Other))
    async with Hive(*cells).started() as hive:
        assert hive.get(User).layers == ("traced", "client")
        assert hive.get(Other).layers == ("client",)
        assert hive.get(Client).layers == ("client",)


async def test_decorations_nest_and_the_innermost_is_applied_last() -> None:
    inner = decorate(limited, module("deep", "Deep", group(provide(User)), invoke(User)))
    cells = decorate(traced, provide(Other), decorate(retried, inner), invoke(Other))
    async with Hive(provide(Client, Tracer), cells).started() as hive:
        assert hive.get(User).layers == ("limited", "retried", "traced", "client")
        assert hive.get(Other).layers == ("traced", "client")


async def test_a_decorator_without_cells_applies_to_the_module_and_below() -> None:
    below = module("below", "Below", provide(User), invoke(User))
    top = module("top", "Top", below, group(decorate(retried)), provide(Client))
    async with Hive(top, provide(Other), invoke(Other)).started() as hive:
        assert hive.get(User).layers == ("retried", "client")
        assert hive.get(Other).layers == ("client",)


async def test_a_decorator_of_the_whole_hive_applies_to_get() -> None:
    async with Hive(provide(Client, User), invoke(User), decorate(retried)).started() as hive:
        assert hive.get(User).layers == ("retried", "client")
        assert hive.get(Client).layers == ("retried", "client")


async def test_a_decorator_is_called_once_and_only_when_someone_inside_asks() -> None:
    calls: list[str] = []

    def counted(client: Client) -> Client:
        calls.append("counted")
        return client

    cells = (provide(Client, User, Other, Tracer), invoke(User, Other))
    async with Hive(provide(Client), decorate(counted, provide(User, Other), invoke(User, Other))).started():
        assert calls == ["counted"]
    async with Hive(*cells, decorate(counted, invoke(Tracer))).started():
        assert calls == ["counted"]


def present(client: Client | None) -> Client:
    return Layer(client or Client(), "present")


async def test_what_is_private_further_in_is_not_what_is_decorated_further_out() -> None:
    inner = module("inner", "Inner", provide_private(Client), provide(User), invoke(User))
    async with Hive(decorate(present, inner, provide(Other), invoke(Other))).started() as hive:
        assert hive.get(User).layers == ("client",)
        assert hive.get(Other).layers == ("present", "client")


async def test_a_decorator_inside_a_module_decorates_what_is_private_to_it() -> None:
    inner = module("inner", "Inner", provide_private(Client), decorate(retried), provide(User), invoke(User))
    async with Hive(inner).started() as hive:
        assert hive.get(User).layers == ("retried", "client")


async def test_a_fake_is_not_decorated() -> None:
    cells = (provide(Client, Tracer), decorate(traced, provide(User), invoke(User)), decorate(retried))
    async with Hive(*cells, replace(Client, Layer(Client(), "fake"))).started() as hive:
        assert hive.get(User).layers == ("fake", "client")


async def test_groups_and_settings_and_several_types_may_be_decorated() -> None:
    class Limits(Settings, frozen=True):
        """Settings."""

        most: int = 3

    def doubled(limits: Limits) -> Limits:
        return Limits(most=limits.most * 2)

    def sorted_names(names: list[Member[str]], limits: Limits) -> tuple[list[Member[str]], Client]:
        return sorted(names)[: limits.most], Layer(Client(), "of a tuple")

    seen: list[object] = []

    def user(names: tuple[Member[str], ...], limits: Limits, client: Client) -> None:
        seen.extend((names, limits.most, client.layers))

    names = group(supply("b", Member[str]), supply("c", Member[str]), supply("a", Member[str]))
    inside = decorate(doubled, decorate(sorted_names, invoke(user)))
    async with Hive(config(Limits), names, provide(Client), inside, settings={"most": 1}).started():
        assert seen == [("a", "b"), 2, ("of a tuple", "client")]


async def test_the_hooks_of_a_decorator_run_between_those_of_what_it_decorates_and_of_who_uses_it() -> None:
    order: list[str] = []

    def hook(name: str) -> Hook:
        async def start() -> None:
            order.append(name)

        return Hook(name, start=start)

    def plain(lifecycle: Lifecycle) -> Client:
        lifecycle.append(hook("plain"))
        return Client()

    def around(client: Client, lifecycle: Lifecycle) -> Client:
        lifecycle.append(hook("around"))
        return Layer(client, "around")

    def user(client: Client, lifecycle: Lifecycle) -> None:
        lifecycle.append(hook("user"))

    async with Hive(provide(plain), decorate(around, invoke(user))).started():
        assert order == ["plain", "around", "user"]


async def test_a_decorator_may_make_something_of_nothing() -> None:
    async with Hive(decorate(present, provide(User), invoke(User))).started() as hive:
        assert hive.get(User).layers == ("present", "client")


def test_the_graph_shows_what_goes_through_a_decorator() -> None:
    graph = Hive(provide(Client), decorate(retried, provide(User), invoke(User))).graph()
    assert graph.tree() == (
        "hive\n"
        "  · provide Client\n"
        "  · provide User <- Client\n"
        "  · provide Client from retried (decorate) <- Client\n"
        "  · invoke  User <- User\n"
    )
    edges = [(edge.source, edge.target) for edge in graph.edges]
    assert ("hive/User", "hive/retried") in edges
    assert ("hive/retried", "hive/Client") in edges
