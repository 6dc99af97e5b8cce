"""Policy epochs: what makes the datapath forget the verdicts it remembers.

For:    whoever changes policy, identities or addresses. Needs: the map of epochs. Gives: Epochs.
Change the map first and bump afterwards: the programs read the epoch before they evaluate.
"""

import struct

from cells.maps.bpf.map import Map

_index = struct.Struct("<I")
_value = struct.Struct("<Q")


class Epochs:
    """The epochs of the node and of its endpoints, for one writer."""

    def __init__(self, table: Map) -> None:
        self._table = table
        self._known: dict[int, int] = {}

    def bump(self, endpoint_id: int = 0) -> None:
        """Have the flows of an endpoint, or with 0 of all, evaluated anew from the next packet on."""
        key = _index.pack(endpoint_id)
        last = self._known.get(endpoint_id)
        if last is None:
            (last,) = _value.unpack(self._table.lookup(key) or bytes(8))
        self._table.update(key, _value.pack(last + 1))
        self._known[endpoint_id] = last + 1
