"""Limits on the resources that the clients of one server may use."""

from __future__ import annotations

import msgspec

from lifecycle.http.messages import MAX_BODY


class ServerLimits(msgspec.Struct, frozen=True):
    """Counts, bytes and seconds. A client over a limit loses its connection; others are not affected."""

    connections: int = 256
    """Open connections. A further one replaces one that waits for its client."""
    per_peer: int = 128
    """Open connections of one address, or of one process on a unix socket."""
    body: int = MAX_BODY
    """Maximum size of a request's body in bytes; a request with a larger one has ``too_large`` set."""
    in_flight: int = 4 << 20
    """Total size of bodies and answers in memory. Above it, large bodies are refused and requests wait."""
    idle_seconds: float = 75.0
    """Maximum pause between requests."""
    request_seconds: float = 20.0
    """Maximum time from a request's first byte to its last."""
    send_seconds: float = 10.0
    """Maximum time for an empty answer; a longer one has more, by ``send_rate``."""
    send_rate: int = 64 << 10
    """Bytes a second."""


SCRAPED = ServerLimits(connections=64, per_peer=32, body=0, in_flight=2 << 20)
"""For a port with a few monitors as clients that other hosts can reach."""
