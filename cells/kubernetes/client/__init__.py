"""A client of the Kubernetes API: reads, watches, writes, with the errors of both."""

from __future__ import annotations

from typing import Final

from cells.kubernetes.client.access import Access
from cells.kubernetes.client.calls import Bucket
from cells.kubernetes.client.client import Client
from cells.kubernetes.client.credentials import Credentials
from cells.kubernetes.client.transport import Transport

__all__ = ["connect"]


DEFAULT: Final = 30.0
"""Seconds, as of client-go's dialer."""


def connect(
    access: Access,
    *,
    agent: str = "hive",
    qps: float = 10.0,
    burst: int = 20,
    timeout: float = 0.0,
    keep_alive: float = 0.0,
) -> Client:
    """A client; nothing is sent before it is used.

    ``timeout`` of connecting and of an answer, and ``keep_alive`` of idle connections, in seconds; 0: 30.
    """
    timeout, keep_alive = timeout or DEFAULT, keep_alive or DEFAULT
    credentials = Credentials(access)
    transport = Transport(access, credentials, connect=timeout, keep_alive=keep_alive)
    return Client(transport, credentials, Bucket(qps, burst), agent=agent, timeout=timeout)
