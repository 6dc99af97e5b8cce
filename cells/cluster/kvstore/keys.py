"""Where what is in the store.

Needs: nothing.   Gives: the prefixes.
Source: Cilium 1.17, the keys of its kvstore; each reads what the other's agents write.
"""

from __future__ import annotations

from typing import Final

HEARTBEAT: Final = "cilium/.heartbeat"
"""A time, written by the operator every HEARTBEAT_INTERVAL."""
HEARTBEAT_INTERVAL: Final = 60.0
INIT_LOCK: Final = "cilium/.initlock"
"""Taken once by who connects: so the store is known to take writes, too."""

IDENTITIES: Final = "cilium/state/identities/v1"
IDS: Final = f"{IDENTITIES}/id/"
"""Number to labels: the master key of an identity, without a lease."""
VALUES: Final = f"{IDENTITIES}/value/"
"""Labels and a node's address to the number: leased, it says that the node uses the identity."""
LOCKS: Final = f"{IDENTITIES}/locks/"

IPS: Final = "cilium/state/ip/v1/default/"
"""Address, or prefix, to whose it is."""
NODES: Final = "cilium/state/nodes/v1/"
"""Cluster and name to the node."""
CLUSTER_CONFIG: Final = "cilium/cluster-config/"
"""By name of a cluster: what its stores hold."""
SYNCED: Final = "cilium/synced/"
"""Canaries: cluster and prefix to the time at which all of it had been written."""
