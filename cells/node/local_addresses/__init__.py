"""Which addresses are on this node, and whose each is: the node's own, or an endpoint's.

Reconciler: other cells claim addresses, for the node or for an endpoint. The claim that counts is the
address's row in the map cilium_lxc, and is its only writer; if both have one, the node's is used.
Needs:  Maps.   Gives: LocalAddresses, Table[LocalAddress]; the table local-addresses-status tells what the
        last sweep did.
Why:    an address may be the node's and a pod's at once. Neither needs to know of the other: where the node
        gives it up, the pod's counts again.
"""

from cells.node.local_addresses.addresses import LocalAddresses
from cells.node.local_addresses.cell import cell
from cells.node.local_addresses.rows import LocalAddress, LxcMap, LxcRows

__all__ = ["LocalAddress", "LocalAddresses", "LxcMap", "LxcRows", "cell"]
