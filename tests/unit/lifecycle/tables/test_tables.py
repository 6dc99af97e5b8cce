"""The tables of a hive, found by their names."""

import pytest

from lifecycle import Hive, HiveError, Table, Tables, invoke, module, provide, provide_private


def letters() -> Table[str]:
    return Table("letters", key=str.lower)


def numbers() -> Table[int]:
    return Table("numbers", key=abs)


def unused() -> Table[float]:
    return Table("unused", key=abs)


class Totals:
    """Has a table that no constructor gives."""

    def __init__(self, rows: Table[int], tables: Tables) -> None:
        self.total = rows.derive(lambda found: {"total": sum(found)}, name="total")
        tables.add(self.total)


def test_every_table_that_is_built_is_found_by_its_name() -> None:
    inner = module("inner", "Inner", provide_private(numbers), provide(Totals), invoke(Totals))
    hive = Hive(provide(letters, unused), inner, invoke(Table[str]))
    hive.graph()
    tables = hive.get(Tables)
    assert [table.name for table in tables.all()] == ["letters", "numbers", "total"]
    assert tables.get("letters") is hive.get(Table[str])
    assert tables.get("total").all() == [0]


def test_a_name_nobody_has_is_told_with_the_nearest() -> None:
    tables = Tables()
    with pytest.raises(LookupError, match="no table is named letter; there are: none"):
        tables.get("letter")
    rows = letters(), numbers()
    tables.add(*rows)
    with pytest.raises(LookupError, match=r"no table is named letter: did you mean letters\?"):
        tables.get("letter")
    with pytest.raises(LookupError, match="no table is named x; there are: letters, numbers"):
        tables.get("x")


def test_a_name_two_have_is_told() -> None:
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


def test_it_comes_from_the_hive() -> None:
    def mine() -> Tables:
        return Tables()

    with pytest.raises(HiveError, match="Tables comes from the hive itself"):
        Hive(provide(mine), invoke(Tables)).check()
