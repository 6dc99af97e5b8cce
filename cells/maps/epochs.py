"""Policy epochs: what makes the datapath forget the verdicts it remembers.

For:    cells that change policy, identities or addresses. Needs: the map of epochs. Gives: Epochs.
Change the map first and bump afterwards: the programs read the epoch before they evaluate.
"""

import struct
from collections.abc import Iterable

from cells.maps.bpf.map import Map

_index = struct.Struct("<I")
_value = struct.Struct("<Q")


class Epochs:
    """The epochs of the node and of its endpoints, for one writer."""

    def __init__(self, table: Map) -> None:
        self._table = table
        self._known: dict[int, int] = {}

    def bump(self, endpoint_id: int = 0) -> None:
        """Make the next packets of an endpoint's flows, or with 0 of all flows, be evaluated again."""
        key, following = self._following(endpoint_id)
        self._table.update(key, _value.pack(following))
        self._known[endpoint_id] = following

    def bump_all(self, endpoint_ids: Iterable[int]) -> None:
        """Of several endpoints by one call."""
        known, new = self._known, {}
        for one in endpoint_ids:
            new[one] = known[one] + 1 if one in known else self._following(one)[1]
        self._table.update_batch(
            [(_index.pack(one), _value.pack(following)) for one, following in new.items()]
        )
        known.update(new)

    def _following(self, endpoint_id: int) -> tuple[bytes, int]:
        """The key of an epoch, and the one that comes next."""
        key = _index.pack(endpoint_id)
        last = self._known.get(endpoint_id)
        if last is None:
            (last,) = _value.unpack(self._table.lookup(key) or bytes(8))
        return key, int(last) + 1
