"""What policy maps have beyond what is wanted, while nothing is to be taken away from them.

For:    EndpointPolicies. Needs: nothing. Gives: Kept.
Why:    an address changes its identity in the ipcache. Until then its packets are judged by the former one:
        what that may do goes afterwards.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from cells.maps import EntryChanges, PolicyEntryMap
from cells.policy.maps.rows import PolicyEntries


class Kept:
    """The entries of maps that have more than is wanted, by endpoint id."""

    def __init__(self) -> None:
        self._depth = 0
        self._entries: dict[int, PolicyEntries] = {}

    def __contains__(self, endpoint_id: int) -> bool:
        return endpoint_id in self._entries

    @contextmanager
    def taking_nothing(self) -> Iterator[None]:
        """As long as one such block goes on, with_former() keeps entries."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def nothing(self) -> bool:
        """Whether maps are to have what is wanted, and have it."""
        return not self._depth and not self._entries

    @property
    def over(self) -> Collection[int]:
        """Endpoints whose maps may be made as wanted now."""
        return () if self._depth else list(self._entries)

    def with_former(
        self, endpoint_id: int, former: PolicyEntries | None, wanted: PolicyEntries
    ) -> PolicyEntries:
        """What to write: ``wanted``, with what the map has besides, if that is to be kept.

        Note it with keep().
        """
        former = self._entries.get(endpoint_id, former)
        if (
            not self._depth
            or not isinstance(former, PolicyEntryMap)
            or not isinstance(wanted, PolicyEntryMap)
        ):
            return wanted
        changes = wanted.difference(former)
        keeps = any(key in former for key in changes.gone)
        return former.changed(EntryChanges(changes.new, ())) if keeps else wanted

    def keep(self, endpoint_id: int, written: PolicyEntries, wanted: PolicyEntries) -> None:
        """The map has what was written."""
        if written is wanted:
            self._entries.pop(endpoint_id, None)
        else:
            self._entries[endpoint_id] = written

    def forget(self, endpoint_id: int) -> None:
        """The endpoint is no more."""
        self._entries.pop(endpoint_id, None)
