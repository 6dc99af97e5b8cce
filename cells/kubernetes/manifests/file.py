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
