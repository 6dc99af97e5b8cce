"""Frontends to map entries: numbers, differences, the order of writes.

Pure values; no cell.
Gives: LoadBalancer, Batch, Write.
"""

from cells.services.balancer.balancer import LoadBalancer, MaglevTable
from cells.services.balancer.entries import (
    AFFINITY_MATCH,
    BACKENDS,
    MAGLEV,
    REVERSE_NAT,
    SERVICES,
    SOURCE_RANGES,
    Batch,
    LookUpTable,
    MapKey,
    Write,
    batched,
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
    "Batch",
    "IdAllocator",
    "IdsExhaustedError",
    "LoadBalancer",
    "LookUpTable",
    "MaglevTable",
    "MapKey",
    "Write",
    "batched",
    "service_key",
]
