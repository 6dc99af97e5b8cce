"""The notes of the folder, as a table that follows it.

Source: looks into the folder at the start and then now and then, writes Table[str, Note].
"""

import re

import msgspec
from anyio import to_thread

from finder.disk import Files
from lifecycle import (
    Duration,
    Health,
    Hook,
    Jobs,
    Lifecycle,
    Settings,
    Table,
    config,
    module,
    provide,
    seconds,
)


class FolderSettings(Settings, frozen=True):
    """Settings of the folder cell."""

    look_every: Duration = seconds(2)
    """How often the folder is looked into."""


class Note(msgspec.Struct, frozen=True):
    """A note, by its name."""

    name: str
    text: str

    def words(self) -> set[str]:
        """What it can be found by: its words in lower case, tags with their #."""
        return set(re.findall(r"#?\w+", self.text.lower()))


def notes(
    settings: FolderSettings, files: Files, lifecycle: Lifecycle, jobs: Jobs, health: Health
) -> Table[str, Note]:
    """The table. What needs it starts once the notes that are there have been read."""
    table: Table[str, Note] = Table("notes", key=lambda note: note.name, indexes={"word": Note.words})
    first = table.initializer("first look into the folder")

    async def look() -> None:
        found = await to_thread.run_sync(files.read)
        with table.txn() as txn:
            txn.replace_all(Note(name, text) for name, text in found.items())
        first.done()
        health.ok(f"{len(table)} notes")

    lifecycle.append(Hook("read the notes", look))
    jobs.timer("look", look, settings.look_every)
    return table


cell = module("folder", "Notes of the folder", config(FolderSettings), provide(notes))
