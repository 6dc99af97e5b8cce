"""The delete queue is drained completely under the lock that blocks plugins."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest
import structlog
from structlog.testing import capture_logs

from cells.cni import DeleteQueue, QueueLock
from lifecycle import HiveError, Lifecycle
from lifecycle.testing import eventually
from tests.unit.cni_server.harness import Harness

pytestmark = pytest.mark.anyio
FLOCK = struct.Struct("hhqqi4x")


def lock(directory: Path, kind: int) -> int:
    """Take the plugin's side of the lock; raises BlockingIOError when it is held against us."""
    fd = os.open(directory / "lockfile", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, FLOCK.pack(kind, 0, 0, 0, 0))
    except OSError:
        os.close(fd)
        raise
    return fd


def queue_of(served: Harness, lock_seconds: float = 5.0) -> tuple[QueueLock, Lifecycle]:
    """The queue's lock, and the hooks that take it and then drain the queue."""
    directory = served.folder / "deleteQueue"
    directory.mkdir(exist_ok=True)
    lifecycle = Lifecycle("test")
    log = structlog.get_logger()
    queue_lock = QueueLock(directory, lifecycle, log, lock_seconds)
    DeleteQueue(directory, served.detacher, lifecycle, log)
    return queue_lock, lifecycle


@asynccontextmanager
async def started(lifecycle: Lifecycle) -> AsyncIterator[None]:
    async with AsyncExitStack() as hooks:
        for spec in lifecycle.specs:
            await hooks.enter_async_context(spec.context())
        yield


async def test_queued_deletes_are_done_and_their_files_go(served: Harness) -> None:
    for number in range(4):
        await served.call("ADD", f"cid{number}", pod=f"pod{number}")
    queue, lifecycle = queue_of(served)
    directory = served.folder / "deleteQueue"
    (directory / "1.delete").write_text('{"container-id":"cid0"}')
    (directory / "2.delete").write_text('{"container-id":"unknown"}')
    (directory / "3.delete").write_text("cni-attachment-id:cid1:eth0")
    (directory / "4.delete").write_text("")
    (directory / "5.delete").write_bytes(b"\xff{]")
    (directory / "6.delete").write_text('{"container-id":""}')
    (directory / "other").touch()
    async with started(lifecycle):
        assert sorted(e.container_id for e in served.node.all()) == ["cid2", "cid3"]
        assert sorted(path.name for path in directory.iterdir()) == ["lockfile", "other"]
        assert (directory / "lockfile").stat().st_mode & 0o7777 == 0o644
        await eventually(lambda: len(served.node.links) == 2)
        queue.release()


async def test_unreadable_queued_deletes_delay_no_other(served: Harness) -> None:
    await served.call("ADD")
    queue, lifecycle = queue_of(served)
    directory = served.folder / "deleteQueue"
    (directory / "1.delete").mkdir()
    (directory / "2.delete").symlink_to("gone")
    os.mkfifo(directory / "3.delete")
    (directory / "4.delete").write_text('{"container-id":"cid1"}')
    with capture_logs() as logs:
        async with started(lifecycle):
            assert queue.held
            assert not served.node.book
    skipped = [Path(line["path"]).name for line in logs if line["event"] == "queued delete skipped"]
    assert skipped == ["1.delete", "2.delete", "3.delete"]
    left = ["1.delete", "2.delete", "3.delete", "lockfile"]
    assert sorted(path.name for path in directory.iterdir()) == left


async def test_a_queued_delete_with_an_unremovable_file_is_done_and_logged(
    served: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.call("ADD")
    _, lifecycle = queue_of(served)
    (served.folder / "deleteQueue" / "1.delete").write_text('{"container-id":"cid1"}')

    def refuse(_path: Path, missing_ok: bool = False) -> None:
        del missing_ok
        raise OSError(30, "Read-only file system")

    with capture_logs() as logs, monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        async with started(lifecycle):
            assert not served.node.book
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert (warning["event"], warning["error"]) == ("queued delete not removed", "Read-only file system")


async def test_more_requests_than_plugins_may_leave_are_all_done(served: Harness) -> None:
    await served.call("ADD", "cid299")
    _, lifecycle = queue_of(served)
    directory = served.folder / "deleteQueue"
    for number in range(300):
        (directory / f"{number}.delete").write_text(f'{{"container-id":"cid{number}"}}')
    async with started(lifecycle):
        assert not served.node.book
        assert [path.name for path in directory.iterdir()] == ["lockfile"]


async def test_plugins_are_held_back_until_both_sockets_serve(served: Harness) -> None:
    queue, lifecycle = queue_of(served)
    directory = served.folder / "deleteQueue"
    async with started(lifecycle):
        assert queue.held
        with pytest.raises(BlockingIOError):
            lock(directory, fcntl.F_RDLCK)
        queue.release()
        assert not queue.held
        os.close(lock(directory, fcntl.F_RDLCK))


async def test_a_plugin_in_the_middle_of_writing_is_waited_for(served: Harness) -> None:
    await served.call("ADD")
    queue, lifecycle = queue_of(served)
    directory = served.folder / "deleteQueue"
    held = lock(directory, fcntl.F_RDLCK)
    async with anyio.create_task_group() as tasks:

        async def start() -> None:
            async with started(lifecycle):
                assert queue.held
                assert not served.node.book

        tasks.start_soon(start)
        await eventually(lambda: queue.held)
        assert served.node.book
        (directory / "late.delete").write_text('{"container-id":"cid1"}')
        os.close(held)


async def test_a_plugin_that_hangs_does_not_keep_the_agent_from_starting(served: Harness) -> None:
    _, lifecycle = queue_of(served, lock_seconds=0.05)
    held = lock(served.folder / "deleteQueue", fcntl.F_RDLCK)
    with capture_logs() as logs:
        async with started(lifecycle):
            pass
    os.close(held)
    assert any(line["event"] == "delete queue not locked, continuing without the lock" for line in logs)


async def test_an_unusable_delete_queue_is_reported_in_one_line(served: Harness) -> None:
    _, lifecycle = queue_of(served)
    (served.folder / "deleteQueue").rmdir()
    (served.folder / "deleteQueue").touch()
    with pytest.raises(HiveError, match=r"delete queue .* is not usable: "):
        async with started(lifecycle):
            pass
