"""A table counts as synced once all rows of its complete source are processed."""

from typing import Any

import anyio
import pytest

from cells.policy.control.objects import ProcessedChanges
from lifecycle import Table

pytestmark = pytest.mark.anyio


async def test_all_waiters_are_woken() -> None:
    table: Table[str, str] = Table("rows", key=lambda row: row)
    complete = table.initializer()
    followed = ProcessedChanges(table)
    woken: list[int] = []

    async def wait(number: int) -> None:
        await followed.known()
        woken.append(number)

    async def follow() -> None:
        taken: list[Any] = []
        async for batch in followed.batches():
            taken += batch
            assert not woken, "it is taken in when the next batch is asked for"

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as waiting:
                for number in range(3):
                    waiting.start_soon(wait, number)
                await anyio.wait_all_tasks_blocked()
                table.put("first")
                complete.done()
                await anyio.wait_all_tasks_blocked()
                assert not woken
                tasks.start_soon(follow)
            tasks.cancel_scope.cancel()
    assert sorted(woken) == [0, 1, 2]
    assert followed.caught_up


async def test_a_deletion_is_not_lost_when_the_work_fails() -> None:
    table: Table[str, str] = Table("rows", key=lambda row: row)
    followed = ProcessedChanges(table)
    with table.txn() as txn:
        txn.put("stays")
        txn.put("goes")
    batches = followed.batches()
    assert [one.key for one in await anext(batches)] == ["stays", "goes"]
    with table.txn() as txn:
        txn.delete("goes")
    failed = await anext(batches)
    batches.put_back(failed)
    table.put("comes")
    with anyio.fail_after(30):
        again = await anext(batches)
    assert [(one.key, one.deleted) for one in again] == [("goes", True), ("comes", False)]
    assert not followed.caught_up
