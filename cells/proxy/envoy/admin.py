"""What a running Envoy says of itself.

Gives:  has_taken(), ended().
Source: envoyproxy.io, the administration interface; statistics of xDS subscriptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import anyio

WARMING = "listener_manager.total_listeners_warming"


async def ended(socket: Path) -> None:
    """Return once Envoy has closed a connection over which it is asked nothing: it has ended, as a rule."""
    with suppress(OSError, anyio.EndOfStream, anyio.BrokenResourceError):
        async with await anyio.connect_unix(socket) as stream:
            await stream.receive()


async def has_taken(socket: Path, versions: Mapping[str, str]) -> bool | None:
    """Whether Envoy has these versions of its configuration, and its listeners are ready; None: no answer."""
    import httpcore

    try:
        async with httpcore.AsyncConnectionPool(uds=str(socket)) as pool:
            answer = await pool.request("GET", "http://envoy/stats?filter=version_text$|listeners_warming$")
    except (OSError, httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException):
        return None
    said = dict(line.split(": ", 1) for line in answer.content.decode().splitlines() if ": " in line)
    return said.get(WARMING) == "0" and all(
        said.get(name, "").strip('"') == version for name, version in versions.items()
    )
