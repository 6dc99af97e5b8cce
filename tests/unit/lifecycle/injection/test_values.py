"""Values, results and odd constructors: what is refused where it is given, and the errors of get()."""

from __future__ import annotations

import dataclasses
import functools
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, Literal, NamedTuple, NewType, Protocol

import pydantic
import pytest
import typing_extensions

from lifecycle import (
    BuildError,
    GraphError,
    Hive,
    HiveError,
    Hook,
    Lifecycle,
    Named,
    NotStartedError,
    StartError,
    invoke,
    module,
    provide,
    supply,
)

pytestmark = pytest.mark.anyio


class Clock(Protocol):
    def now(self) -> float: ...


class Sundial:
    def now(self) -> float:
        return 0.0


class Plain: ...


Port = NewType("Port", int)


def refusal(*cells: Any) -> str:
    with pytest.raises(GraphError) as raised:
        Hive(*cells).check()
    return str(raised.value)


def test_a_module_without_a_title_loses_no_cell() -> None:
    assert "its title is ProvideCell, expected a text" in refusal(module("clock", provide(Sundial)))  # type: ignore[arg-type]  # the mistake


def test_an_invalid_cell_is_reported_with_its_location() -> None:
    with pytest.raises(TypeError, match=r"in clocks at .*test_values.py:\d+ is not a cell"):
        Hive(module("clocks", "Clocks", Sundial)).check()  # type: ignore[arg-type]  # the mistake


def test_a_value_supplied_as_what_it_is_not_is_refused() -> None:
    message = refusal(supply(3, type=Sundial), supply("80", type=Port), supply(Plain(), type=Clock))
    assert "Sundial (hive) at tests/unit/lifecycle/injection/test_values.py:" in message
    assert "it is supplied as Sundial, which it is not\n    it is of type int" in message
    assert "it is supplied as Port, which it is not\n    it is of type str" in message
    assert "it is supplied as Clock, which it is not\n    it has no now" in message
    Hive(supply(Sundial(), type=Clock), supply(80, type=Port), supply(3, type=float)).check()


class Stopped:
    now = 12.0


@pytest.mark.parametrize(
    ("value", "hint", "why"),
    [
        (Stopped(), Clock, "its now is not a method"),
        (["80"], list[Port], "it holds '80': it is of type str"),
        ("up", Literal["high", "low"], "it is 'up'"),
    ],
)
def test_a_value_that_only_looks_like_its_type_is_refused(value: object, hint: Any, why: str) -> None:
    assert why in refusal(supply(value, type=hint))


@pytest.mark.parametrize(
    ("hint", "result", "why"),
    [
        (Sundial, 3, "returned one int instead of Sundial"),
        (Clock, Plain(), "returned one Plain instead of Clock: it has no now"),
        (Port, "80", "returned one str instead of Port"),
        (dict[str, int], [], r"returned one list instead of dict\[str, int\]"),
    ],
)
async def test_a_result_that_is_not_of_its_type_fails_where_it_is_built(
    hint: Any, result: object, why: str
) -> None:
    def build() -> Any:
        return result

    build.__annotations__["return"] = hint
    with pytest.raises(BuildError, match=rf"build \(hive\) at .*test_values.py:\d+ {why}"):
        await Hive(provide(build), invoke(hint)).start()


async def test_one_of_several_results_that_is_not_of_its_type_fails_where_it_is_built() -> None:
    def build() -> tuple[Sundial, Clock]:
        return Sundial(), Plain()  # type: ignore[return-value]  # the mistake

    with pytest.raises(BuildError, match=r"build\[1\] .* is one Plain instead of Clock: it has no now"):
        await Hive(provide(build), invoke(Clock)).start()


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    clock: Sundial
    spare: Plain | None = None


class Filled(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    clock: Sundial = pydantic.Field(alias="theClock")
    names: list[str] = pydantic.Field(default_factory=list)


@dataclasses.dataclass
class Wound:
    """Its clock is handed over and not stored."""

    clock: dataclasses.InitVar[Sundial]
    names: list[str] = dataclasses.field(default_factory=list)
    shows: float = 1.0

    def __post_init__(self, clock: Sundial) -> None:
        self.shows = clock.now()


class Pair(NamedTuple):
    clock: Sundial
    spare: Plain | None = None


def made(number: int, clock: Sundial) -> Annotated[Pair, Named("partial")]:
    return Pair(clock, Plain() if number else None)


class Factory:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, clock: Sundial) -> Annotated[int, Named("object")]:
        return self.number


class Given:
    def __init__(self, number: int, clock: Sundial) -> None:
        self.number, self.clock = number, clock


async def test_models_named_tuples_partials_and_objects_are_constructors() -> None:
    named: list[Any] = [Annotated[Pair, Named("partial")], Annotated[int, Named("object")]]
    hive = Hive(
        provide(Sundial, Plain, Model, Pair, Factory(7)),
        provide(functools.partial(made, number=0), functools.partial(Given, 5)),
        invoke(Model, Pair, Given, *named),
    )
    async with hive.started():
        assert hive.get(Model).spare is hive.get(Plain)
        assert hive.get(Pair).spare is hive.get(Plain)
        assert hive.get(Annotated[Pair, Named("partial")]).spare is None
        assert hive.get(Annotated[int, Named("object")]) == 7
        assert (hive.get(Given).number, hive.get(Given).clock) == (5, hive.get(Sundial))
    assert "Given (hive) at tests/unit/lifecycle/injection/test_values.py:" in refusal(
        provide(functools.partial(Given, 5))
    )


async def test_fields_keep_their_own_ways_to_be_filled() -> None:
    hive = Hive(provide(Sundial, Filled, Wound), invoke(Filled, Wound))
    async with hive.started():
        assert hive.get(Filled).clock is hive.get(Sundial)
        assert (hive.get(Filled).names, hive.get(Wound).names, hive.get(Wound).shows) == ([], [], 0.0)


