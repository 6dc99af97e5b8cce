"""A client of the Kubernetes API: reads, watches, writes, with the errors of both.

Needs: Access.   Gives: Client, Access, errors, connect().
"""

from __future__ import annotations

from cells.kubernetes.client.access import Access, Exec, in_cluster
from cells.kubernetes.client.client import Client, WatchEvent, events
from cells.kubernetes.client.credentials import Credentials
from cells.kubernetes.client.errors import (
    ApiError,
    ConflictError,
    CredentialsError,
    GoneError,
    KubernetesError,
    MalformedError,
    NotFoundError,
    Status,
    UnreachableError,
    status_error,
)
from cells.kubernetes.client.kubeconfig import from_kubeconfig
from cells.kubernetes.client.rate import Bucket
from cells.kubernetes.client.transport import Transport
from cells.kubernetes.urls import AccessError, checked_url

__all__ = [
    "Access",
    "AccessError",
    "ApiError",
    "Bucket",
    "Client",
    "ConflictError",
    "Credentials",
    "CredentialsError",
    "Exec",
    "GoneError",
    "KubernetesError",
    "MalformedError",
    "NotFoundError",
    "Status",
    "Transport",
    "UnreachableError",
    "WatchEvent",
    "checked_url",
    "connect",
    "events",
    "from_kubeconfig",
    "in_cluster",
    "status_error",
]


def connect(
    access: Access,
    *,
    agent: str = "hive",
    qps: float = 10.0,
    burst: int = 20,
    timeout: float = 30.0,
    keep_alive: float = 30.0,
) -> Client:
    """A client; nothing is sent before it is used. ``timeout`` in seconds, of connecting and of an answer."""
    credentials = Credentials(access)
    transport = Transport(access, credentials, connect=timeout, keep_alive=keep_alive)
    return Client(transport, credentials, Bucket(qps, burst), agent=agent, timeout=timeout)
