"""The messages of check(): part of the product, compared whole."""

import re
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NewType, Protocol

import msgspec
import pytest

from lifecycle import (
    Cell,
    GraphError,
    Health,
    Hive,
    Settings,
    SettingsError,
    Table,
    config,
    invoke,
    module,
    provide,
    provide_private,
    replace,
    supply,
)

if TYPE_CHECKING:
    from decimal import Decimal


class Device(msgspec.Struct, frozen=True): ...


class Link(msgspec.Struct, frozen=True): ...


class Kernel(Protocol):
    async def dump(self) -> list[str]: ...
    async def put(self, name: str, *, mode: int) -> None: ...


class Netlink:
    async def dump(self) -> list[str]:
        return []

    async def put(self, name: str, *, mode: int) -> None: ...


class Ipam:
    def __init__(self, devices: Table[int, Device]) -> None: ...


class Server:
    def __init__(self, ipam: Ipam, kernel: Kernel) -> None: ...

    def serve(self) -> None: ...


class Idle:
    def __init__(self, devices: Table[int, Device]) -> None: ...


def links() -> Table[int, Link]:
    return Table("links", key=id)


def refusal(*cells: Cell, **settings: object) -> str:
    """The report of check(), with this file as FILE and every line as N."""
    with pytest.raises(GraphError) as caught:
        Hive(*cells, settings={name.replace("_", "-"): value for name, value in settings.items()}).check()
    return re.sub(r"\S*test_check\.py:\d+", "FILE:N", str(caught.value))


def text(expected: str) -> str:
    return textwrap.dedent(expected).strip()


def test_missing_types_are_reported_with_users_and_similar_types() -> None:
    cells = (
        module("ipam", "Addresses", provide(Ipam, Idle)),
        module("server", "Server", provide(Server), invoke(Server.serve)),
        module("netlink", "Netlink", provide(Netlink, links)),
    )
    assert refusal(*cells) == text("""
        hive cannot be built: 2 faults
        missing: nothing provides Table[int, Device]
            needed by Ipam (ipam) at FILE:N, as 'devices'
              which is needed by Server (server) at FILE:N
              which is invoked as Server.serve (server) at FILE:N
            needed by Idle (ipam) at FILE:N, as 'devices'
            near: Table[int, Link] is provided by links (netlink) at FILE:N
            do: add a cell that provides it, or in a test supply() or replace(Table[int, Device], ...)
        missing: nothing provides Kernel
            needed by Server (server) at FILE:N, as 'kernel'
              which is invoked as Server.serve (server) at FILE:N
            near: Netlink is provided by Netlink (netlink) at FILE:N and has its methods: provide it with `-> Kernel`
            do: add a cell that provides it, or in a test supply() or replace(Kernel, ...)
    """)  # noqa: E501  # compared whole


def test_file_and_line_are_those_of_the_class_statement() -> None:
    with pytest.raises(GraphError) as caught:
        Hive(provide(Idle)).check()
    found = re.search(r"Idle \(hive\) at (\S+):(\d+)", str(caught.value))
    assert found is not None
    assert Path(found[1]).read_text().splitlines()[int(found[2]) - 1] == "class Idle:"


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


def test_a_cycle_is_one_line_per_edge_and_ends_where_it_began() -> None:
    assert refusal(module("knot", "Knot", provide(Entrance, A, B, C, Selfish))) == text("""
        hive cannot be built: 3 faults
        cycle: A -> B -> C -> A
            A (knot) at FILE:N needs B
            B (knot) at FILE:N needs C
            C (knot) at FILE:N needs A
            do: give what both need to a third, or hand one over in a hook (a Promise)
        cycle: B -> C -> B
            B (knot) at FILE:N needs C
            C (knot) at FILE:N needs B
            do: give what both need to a third, or hand one over in a hook (a Promise)
        cycle: Selfish -> Selfish
            Selfish (knot) at FILE:N needs Selfish
            do: give what both need to a third, or hand one over in a hook (a Promise)
    """)


