"""Endpoints outlive the agent: what the last one left is read, believed where it still holds, and taken on.

Reconciler, once, in four steps that others order themselves by:
OldEndpoints (read from disk) → RestoredEndpoints (addresses, ids and identities claimed, left-overs gone)
→ ExposedEndpoints (visible) → RegeneratedEndpoints (the kernel made right where it was not).
What an endpoint has whose state is unreadable, or whose policy map the kernel would not give, stays
reserved until its link goes: KeptEndpoints.
Needs:  StateFiles, Ipam, HostLinks, Maps, PolicyMaps, Endpoints.   Gives: the four.
Why:    pods keep talking while there is no agent; they must not notice that one comes back.
"""

from cells.endpoint_restore.cell import cell
from cells.endpoint_restore.edges import LeftAddress, LeftMaps, LinkEvents, RestoreAddresses, RestoreLinks
from cells.endpoint_restore.exposed import ExposedEndpoints, RegeneratedEndpoints
from cells.endpoint_restore.kept import KeptEndpoints
from cells.endpoint_restore.old import OldEndpoints
from cells.endpoint_restore.restored import RestoredEndpoints

__all__ = [
    "ExposedEndpoints",
    "KeptEndpoints",
    "LeftAddress",
    "LeftMaps",
    "LinkEvents",
    "OldEndpoints",
    "RegeneratedEndpoints",
    "RestoreAddresses",
    "RestoreLinks",
    "RestoredEndpoints",
    "cell",
]
