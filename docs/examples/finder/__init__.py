"""A daemon that makes a folder of notes searchable: a page for every #tag, and answers on a socket.

What flows where:  folder ─▶ Table[str, Note] ─┬─▶ Derived[str, Page] ─▶ directory of pages
                                          └─▶ answers on a unix socket
Run it:            python -m finder --folder=notes --pages=pages --socket=finder.sock
"""

from finder import answers, disk, folder, pages, tags
from lifecycle import group

__all__ = ["finder"]

finder = group(disk.cell, folder.cell, tags.cell, pages.cell, answers.cell)
