"""What the maps have of each frontend, and which services do not get one that they claim.

Gives: ServedFrontend, served_frontends; ServiceConflict, service_conflicts; refused_addresses.
"""

from __future__ import annotations

import msgspec

from cells.services.model import Frontend, FrontendKey, RefusedAddress, ServiceName
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


class ServiceConflict(msgspec.Struct, frozen=True, gc=False):
    """A row of the table ``service-conflicts``: a frontend that several services claim; one has it."""

    frontend: FrontendKey
    served: ServiceName
    unserved: tuple[ServiceName, ...]


def service_conflicts() -> Table[ServiceConflict]:
    """The ``service-conflicts`` table, by address and scope."""
    return Table("service-conflicts", key=lambda one: one.frontend)


def refused_addresses() -> Table[RefusedAddress]:
    """The ``refused-service-addresses`` table, by service, field and address."""
    return Table("refused-service-addresses", key=lambda one: (str(one.service), one.part, str(one.address)))
