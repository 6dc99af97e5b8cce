"""The API server for cells that talk to it themselves: a client, elections, kinds of their choice.

Needs: cells.kubernetes.client, .leases, .source.   Gives: the names below.
Why:   apart from the cell's own names, so that an agent without a server does not load what it never uses.
"""

from __future__ import annotations

from cells.kubernetes.client import (
    Access,
    AccessError,
    ApiError,
    Client,
    ConflictError,
    KubernetesError,
    NotFoundError,
    UnreachableError,
    connect,
)
from cells.kubernetes.client.rate import Bucket
from cells.kubernetes.leases import LEASES, Election, Lease
from cells.kubernetes.object_events import EVENTS, EventRecorder
from cells.kubernetes.source.api_server import access_of
from cells.kubernetes.source.reflector import Reflector
from cells.kubernetes.source.sink import Sink
from cells.kubernetes.source.status import SourceStatus

__all__ = [
    "EVENTS",
    "LEASES",
    "Access",
    "AccessError",
    "ApiError",
    "Bucket",
    "Client",
    "ConflictError",
    "Election",
    "EventRecorder",
    "KubernetesError",
    "Lease",
    "NotFoundError",
    "Reflector",
    "Sink",
    "SourceStatus",
    "UnreachableError",
    "access_of",
    "connect",
]
