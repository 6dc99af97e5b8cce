"""The tables of a hive, found by their names."""

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import pytest

from lifecycle import (
    Derived,
    GraphError,
    Hive,
    HiveError,
    ReadTable,
    Table,
    Tables,
    invoke,
    module,
    provide,
    provide_private,
)


def letters() -> Table[str, str]:
    return Table("letters", key=str.lower)


def numbers() -> Table[int, int]:
    return Table("numbers", key=abs)


def unused() -> Table[float, float]:
    return Table("unused", key=abs)


class Totals:
    """Has a table that no constructor gives."""

    def __init__(self, rows: Table[int, int], tables: Tables) -> None:
        self.total = rows.derive(lambda found: {"total": sum(found)}, name="total")
        tables.add(self.total)


def test_every_table_that_is_built_is_found_by_its_name() -> None:
    inner = module("inner", "Inner", provide_private(numbers), provide(Totals), invoke(Totals))
    hive = Hive(provide(letters, unused), inner, invoke(Table[str, str]))
    hive.graph()
    tables = hive.get(Tables)
    assert [table.name for table in tables.all()] == ["letters", "numbers", "total"]
    assert tables.get("letters") is hive.get(Table[str, str])
    assert tables.get("total").all() == [0]


def test_an_unknown_table_name_is_reported_with_the_nearest() -> None:
    tables = Tables()
    with pytest.raises(LookupError, match="no table is named letter; there are: none"):
        tables.get("letter")
    rows = letters(), numbers()
    tables.add(*rows)
    with pytest.raises(LookupError, match=r"no table is named letter; did you mean letters\?"):
        tables.get("letter")
    with pytest.raises(LookupError, match="no table is named x; there are: letters, numbers"):
        tables.get("x")


def test_an_ambiguous_table_name_is_reported() -> None:
    tables, rows = Tables(), [letters(), letters()]
    tables.add(*rows)
    with pytest.raises(LookupError, match="2 tables are named letters"):
        tables.get("letters")


def test_an_added_table_is_known_for_as_long_as_it_is_held() -> None:
    tables, rows = Tables(), letters()
    tables.add(rows, rows)
    assert tables.all() == [rows]
    del rows
    assert tables.all() == []


def test_tables_are_injected_by_the_hive() -> None:
    def mine() -> Tables:
        return Tables()

    with pytest.raises(HiveError, match="Tables comes from the hive itself"):
        Hive(provide(mine), invoke(Tables)).check()


@dataclass
class Loose:
    name: str


class LooseStruct(msgspec.Struct):
    name: str


class ByIdentity:
    pass


class Named(NamedTuple):
    name: str


@dataclass(frozen=True)
class Firm:
    name: str


class FirmStruct(msgspec.Struct, frozen=True):
    name: str


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Loose("a"), "Loose is a dataclass that is not frozen"),
        (LooseStruct("a"), "LooseStruct is a Struct that is not frozen"),
        (ByIdentity(), "ByIdentity is compared by identity, not by value"),
        ({"name": "a"}, "dict can be changed in place"),
        ([1], "list can be changed in place"),
    ],
)
def test_rows_that_may_change_in_place_are_refused(row: Any, why: str) -> None:
    """Changed and put again, they would equal what is there: no watcher would see it."""
    table: Table[Any, Any] = Table("things", key=lambda _: 1)
    table.put(Firm("a"))
    with table.txn() as txn:
        txn.delete(1)
    with pytest.raises(TypeError, match=f"table things: a row of type {why}: expected a frozen dataclass or"):
        table.put(row)
    assert len(table) == 0
    mapped: ReadTable[Any, Any] = table.map(lambda _: row)
    table.put("seed")
    with pytest.raises(TypeError, match=why):
        mapped.all()


@pytest.mark.parametrize(
    "row",
    [Named("a"), Firm("a"), FirmStruct("a"), "a", 1, 1.5, b"a", True, (1, 2), frozenset({1}), Path("a"),
     ip_address("192.0.2.1"), ip_network("192.0.2.0/24"), datetime.now(UTC), Decimal(1), uuid4()],
)  # fmt: skip
def test_rows_that_stay_as_they_are_are_taken(row: Any) -> None:
    table: Table[Any, Any] = Table("things", key=lambda _: 1)
    table.put(row)
    assert table.all() == [row]


def test_a_table_that_is_declared_with_rows_that_may_change_is_a_fault_of_the_graph() -> None:
    def loose() -> Table[str, Loose]:
        return Table("loose", key=lambda one: one.name)

    def perhaps() -> Derived[str, LooseStruct | None]:
        raise NotImplementedError

    def firm() -> Table[str, Firm]:
        return Table("firm", key=lambda one: one.name)

    def anything() -> Table[Any, Any]:
        return Table("anything", key=id)

    with pytest.raises(GraphError) as caught:
        Hive(module("m", "M", provide(loose, perhaps, firm, anything))).check()
    first, second = caught.value.faults
    assert "gives Table[str, Loose], but Loose is a dataclass that is not frozen: expected" in first.text
    assert (
        "gives Derived[str, LooseStruct | None], but LooseStruct is a Struct that is not frozen"
        in second.text
    )
