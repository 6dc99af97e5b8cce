"""Frontends to map entries: numbers, differences, the order of writes.

Pure values; no cell.
Gives: LoadBalancer, Write.
"""

from cells.services.balancer.balancer import LoadBalancer, MaglevTable, Write
from cells.services.balancer.entries import (
    AFFINITY_MATCH,
    BACKENDS,
    MAGLEV,
    REVERSE_NAT,
    SERVICES,
    SOURCE_RANGES,
    MapKey,
    service_key,
)
from cells.services.balancer.ids import IdAllocator, IdsExhaustedError

__all__ = [
    "AFFINITY_MATCH",
    "BACKENDS",
    "MAGLEV",
    "REVERSE_NAT",
    "SERVICES",
    "SOURCE_RANGES",
    "IdAllocator",
    "IdsExhaustedError",
    "LoadBalancer",
    "MaglevTable",
    "MapKey",
    "Write",
    "service_key",
]
