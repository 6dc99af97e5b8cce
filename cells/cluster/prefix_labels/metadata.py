"""What sources say of prefixes.

For:    sources of labels.   Needs: Table[PrefixLabels].   Gives: PrefixMetadata, PrefixLabels.
Source: Cilium 1.17, the ipcache's metadata: UpsertLabels, RemoveLabels, OverrideIdentity.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cells.cluster.identity import Scope, scope_for
from cells.cluster.ipcache import Prefix, Source
from lifecycle import Table


class PrefixLabels(msgspec.Struct, frozen=True, kw_only=True):
    """What a resource says of a prefix; a row of the table ``prefix-labels``."""

    prefix: Prefix
    resource: str
    """``<kind>/<namespace>/<name>``. It has one word on a prefix."""
    source: Source
    labels: tuple[str, ...]
    """``source:key[=value]``."""
    override: bool = False
    """Whether these are all the labels there are, whatever others say of the prefix."""


class PrefixMetadata:
    """Where sources put what they know.

    A source that has something to say from the start announces itself by ``table.initializer()`` in its
    constructor. Until all of them are done no leftover of the ipcache goes for want of a claim.
    """

    def __init__(self, table: Table[PrefixLabels]) -> None:
        self.table = table

    def upsert(self, *rows: PrefixLabels) -> None:
        """Say this, each instead of what its resource said of the prefix before.

        Raises ValueError for labels that make an identity of the cluster's, as a pod's do: prefixes have ones
        of this node's own, which are there without waiting.
        """
        for row in rows:
            if scope_for(row.labels) is Scope.CLUSTER:
                raise ValueError(
                    f"labels of {row.prefix} by {row.resource}: {', '.join(row.labels)}: expected sources"
                    " reserved, cidr, cidrgroup or fqdn, or labels of a node with reserved:remote-node"
                )
        with self.table.txn() as txn:
            for row in rows:
                txn.put(row)

    def remove(self, resource: str, prefixes: Iterable[Prefix]) -> None:
        """The resource says nothing more of these prefixes; of some it need not have."""
        with self.table.txn() as txn:
            for prefix in prefixes:
                if self.table.get((prefix, resource)) is not None:
                    txn.delete((prefix, resource))
