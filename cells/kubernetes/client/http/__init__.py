"""HTTP/1.1 as a client: connections that are kept, read by llhttp, over TCP, TLS and proxies.

Needs: httptools, an event loop.   Gives: Connection, Dialler, Pool.
Why:   an event of a watch is a chunk of its own: framing them in Python costs more than decoding them.
"""

from __future__ import annotations

from cells.kubernetes.client.http.connection import Connection
from cells.kubernetes.client.http.dial import Dialler
from cells.kubernetes.client.http.pool import Pool

__all__ = ["Connection", "Dialler", "Pool"]
