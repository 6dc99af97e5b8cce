"""All nodes and their pods in the store, as tables.

Source: keys below nodes/v1 and ip/v1 in; ``shared-nodes`` and ``shared-addresses`` out.
Needs:  KVStore.   Gives: SharedTables.
"""

from __future__ import annotations

from cells.cluster.kvstore import IPS, NODES, KVStore, PrefixWatch
from cells.cluster.nodes import ClusterNode
from cells.cluster.shared.addresses import SharedAddress, read_address
from cells.cluster.shared.nodes import read_node
from lifecycle import Jobs, Table, Tables


class SharedTables:
    """Two tables, by the keys less their prefixes; empty, and complete, where there is no store."""

    def __init__(self, store: KVStore, *, jobs: Jobs, tables: Tables) -> None:
        self.nodes: Table[ClusterNode] = Table("shared-nodes", key=lambda node: node.full_name)
        self.addresses: Table[SharedAddress] = Table("shared-addresses", key=lambda row: row.address)
        if not store.enabled:
            return
        tables.add(self.nodes, self.addresses)
        nodes = PrefixWatch(store, NODES, self.nodes, read_node, scope="nodes/v1")
        addresses = PrefixWatch(store, IPS, self.addresses, read_address, scope="ip/v1")
        jobs.observe("follow nodes", nodes)
        jobs.observe("follow addresses", addresses)
