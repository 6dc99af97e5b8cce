"""How the source of each kind of objects is.

Needs: nothing.   Gives: SourceStatus, State.
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["waiting", "synced", "watching", "failing", "absent"]


class SourceStatus(msgspec.Struct, frozen=True):
    """How the source of one kind is."""

    kind: str
    """``pods``, ``ciliumnodes.cilium.io``."""
    state: State
    """``waiting`` for its first list, ``watching`` (or ``synced``: a folder), ``failing``, ``absent`` when no
    server serves the kind."""
    objects: int
    synced: bool
    """Whether everything there was has been seen once."""
    changed: float
    """When something was last heard of it, in seconds since the epoch; 0 for never."""
    error: str = ""
    broken: tuple[str, ...] = ()
    """Objects that cannot be read, with what is wrong; their last good rows stay."""
