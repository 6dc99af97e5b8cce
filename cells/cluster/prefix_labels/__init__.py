"""Labels by prefix: each source adds what it knows, and all labels together make up the identity.

Controller: the table ``prefix-labels``, which any source may add to, and the claims of the ipcache in; claims
        of the ipcache, and labels of the host's identity, out.
Needs:  Ipcache, Identities, AgentConfig.   Gives: PrefixMetadata, PrefixLabels.
Why:    an address may be another node's and an API server's, or one of a network that a policy names.
        No source knows of the others, and packets have one identity.
"""

from cells.cluster.prefix_labels.claims import PrefixClaims
from cells.cluster.prefix_labels.metadata import PrefixLabels, PrefixMetadata
from cells.cluster.prefix_labels.resolve import Known, resolved
from lifecycle import Table, invoke, module, provide, provide_private

__all__ = ["Known", "PrefixLabels", "PrefixMetadata", "cell", "resolved"]


def table() -> Table[PrefixLabels]:
    """The table ``prefix-labels``, by prefix and resource."""
    return Table(
        "prefix-labels",
        key=lambda row: (row.prefix, row.resource),
        indexes={"prefix": lambda row: (row.prefix,)},
    )


cell = module(
    "prefix-labels",
    "Labels of prefixes",
    provide(table, PrefixMetadata),
    provide_private(PrefixClaims),
    invoke(PrefixClaims),
)
