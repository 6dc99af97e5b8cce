"""A page for every tag, listing the notes that have it.

Controller: table to table, nothing else.
"""

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from finder.folder import Note
from lifecycle import Derived, Table, module, provide


class Page(msgspec.Struct, frozen=True):
    """What a page should say."""

    tag: str
    text: str


def wanted(notes: Iterable[Note]) -> dict[str, Page]:
    """The pages there should be, by tag."""
    by_tag = defaultdict(list)
    for note in notes:
        for word in note.words():
            if word.startswith("#"):
                by_tag[word.removeprefix("#")].append(note.name)
    return {
        tag: Page(tag, f"# {tag}\n\n" + "".join(f"- {name}\n" for name in sorted(names)))
        for tag, names in by_tag.items()
    }


def pages(notes: Table[str, Note]) -> Derived[str, Page]:
    """Follows the notes by itself."""
    return notes.derive(wanted, name="pages")


cell = module("tags", "Pages there should be", provide(pages))