def test_duplicates_name_both_places() -> None:
    def device() -> Device:
        return Device()

    cells = module("one", "One", provide(Device)), module("two", "Two", provide_private(device))
    assert refusal(*cells) == text("""
        hive cannot be built: 1 fault
        duplicate: Device is provided twice
            provided by Device (one) at FILE:N
            provided by device (two) at FILE:N (private)
            do: keep one, or distinguish them: a type of its own (NewType), or Annotated with Named
    """)


def test_private_constructors_of_siblings_do_not_clash() -> None:
    one = module("one", "One", provide_private(Device), invoke(Device))
    two = module("two", "Two", provide_private(Device), invoke(Device))
    Hive(one, two).check()


def test_private_access_is_reported_with_the_owner() -> None:
    assert refusal(
        module("maps", "Maps", provide_private(Device)), module("ipam", "Ipam", invoke(Device))
    ) == text("""
        hive cannot be built: 1 fault
        private: Device is private to maps
            needed by Device (ipam) at FILE:N, as 'instance'
            provided privately by Device (maps) at FILE:N
            do: provide() instead of provide_private(), or move who needs it into maps
    """)


def _no_result():  # type: ignore[no-untyped-def]  # the mistake under test
    return Device()


def _none() -> None: ...


async def _async() -> Device:
    return Device()


def _generator() -> Iterator[Device]:
    yield Device()


@asynccontextmanager
async def _context() -> AsyncIterator[Device]:
    yield Device()


def _stars(*devices: Device, **named: Device) -> Link:
    return Link()


def _unhinted(device) -> Link:  # type: ignore[no-untyped-def]  # the mistake under test
    return Link()


def _unknown_name(price: "Decimal") -> Link:
    return Link()


def _union(either: Device | Link) -> Device | Link:
    return either


@pytest.mark.parametrize(
    ("constructor", "faults"),
    [
        (_no_result, ["it has no result type: `-> T` names what it provides"]),
        (_none, ["it returns None, so it provides nothing: give a result, or use invoke()"]),
        (_async, ["it is async: constructors only build objects; do the work in a hook (Lifecycle.append)"]),
        (_generator, ["it is a generator: return the object, and clean up in a hook (Lifecycle.enter)"]),
        (
            _stars,
            [
                "*devices cannot be filled: name each dependency as a parameter of its own",
                "**named cannot be filled: name each dependency as a parameter of its own",
            ],
        ),
        (_unhinted, ["parameter 'device' has no type hint: the hint names what to inject"]),
        (
            _unknown_name,
            [
                (
                    "its type hint names Decimal, which is not defined where it is written: "
                    "import it outside of `if TYPE_CHECKING`, at module level"
                ),
            ],
        ),
        (
            _union,
            [
                "parameter 'either': Device | Link is not a single type to inject",
                "it returns Device | Link, which is not a single type to provide",
            ],
        ),
        (3, ["3 is neither a function nor a class"]),
    ],
)
def test_constructors_that_cannot_be_used_are_refused(constructor: object, faults: list[str]) -> None:
    message = refusal(provide(constructor))  # type: ignore[arg-type]  # one of them is not a function
    assert [line.strip() for line in message.splitlines()[2 : 2 + len(faults)]] == faults
    assert re.match(r"constructor: \S+ \(hive\) at FILE:N cannot be used", message.splitlines()[1])


def test_a_context_manager_as_a_constructor_is_refused() -> None:
    assert "it is a context manager: return the object, and enter and leave in a hook" in refusal(
        provide(_context)
    )


def test_an_invoked_function_may_not_be_async() -> None:
    async def start() -> None: ...

    assert "invoke: start (hive) at FILE:N cannot be used\n    it is async" in refusal(invoke(start))


def test_a_method_of_a_class_nothing_provides_is_missing() -> None:
    assert refusal(invoke(Server.serve)).splitlines()[1:3] == [
        "missing: nothing provides Server",
        "    needed by Server.serve (hive) at FILE:N, as 'self'",
    ]


class HalfNetlink:
    def dump(self) -> list[str]:
        return []

    async def put(self, name: str) -> None: ...


class EmptyNetlink: ...


