"""A client of the Kubernetes API: reads, watches, writes, with the errors of both."""

from __future__ import annotations

from cells.kubernetes.client.access import Access
from cells.kubernetes.client.calls import Bucket
from cells.kubernetes.client.client import Client
from cells.kubernetes.client.credentials import Credentials
from cells.kubernetes.client.transport import Transport

__all__ = ["connect"]


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
