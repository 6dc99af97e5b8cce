"""Endpoints outlive the agent: what the last one left is read, believed where it still holds, and taken on.

Reconciler, once, in four steps that others order themselves by:
OldEndpoints (read from disk) → RestoredEndpoints (addresses, ids and identities claimed, left-overs gone)
→ ExposedEndpoints (visible) → RegeneratedEndpoints (the kernel made right where it was not).
What an endpoint has whose state is unreadable, or whose policy map the kernel would not give, stays
reserved until its link goes: QuarantinedEndpoints.
Needs:  StateFiles, Ipam, HostLinks, Maps, PolicyMaps, Endpoints.   Gives: the four.
Why:    pods keep talking while there is no agent; they must not notice that one comes back.
"""

from cells.endpoint.restore.cell import cell
from cells.endpoint.restore.edges import (
    FormerAgent,
    LinkEvents,
    LxcRow,
    RestoreAddresses,
    RestoreLinks,
    StaleMaps,
)
from cells.endpoint.restore.exposed import ExposedEndpoints, RegeneratedEndpoints
from cells.endpoint.restore.old import OldEndpoints
from cells.endpoint.restore.quarantined import QuarantinedEndpoints
from cells.endpoint.restore.restored import RestoredEndpoints

__all__ = [
    "ExposedEndpoints",
    "FormerAgent",
    "LinkEvents",
    "LxcRow",
    "OldEndpoints",
    "QuarantinedEndpoints",
    "RegeneratedEndpoints",
    "RestoreAddresses",
    "RestoreLinks",
    "RestoredEndpoints",
    "StaleMaps",
    "cell",
]
