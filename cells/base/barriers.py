"""Moments of the agent's start, as types: ``@after(PodsExposed)`` waits for one.

Why: a cell that waits imports no family above its own, and does not know which cell brings the moment.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ApiServed", "HealthAddressesClaimed", "PodsExposed"]


@dataclass(frozen=True, slots=True)
class HealthAddressesClaimed:
    """The addresses of this node's health endpoint are known, if it has one: it is published with them."""


@dataclass(frozen=True, slots=True)
class PodsExposed:
    """Restored endpoints are in the table of all endpoints, and have their addresses."""


@dataclass(frozen=True, slots=True)
class ApiServed:
    """The socket of the node's API accepts requests."""
