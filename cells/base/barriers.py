"""Moments of the agent's start, as types: ``@after(PodsExposed)`` waits for one.

Why: a cell that waits imports no family above its own, and does not know which cell brings the moment.
"""

from __future__ import annotations

import msgspec

__all__ = ["ApiServed", "HealthAddressesClaimed", "PodsExposed"]


class HealthAddressesClaimed(msgspec.Struct, frozen=True):
    """The addresses of this node's health endpoint are known, if it has one: it is published with them."""


class PodsExposed(msgspec.Struct, frozen=True):
    """Restored endpoints are in the table of all endpoints, and have their addresses."""


class ApiServed(msgspec.Struct, frozen=True):
    """The socket of the node's API accepts requests."""
