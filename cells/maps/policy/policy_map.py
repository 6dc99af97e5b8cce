"""One endpoint's policy map: made equal to what is wanted, by as few writes as possible.

For:    PolicyMaps hands them out. Needs: an open Map. Gives: PolicyMap.
"""

import errno
from collections.abc import Callable, Mapping, Sequence

from cells.maps.bpf.map import Map
from cells.maps.bpf.syscall import BpfError
from cells.maps.policy.entries import EntryChanges, PolicyEntryMap, Write, precedence
from cells.maps.records.policy import PolicyEntry, PolicyKey

_FEW = 8  # up to so many entries, single writes are quicker than a batch


class PolicyMap:
    """An endpoint id and its policy map. An empty map allows nothing."""

    __slots__ = ("_changed", "_present", "endpoint_id", "map")

    def __init__(self, endpoint_id: int, table: Map, changed: Callable[[int], object]) -> None:
        """``changed`` is called with the id after every change: Epochs.bump()."""
        self.endpoint_id = endpoint_id
        self.map = table
        self._changed = changed
        self._present: Mapping[PolicyKey, PolicyEntry] = {}
        """What it has: as it was last made, or as the kernel told."""

    def __repr__(self) -> str:
        return f"<PolicyMap {self.endpoint_id} {self.map!r}>"

    def replace(
        self, wanted: Mapping[PolicyKey, PolicyEntry], changed: Callable[[int], object] | None = None
    ) -> None:
        """Make the map hold exactly these verdicts: denies, then allows, then deletions, of allows first.

        So after any of the writes it allows nothing that neither policy does, and denies nothing both allow.
        Nor does anything pass a proxy by that it is to read: where there is one, what decides first is
        written first, and deleted last.

        An entry whose verdict stays is not touched, so its counters go on. If any changed, the endpoint's
        flows are evaluated anew from the next packet on; with ``changed``, that is told instead, and theirs
        to see to. Raises BpfError (ENOSPC: more entries than bpf-policy-map-max); what was written until
        then stays.
        """
        differs = True
        try:
            differs = self._replace(wanted)
            self._present = wanted if isinstance(wanted, PolicyEntryMap) else dict(wanted)
        finally:
            if differs:
                (changed or self._changed)(self.endpoint_id)

    def _replace(self, wanted: Mapping[PolicyKey, PolicyEntry]) -> bool:
        try:
            return self._write(self._difference(wanted))
        except BpfError as error:
            self.reload()
            if error.errno != errno.ENOSPC:
                raise
            # Full: make room with what is no longer allowed. That may drop packets, but lets none through.
            over = [key for key, old in self._present.items() if key not in wanted and not old.deny]
            try:
                self._drop(over)
                self._present = {key: old for key, old in self._present.items() if key in wanted or old.deny}
                self._write(self._difference(wanted))
            except BpfError:
                self.reload()
                raise
            return True

    def _difference(self, wanted: Mapping[PolicyKey, PolicyEntry]) -> EntryChanges:
        """What the map may lack or have otherwise, or too much."""
        present = self._present
        if isinstance(present, PolicyEntryMap) and isinstance(wanted, PolicyEntryMap):
            return wanted.difference(present)
        missing = {
            key: entry
            for key, entry in wanted.items()
            if (old := present.get(key)) is None or not old.same_verdict(entry)
        }
        return EntryChanges(missing, (key for key in present if key not in wanted))

    @property
    def entries(self) -> int:
        """How many it has, as far as we wrote them."""
        return len(self._present)

    @property
    def held(self) -> Mapping[PolicyKey, PolicyEntry]:
        """What it has, as far as we wrote or read it; with the counters of that time."""
        return self._present

    def dump(self) -> dict[PolicyKey, PolicyEntry]:
        """What the kernel has, with its counters."""
        return {PolicyKey.unpack(key): PolicyEntry.unpack(value) for key, value in self.map.items()}

    def reload(self) -> None:
        """Take what the kernel has as the state to start from."""
        self._present = self.dump()

    def clear(self) -> None:
        """Empty the map, whatever is in it."""
        had = bool(self._present)
        self._drop(list(self._present))
        self._present = {}
        if self.map.first_key() is not None:  # written by someone else
            self.map.clear()
            had = True
        if had:
            self._changed(self.endpoint_id)

    def _write(self, changes: EntryChanges) -> bool:
        """Whether anything had to be written."""
        present = self._present
        missing: Sequence[Write] = changes.writes
        if present:
            missing = [
                one
                for one in missing
                if (old := present.get(one.key)) is None or not old.same_verdict(one.entry)
            ]
        self._put(missing)
        if not changes.gone:
            return bool(missing)
        gone = [key for key in changes.gone if key in present]
        if any(present[key].proxy_port for key in gone):
            gone.sort(key=precedence)
        self._drop(sorted(gone, key=lambda key: present[key].deny))
        return bool(missing or gone)

    def _put(self, writes: Sequence[Write]) -> None:
        """Set entries, in their order."""
        if len(writes) <= _FEW:
            for one in writes:
                self.map.update(*one.packed)
        else:
            self.map.update_batch([one.packed for one in writes])

    def _drop(self, keys: list[PolicyKey]) -> None:
        packed = [key.pack() for key in keys]
        if len(packed) > _FEW:
            try:
                self.map.delete_batch(packed)
            except BpfError as error:
                if error.errno != errno.ENOENT:
                    raise
                packed = [
                    key for key in packed if self.map.delete(key)
                ]  # one was gone already: the rest singly
        else:
            for key in packed:
                self.map.delete(key)