def test_a_partial_with_too_many_arguments_is_reported_as_such() -> None:
    too_many = functools.partial(made, 1, 2, 3)  # type: ignore[call-arg,arg-type]  # the mistake
    assert "its parameters cannot be read: partial object" in refusal(provide(too_many))


@contextmanager
def synchronous() -> Iterator[None]:
    yield


@asynccontextmanager
async def context() -> AsyncIterator[None]:
    yield


def test_a_context_manager_as_a_constructor_is_refused() -> None:
    assert "it is a context manager: return the object, and enter and leave in a hook" in refusal(
        provide(synchronous), provide(context)
    )


Alias = typing_extensions.TypeAliasType("Alias", Sundial)


class Reads:
    def __init__(self, clock: Alias) -> None:
        self.clock = clock


async def test_an_alias_stands_for_its_type() -> None:
    hive = Hive(provide(Sundial, Reads), invoke(Reads))
    async with hive.started():
        assert hive.get(Reads).clock is hive.get(Sundial) is hive.get(Alias)


if sys.version_info >= (3, 12):

    async def test_variables_in_type_arguments_are_resolved_and_recursive_aliases_reported() -> None:
        space: dict[str, Any] = {}
        source = """
            from __future__ import annotations
            class Box[T]:
                def __init__(self, inside: T) -> None:
                    self.inside = inside
            type Endless = list[Endless]
            def end(inside: Endless) -> str: ...
        """
        exec(textwrap.dedent(source), space)  # noqa: S102  # syntax that older interpreters do not read
        hive = Hive(supply(3), provide(space["Box"][int]), invoke(space["Box"][int]))
        async with hive.started():
            assert hive.get(space["Box"][int]).inside == 3
        assert "an alias that contains itself" in refusal(provide(space["end"]))

    async def test_an_alias_statement_stands_for_its_type() -> None:
        space: dict[str, Any] = {"Sundial": Sundial}
        source = """
            type Own = Sundial
            type Maybe[T] = T | None
            class Holder:
                def __init__(self, clock: Own, spare: Maybe[int]) -> None:
                    self.clock, self.spare = clock, spare
        """
        exec(textwrap.dedent(source), space)  # noqa: S102  # syntax that older interpreters do not read
        hive = Hive(provide(Sundial, space["Holder"]), invoke(space["Holder"]))
        async with hive.started():
            assert hive.get(space["Holder"]).clock is hive.get(Sundial)
            assert hive.get(space["Holder"]).spare is None


async def test_one_text_of_a_hint_means_in_each_module_what_its_names_stand_for_there() -> None:
    source = """
        from __future__ import annotations
        def wall(clocks: dict[str, Clock]) -> list[Clock]:
            return list(clocks.values())
    """
    spaces: list[dict[str, Any]] = [{"Clock": int}, {"Clock": str}, {"Clock": int}]
    for space in spaces:
        exec(textwrap.dedent(source), space)  # noqa: S102  # three modules with the same text
    walls = [space["wall"] for space in spaces]
    given = supply({"a": 3}, type=dict[str, int]), supply({"b": "late"}, type=dict[str, str])
    hive = Hive(*given, provide(*walls[:2]), invoke(list[int], list[str]))
    async with hive.started():
        assert hive.get(list[int]) == [3]
        assert hive.get(list[str]) == ["late"]
    async with Hive(*given, provide(walls[2]), invoke(list[int])).started() as other:
        assert other.get(list[int]) == [3]
    del (unnamed := {**spaces[0]})["Clock"]
    exec(textwrap.dedent(source), unnamed)  # noqa: S102
    assert "its type hint names Clock, which is not defined" in refusal(provide(unnamed["wall"]))


async def test_get_after_a_failed_build_raises_the_build_error() -> None:
    def fails() -> Sundial:
        raise OSError("no sun")

    hive = Hive(provide(fails, Reads), invoke(Reads))
    with pytest.raises(BuildError):
        await hive.start()
    with pytest.raises(NotStartedError, match=r"Reads was not built, hive could not be: fails .*no sun"):
        hive.get(Reads)


async def test_get_of_an_unneeded_type_in_a_started_hive_names_the_reason() -> None:
    async with Hive(provide(Sundial)).started() as hive:
        with pytest.raises(NotStartedError, match=r"Sundial was not built: nothing invoked needs it"):
            hive.get(Sundial)


async def test_get_from_a_disabled_module_names_the_module_and_a_failed_enable_is_degraded() -> None:
    fail = False

    class Server:
        def __init__(self, lifecycle: Lifecycle) -> None:
            lifecycle.append(Hook("serve", self.start))

        async def start(self) -> None:
            if fail:
                raise OSError("the port is taken")

    hive = Hive(module("web", "Web", provide(Server), invoke(Server)))
    async with hive.started():
        await hive.modules.disable("web")
        with pytest.raises(NotStartedError, match="Server is not there: module web is disabled"):
            hive.get(Server)
        fail = True
        with pytest.raises(StartError):
            await hive.modules.enable("web")
        (status,) = hive.health.snapshot("web")
        assert (status.level, status.message) == ("degraded", "disabled: enabling it failed")
        assert "the port is taken" in (status.error or "")
        fail = False
        await hive.modules.enable("web")
        assert all(status.level != "degraded" for status in hive.health.snapshot("web"))


def test_get_of_a_type_without_a_provider_raises_an_error() -> None:
    with pytest.raises(HiveError, match="nothing in hive provides Sundial"):
        Hive(invoke(rightly_not)).get(Sundial)


def rightly_not() -> None: ...
