"""One file of a folder of manifests.

Needs: nothing.   Gives: ManifestFile.
"""

from __future__ import annotations

import msgspec


class ManifestFile(msgspec.Struct, frozen=True):
    """One file of the folder."""

    name: str
    objects: int
    """As many as are in force of it."""
    error: str = ""
    """What is wrong with the file as it is now: ``file:line:column: what``."""
    left_out: str = ""
    """The first object of a kind that may be a mistake: ``file:line:column: what``, and how many more."""
    others: tuple[str, ...] = ()
    """Kinds in it that are for other programs: ``Deployment``."""