def test_a_fake_unlike_the_type_is_refused() -> None:
    user = module("user", "User", supply(Ipam(Table("d", key=id)), Ipam), provide(Server), invoke(Server))
    assert refusal(user, replace(Kernel, HalfNetlink())) == text("""
        hive cannot be built: 1 fault
        replace: the fake is not like Kernel
            its dump is not async
            its put(name: str) -> None cannot be called as put(self, name: str, *, mode: int) -> None: got an unexpected keyword argument 'mode'
            replaced at FILE:N
    """)  # noqa: E501  # compared whole
    assert "it has no dump\n    it has no put" in refusal(user, replace(Kernel, EmptyNetlink()))
    assert "Netlink is a class: give an instance of it" in refusal(user, replace(Kernel, Netlink))
    assert "it is of type int" in refusal(provide(Device), invoke(Device), replace(Device, 3))


def test_a_fake_for_nothing_is_refused() -> None:
    assert refusal(
        provide(links), invoke(Table[int, Link]), replace(Table[int, Device], Table("d", key=id))
    ) == text("""
        hive cannot be built: 1 fault
        replace: nothing provides or needs Table[int, Device]
            replaced at FILE:N
            near: Table[int, Link] is provided by links (hive) at FILE:N
    """)


def test_what_the_hive_injects_can_be_neither_provided_nor_replaced() -> None:
    def health() -> Health:
        raise AssertionError

    assert "duplicate: Health comes from the hive itself\n    provided by health (hive)" in refusal(
        provide(health)
    )
    assert "Health comes from the hive itself and cannot be replaced" in refusal(replace(Health, 1))


def test_modules_have_ids_of_their_own_in_kebab_case() -> None:
    message = refusal(module("Bad_Id", "Bad"), module("twin", "One"), module("twin", "Two"))
    assert "module: module id 'Bad_Id' at FILE:N: expected kebab-case such as host-ip-sync" in message
    assert "module: two modules have the id twin\n    at FILE:N\n    at FILE:N" in message
    assert refusal(module("hive", "Named as the hive")) == text("""
        hive cannot be built: 1 fault
        module: a module has the id of the hive itself, hive
            at FILE:N
            do: rename the module, or the hive: Hive(..., name=...)
    """)


class Sizes(Settings, frozen=True):
    mtu: int = 0
    """Bytes of the largest packet."""
    devices: tuple[str, ...] = ()

    def validate(self) -> None:
        if self.mtu < 0:
            raise ValueError(f"mtu {self.mtu}: expected 0 (from the devices) or more")


class OtherSizes(Settings, frozen=True):
    mtu: int = 1


class Odd(Settings, frozen=True):
    table: frozenset[dict[str, int]] = frozenset()


def test_settings_are_checked_with_the_graph() -> None:
    assert refusal(provide(Ipam), config(Sizes), mtu=-1, mtv=5) == text("""
        hive cannot be built: 3 faults
        missing: nothing provides Table[int, Device]
            needed by Ipam (hive) at FILE:N, as 'devices'
              which nothing invokes
            do: add a cell that provides it, or in a test supply() or replace(Table[int, Device], ...)
        setting: mtv: no such setting; did you mean mtu?
        setting: mtu -1: expected 0 (from the devices) or more
    """)


def test_settings_alone_at_fault_are_the_users_mistake() -> None:
    with pytest.raises(
        SettingsError, match="hive cannot be built from these settings: 1 fault\nsetting: mtu='x'"
    ) as caught:
        Hive(config(Sizes), settings={"mtu": "x"}).check()
    assert caught.value.exit_code == 2


def test_an_option_belongs_to_one_struct() -> None:
    assert refusal(config(Sizes, OtherSizes)) == text("""
        hive cannot be built: 1 fault
        duplicate: setting mtu is declared twice
            in Sizes (hive) at FILE:N
            in OtherSizes (hive) at FILE:N
    """)


def test_settings_of_types_that_no_text_can_give_are_refused() -> None:
    assert "field 'table': no text can be read as frozenset[dict[str, int]]" in refusal(config(Odd))


def test_supplied_values_need_no_await() -> None:
    Token = NewType("Token", object)

    async def later() -> int:
        return 1

    coroutine = later()
    assert "it is awaitable: supply what awaiting it gives" in refusal(supply(coroutine, Token))
    coroutine.close()
