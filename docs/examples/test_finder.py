"""The daemon's tests: what a person would notice, with one fake where it touches the disk.

Run them as: PYTHONPATH=docs/examples pytest docs/examples
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from finder import finder
from finder.answers import Answers
from finder.disk import Files
from finder.folder import Note
from finder.pages import Pages
from finder.tags import Page, wanted
from lifecycle import Hive, HiveError, StartError, Table, replace
from lifecycle.testing import Recorder, VirtualClock, fail_each_hook, fake, started

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Shelf:
    """Notes without a disk."""

    def __init__(self, **notes: str) -> None:
        self.notes = notes

    def read(self) -> dict[str, str]:
        return dict(self.notes)


@asynccontextmanager
async def running(directory: Path, files: Files) -> AsyncIterator[Hive]:
    async with started(finder, replace(Files, files), settings=settings(directory)) as hive:
        yield hive


def settings(directory: Path) -> dict[str, object]:
    return {"pages": directory / "pages", "socket": directory / "socket"}


async def ask(directory: Path, word: str) -> str:
    async with await anyio.connect_unix(directory / "socket") as client:
        await client.send(f"{word}\n".encode())
        return "".join([part.decode() async for part in client])


def test_a_page_lists_the_notes_of_its_tag() -> None:
    notes = [Note("b", "buy milk #todo"), Note("a", "#todo call"), Note("c", "nothing")]
    assert wanted(notes) == {"todo": Page("todo", "# todo\n\n- a\n- b\n")}


async def test_a_note_is_found_by_a_word_of_it(tmp_path: Path) -> None:
    async with running(tmp_path, Shelf(shopping="Milk and #Bread", other="no")):
        assert await ask(tmp_path, "milk") == "shopping\n"
        assert await ask(tmp_path, "#bread") == "shopping\n"
        assert await ask(tmp_path, "wine") == "(none)\n"


async def test_a_new_note_is_seen_at_the_next_look(tmp_path: Path) -> None:
    shelf = Shelf()
    with VirtualClock() as clock:
        async with running(tmp_path, shelf) as hive:
            shelf.notes["later"] = "wine"
            notes = hive.get(Table[str, Note])
            assert await clock.until(lambda: "later" in notes) == pytest.approx(2)


async def test_pages_follow_the_notes(tmp_path: Path) -> None:
    page = tmp_path / "pages" / "todo.md"
    async with running(tmp_path, Shelf(a="call #todo", b="#todo")) as hive:
        await hive.get(Pages).reconciler.wait_realised("todo")
        assert page.read_text(encoding="utf-8") == "# todo\n\n- a\n- b\n"
        with hive.get(Table[str, Note]).txn() as txn:
            txn.put(Note("a", "done"))
            txn.put(Note("b", "done"))
        await hive.get(Pages).reconciler.wait_realised("todo")
        assert not page.exists()


async def test_pages_of_before_stay_until_the_notes_are_known(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    page = tmp_path / "pages" / "todo.md"
    page.write_text("# todo\n", encoding="utf-8")

    def unreadable() -> dict[str, str]:
        raise OSError("disk on fire")

    with pytest.raises(StartError, match="disk on fire"):
        async with running(tmp_path, fake(Files, read=unreadable)):
            pass
    assert page.exists()


async def test_a_folder_that_is_missing_is_one_clear_line(tmp_path: Path) -> None:
    hive = Hive(finder, settings={**settings(tmp_path), "folder": tmp_path / "nowhere"})
    with pytest.raises(StartError) as caught:
        await hive.start()
    (error,) = caught.value.exceptions
    assert isinstance(error, HiveError)
    assert (
        str(error) == f"folder {tmp_path / 'nowhere'} is not a directory: make it, or name one with --folder"
    )


@pytest.mark.parametrize("seed", range(4))
async def test_nobody_is_answered_before_the_notes_are_read(tmp_path: Path, seed: int) -> None:
    recorder = Recorder(seed)
    async with recorder.started(finder, replace(Files, Shelf()), settings=settings(tmp_path)):
        recorder.assert_before((Table[str, Note], Answers), (Table[str, Note], Pages))
    recorder.assert_clean()


async def test_whichever_hook_fails_the_daemon_ends_cleanly(tmp_path: Path) -> None:
    failed = await fail_each_hook(
        finder, fakes=lambda: [replace(Files, Shelf(a="#b"))], settings=settings(tmp_path)
    )
    assert {one.hook for one in failed} >= {
        "read the notes",
        "make the directory of pages",
        "serve the socket",
    }


async def test_the_notes_on_disk_are_read(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("milk", encoding="utf-8")
    async with started(finder, settings={**settings(tmp_path), "folder": tmp_path / "notes"}):
        assert await ask(tmp_path, "milk") == "a\n"
