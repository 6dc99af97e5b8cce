"""Waiting for conditions."""

import anyio
import msgspec
import pytest

from lifecycle import Table
from lifecycle.testing import eventually

pytestmark = pytest.mark.anyio


class Item(msgspec.Struct, frozen=True):
    name: str


async def test_what_the_condition_gives_is_returned() -> None:
    found: list[str] = []

    async def find() -> None:
        await anyio.sleep(0.01)
        found.append("it")

    async with anyio.create_task_group() as group:
        group.start_soon(find)
        assert await eventually(lambda: found) == ["it"]


async def test_an_error_of_the_condition_is_reported_at_the_deadline() -> None:
    nothing: dict[str, bool] = {}
    with pytest.raises(AssertionError, match=r"did not hold within 0\.01 s") as caught:
        await eventually(lambda: nothing["missing"], within=0.01)
    assert isinstance(caught.value.__cause__, KeyError)


async def test_with_a_table_the_condition_is_looked_at_when_that_changes() -> None:
    table: Table[str, Item] = Table("items", key=lambda item: item.name)
    looks = 0

    def there() -> bool:
        nonlocal looks
        looks += 1
        return "b" in table

    async def write() -> None:
        for name in ("a", "b"):
            with table.txn() as txn:
                txn.put(Item(name))
            await anyio.sleep(0.02)

    async with anyio.create_task_group() as group:
        group.start_soon(write)
        await eventually(there, on=table)
    assert looks == 3


async def test_a_table_that_never_changes_is_given_up() -> None:
    table: Table[str, Item] = Table("items", key=lambda item: item.name)
    with pytest.raises(AssertionError, match="did not hold"):
        await eventually(lambda: "b" in table, within=0.01, on=table)
