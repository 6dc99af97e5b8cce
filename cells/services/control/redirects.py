"""Local redirect policies, and what became of each.

Gives: LocalRedirect, local_redirects.
"""

from __future__ import annotations

import msgspec

from cells.services.model import Frontend, Redirect, ServiceName
from lifecycle import Table


class LocalRedirect(msgspec.Struct, frozen=True):
    """A row of the table ``local-redirects``."""

    name: ServiceName
    uid: str
    redirect: Redirect | None = None
    """None where the policy says nothing that can be done."""
    error: str = ""
    frontends: tuple[Frontend, ...] = ()
    """Those that have a ready pod on this node."""
    pods: tuple[tuple[str, str], ...] = ()
    """Addresses of their backends, and the pods that have them."""


def local_redirects() -> Table[LocalRedirect]:
    """The ``local-redirects`` table, by namespace and name."""
    return Table("local-redirects", key=lambda one: one.name)
