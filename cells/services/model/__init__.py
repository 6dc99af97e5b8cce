"""Kubernetes' services as the datapath serves them: frontends, backends, and which serve which.

Pure values; no cell.
Gives: ServiceCatalog, frontends_of, backends_of, Frontend, Backend and their parts.
"""

from cells.services.model.annotations import faults_of
from cells.services.model.backends import WEIGHT, backends_of, refused_backends, state_of, weight_of
from cells.services.model.catalog import ServiceCatalog
from cells.services.model.claims import Delete, FrontendChange, Upsert
from cells.services.model.frontends import (
    backends_by_port,
    frontends_of,
    is_headless,
    seen_inside,
    selectable,
)
from cells.services.model.health import HealthAnswer, health_answers
from cells.services.model.options import EXPOSURE_LABEL, ZONE_LABEL, LoadBalancerOptions, Node
from cells.services.model.redirect import Redirect, read_redirect
from cells.services.model.reserved import (
    EXTERNAL_IPS,
    HOST_IP,
    INGRESS,
    Holder,
    RefusedAddress,
    Reservation,
    ReservedAddresses,
    cluster_reservations,
    is_special,
    node_reservations,
    pod_reservations,
)
from cells.services.model.types import (
    INTERNAL,
    PROTOCOLS,
    Address,
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    IPAddress,
    ServiceFlag,
    ServiceName,
    ServiceType,
    parse_address,
)
from cells.services.model.unserved import unserved_of

__all__ = [
    "EXPOSURE_LABEL",
    "EXTERNAL_IPS",
    "HOST_IP",
    "INGRESS",
    "INTERNAL",
    "PROTOCOLS",
    "WEIGHT",
    "ZONE_LABEL",
    "Address",
    "Backend",
    "BackendState",
    "Delete",
    "Frontend",
    "FrontendChange",
    "FrontendKey",
    "HealthAnswer",
    "Holder",
    "IPAddress",
    "LoadBalancerOptions",
    "Node",
    "Redirect",
    "RefusedAddress",
    "Reservation",
    "ReservedAddresses",
    "ServiceCatalog",
    "ServiceFlag",
    "ServiceName",
    "ServiceType",
    "Upsert",
    "backends_by_port",
    "backends_of",
    "cluster_reservations",
    "faults_of",
    "frontends_of",
    "health_answers",
    "is_headless",
    "is_special",
    "node_reservations",
    "parse_address",
    "pod_reservations",
    "read_redirect",
    "refused_backends",
    "seen_inside",
    "selectable",
    "state_of",
    "unserved_of",
    "weight_of",
]
