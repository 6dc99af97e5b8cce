"""The wire types of local redirect policies.

Needs: Model.   Gives: LRPSpec and its parts.
Source: Cilium 1.17, api/v1/openapi.yaml, LRPSpec.
"""

from __future__ import annotations

from msgspec import field

from cells.api.models.services import BackendAddress, FrontendAddress
from cells.api.models.v1 import Model


class LRPBackend(Model, frozen=True):
    """A pod, and where it serves."""

    backend_address: BackendAddress
    pod_id: str = ""


class FrontendMapping(Model, frozen=True):
    """An address and who serves it instead."""

    frontend_address: FrontendAddress
    backends: tuple[LRPBackend, ...] = ()


class LRPSpec(Model, frozen=True):
    """A policy."""

    uid: str = ""
    name: str = ""
    namespace: str = ""
    frontend_type: str = ""
    lrp_type: str = ""
    service_id: str = ""
    frontend_mappings: tuple[FrontendMapping, ...] = field(default=())
