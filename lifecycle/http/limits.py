"""How much of the process the clients of one server may take."""

from __future__ import annotations

import msgspec

from lifecycle.http.messages import MAX_BODY


class ServerLimits(msgspec.Struct, frozen=True):
    """Counts, bytes and seconds. A client over a limit loses its connection; others are not affected."""

    connections: int = 256
    """At once. A further one takes the place of one that waits for its client."""
    per_peer: int = 128
    """Of one address, or of one process on a unix socket."""
    body: int = MAX_BODY
    """Bytes of a request's body that are read; of more, the request has ``too_large`` set."""
    in_flight: int = 4 << 20
    """Bytes of bodies held at once, and of answers. With more, large bodies are refused and requests wait."""
    idle_seconds: float = 75.0
    """Silence between requests."""
    request_seconds: float = 20.0
    """From a request's first byte to its last."""
    send_seconds: float = 10.0
    """For an answer of no length; a longer one may take as long as ``send_rate`` allows."""
    send_rate: int = 64 << 10
    """Bytes a second."""


SCRAPED = ServerLimits(connections=64, per_peer=32, body=0, in_flight=2 << 20)
"""For a port that answers GETs of a few monitors and is reached by others."""
