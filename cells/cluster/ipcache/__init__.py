"""The ipcache: whose every prefix is, and how to get there.

Controller and reconciler: other cells claim prefixes, each under the name of its resource and as a source of
known strength. The claim that counts is the prefix's row in the table ``ipcache``, and in the map
cilium_ipcache, and is its only writer.
Needs:  Maps, Identities; every Member[IdentityFollower], which learns an identity before a prefix gets it.
Gives:  Ipcache, Table[IpcacheEntry]; the table ipcache-status tells what the kernel refused.
Why:    an address may be the node's and a pod's, or be known from several places. These need not know of
        each other: where the stronger claim goes, the other one counts again.
"""

from cells.cluster.ipcache.cell import cell
from cells.cluster.ipcache.entry import IpcacheEntry, Prefix, Source, prefix_of
from cells.cluster.ipcache.ipcache import IdentityFollower, Ipcache
from cells.cluster.ipcache.rows import IpcacheMap, IpcacheRows

__all__ = [
    "IdentityFollower",
    "Ipcache",
    "IpcacheEntry",
    "IpcacheMap",
    "IpcacheRows",
    "Prefix",
    "Source",
    "cell",
    "prefix_of",
]
