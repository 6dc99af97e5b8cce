"""What the maps have of each frontend.

Gives: ServedFrontend, served_frontends.
"""

from __future__ import annotations

import msgspec

from cells.services.model import Frontend, FrontendKey
from lifecycle import Table


class ServedFrontend(msgspec.Struct, frozen=True, gc=False):
    """A row of the table ``services``: a frontend in the maps, by the number it has there."""

    id: int
    """Its reverse NAT index, the service id that Cilium's commands print."""
    frontend: Frontend
    installed: Frontend | None = None
    """The same as the maps have it, where that differs: backends keep states that sources do not tell."""

    @property
    def shown(self) -> Frontend:
        """The frontend as the maps have it."""
        return self.installed or self.frontend

    @property
    def key(self) -> FrontendKey:
        """Its address and scope."""
        return self.frontend.key


def served_frontends() -> Table[ServedFrontend]:
    """The ``services`` table, by address and scope."""
    return Table("services", key=lambda one: one.key)
