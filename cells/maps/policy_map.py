"""Policy maps: their entries as immutable values, and writing them with few system calls."""

from __future__ import annotations

import errno
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, TypeVar, overload

import msgspec

from cells.maps.bpf import BpfError
from cells.maps.map import Epochs, Map
from cells.maps.records.endpoints import PolicyEntry, PolicyKey

__all__ = ["EntryChanges", "PolicyEntryMap", "PolicyMap"]


# The entries of a policy map as an immutable value: copies with changes and comparisons are cheap.
#
# Why: a new identity changes one entry of a thousand in each of a hundred maps, in most of them the same
#      entry.

_FAN: Final = 16
"""Entries are split by identity into this many groups of this many slices. Copies share unchanged slices,
and have few references, because each points to another part of memory."""

_FEW: Final = 8  # up to this number, single writes are faster than a batch

_T = TypeVar("_T")
_Slice = dict[PolicyKey, PolicyEntry]
_Group = list[_Slice]
_NOTHING: Final[_Slice] = {}
_NO_GROUP: Final[_Group] = [_NOTHING] * _FAN


class PolicyEntryWrite(msgspec.Struct, frozen=True):
    """An entry to set, as values and packed."""

    key: PolicyKey
    entry: PolicyEntry
    packed: tuple[bytes, bytes]


_Step = tuple[Sequence[tuple[bytes, bytes]], Sequence[bytes]]
"""The entries to set, then the keys to delete, in order."""


class EntryChanges:
    """Entries to set and keys to delete, packed once for all maps that get them."""

    __slots__ = ("_by_group", "_step", "_writes", "new", "removed")

    def __init__(self, new: Mapping[PolicyKey, PolicyEntry], removed: Iterable[PolicyKey]) -> None:
        self.new = new
        self.removed = tuple(removed)
        self._writes: tuple[PolicyEntryWrite, ...] | None = None
        self._by_group: _ByGroup | None = None
        self._step: tuple[object, _Step] | None = None
        """The last result of step(), with the version (not the entries) it was computed for."""

    @property
    def writes(self) -> tuple[PolicyEntryWrite, ...]:
        """The entries to set, in the order of writing: denies before allows.

        If an allow is conditional, entries of higher precedence are written first, so that no packet is
        allowed without its condition meanwhile.
        """
        if self._writes is None:
            writes = [
                PolicyEntryWrite(key, entry, (key.pack(), entry.pack(key))) for key, entry in self.new.items()
            ]
            allows = [one for one in writes if not one.entry.deny]
            if any(one.entry.conditional for one in allows):
                allows.sort(key=lambda one: precedence(one.key), reverse=True)
            self._writes = (*(one for one in writes if one.entry.deny), *allows)
        return self._writes

    def step(self, present: Mapping[PolicyKey, PolicyEntry]) -> _Step:
        """Arguments of the system calls for a map with these entries; cached for equal maps."""
        version = present.version if isinstance(present, PolicyEntryMap) else None
        if self._step is not None and self._step[0] is version:
            return self._step[1]
        puts = [
            one.packed
            for one in self.writes
            if (old := present.get(one.key)) is None or not old.same_verdict(one.entry)
        ]
        step = puts, self._drops(present) if self.removed else ()
        if version is not None:
            self._step = version, step
        return step

    def _drops(self, present: Mapping[PolicyKey, PolicyEntry]) -> list[bytes]:
        removed = [key for key in self.removed if key in present]
        if any(present[key].conditional for key in removed):
            removed.sort(key=precedence)
        removed.sort(key=lambda key: present[key].deny)
        return [key.pack() for key in removed]

    @property
    def by_group(self) -> _ByGroup:
        """The changes by group and slice of a PolicyEntryMap; None for keys to delete."""
        if self._by_group is None:
            self._by_group = {}
            for key, entry in chain(((key, None) for key in self.removed), self.new.items()):
                slices = self._by_group.setdefault(key.identity % _FAN, {})
                slices.setdefault(key.identity // _FAN % _FAN, []).append((key, entry))
        return self._by_group


def precedence(key: PolicyKey) -> tuple[int, bool, int]:
    """Sort key: of two entries that match a packet, the larger key decides (policy_choose() in C)."""
    return bool(key.protocol) + bool(key.port_bits), bool(key.identity), key.port_bits


_ByGroup = dict[int, dict[int, list[tuple[PolicyKey, PolicyEntry | None]]]]
"""Changes by group and slice."""


class PolicyEntryMap(Mapping[PolicyKey, PolicyEntry]):
    """Immutable entries of a policy map; :meth:`changed` returns a copy."""

    __slots__ = ("changes", "groups", "length", "previous", "version", "whole")

    def __init__(self, entries: Mapping[PolicyKey, PolicyEntry] = _NOTHING) -> None:
        groups = [_NO_GROUP] * _FAN
        for key, entry in entries.items():
            at, where = key.identity % _FAN, key.identity // _FAN % _FAN
            group = groups[at]
            if group is _NO_GROUP:
                group = groups[at] = _NO_GROUP.copy()
            if group[where] is _NOTHING:
                group[where] = {}
            group[where][key] = entry
        self.groups = groups
        self.length = len(entries)
        self.version = object()
        self.previous: object = None
        """The version from which ``changes`` lead to this one."""
        self.changes: EntryChanges | None = None
        self.whole: EntryChanges | None = None

    def changed(self, changes: EntryChanges) -> PolicyEntryMap:
        """A copy with these changes."""
        groups = self.groups.copy()
        length = self.length
        for at, slices in changes.by_group.items():
            group = groups[at] = groups[at].copy()
            for where, items in slices.items():
                held = group[where] = group[where].copy()
                length -= len(held)
                for key, entry in items:
                    if entry is None:
                        held.pop(key, None)
                    else:
                        held[key] = entry
                length += len(held)
        made = PolicyEntryMap.__new__(PolicyEntryMap)
        made.groups, made.length = groups, length
        made.version, made.previous, made.changes = object(), self.version, changes
        made.whole = None
        return made

    @property
    def from_nothing(self) -> EntryChanges:
        """All entries as changes of an empty map; cached if few, for pods with the same policy."""
        if self.whole is not None:
            return self.whole
        changes = EntryChanges(dict(self.items()), ())
        if self.length <= _FEW:
            self.whole = changes
        return changes

    def difference(self, previous: PolicyEntryMap) -> EntryChanges:
        """The changes that lead from ``previous`` to these entries."""
        if self.changes is not None and self.previous is previous.version:  # the usual case
            return self.changes
        new: _Slice = {}
        removed: list[PolicyKey] = []
        for ours, theirs in _different(self, previous):
            new.update((key, entry) for key, entry in ours.items() if theirs.get(key) != entry)
            removed += (key for key in theirs if key not in ours)
        return EntryChanges(new, removed)

    def __getitem__(self, key: PolicyKey) -> PolicyEntry:
        return self.groups[key.identity % _FAN][key.identity // _FAN % _FAN][key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, PolicyKey) and self.get(key) is not None

    @overload
    def get(self, key: PolicyKey, default: None = None, /) -> PolicyEntry | None: ...
    @overload
    def get(self, key: PolicyKey, default: PolicyEntry | _T, /) -> PolicyEntry | _T: ...
    def get(self, key: PolicyKey, default: object = None, /) -> object:
        """As Mapping.get(), without an exception for missing keys."""
        return self.groups[key.identity % _FAN][key.identity // _FAN % _FAN].get(key, default)

    def __iter__(self) -> Iterator[PolicyKey]:
        return (key for group in self.groups if group is not _NO_GROUP for one in group for key in one)

    def __len__(self) -> int:
        return self.length

    def items(self) -> ItemsView[PolicyKey, PolicyEntry]:
        """As Mapping.items(), without a look-up for each key."""
        return _Items(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PolicyEntryMap):
            return self.length == other.length and all(one == two for one, two in _different(self, other))
        return Mapping.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]  # as dict

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"


def _different(one: PolicyEntryMap, other: PolicyEntryMap) -> Iterator[tuple[_Slice, _Slice]]:
    """Pairs of slices that the two maps do not share."""
    for ours, theirs in zip(one.groups, other.groups, strict=True):
        if ours is not theirs:
            yield from (pair for pair in zip(ours, theirs, strict=True) if pair[0] is not pair[1])


class _Items(ItemsView[PolicyKey, PolicyEntry]):
    _mapping: PolicyEntryMap

    def __iter__(self) -> Iterator[tuple[PolicyKey, PolicyEntry]]:
        groups = (group for group in self._mapping.groups if group is not _NO_GROUP)
        return (item for group in groups for one in group if one for item in one.items())  # most are empty


# One endpoint's policy map: set to the wanted entries by as few writes as possible.


class PolicyMap:
    """An endpoint id and its policy map. An empty map allows nothing."""

    __slots__ = ("_epochs", "_present", "endpoint_id", "map")

    def __init__(self, endpoint_id: int, table: Map, epochs: Epochs) -> None:
        self.endpoint_id = endpoint_id
        self.map = table
        table.epochs = self._epochs = epochs
        self._present: Mapping[PolicyKey, PolicyEntry] = {}
        """The entries as last written, or as read from the kernel."""

    def __repr__(self) -> str:
        return f"<PolicyMap {self.endpoint_id} {self.map!r}>"

    def replace(self, wanted: Mapping[PolicyKey, PolicyEntry]) -> None:
        """Set exactly these verdicts: write denies, then allows, then delete, allows first.

        So after any single write the map allows nothing that both policies deny, and denies nothing that both
        allow. Nor does a packet bypass a proxy or authentication that it needs: if there are conditional
        entries, those of higher precedence are written first and deleted last.

        Entries with an unchanged verdict are not written and keep their counters. After a change, the
        endpoint's flows are evaluated again from the next packet on. Raises BpfError (ENOSPC: more entries
        than bpf-policy-map-max) and keeps what was written. A full map fails closed: allows are deleted to
        make room for denies.
        """
        with self._epochs:
            try:
                self._write(self._difference(wanted))
            except BpfError as error:
                self._replace_refused(wanted, error)
            self._present = wanted if isinstance(wanted, PolicyEntryMap) else dict(wanted)

    def _replace_refused(self, wanted: Mapping[PolicyKey, PolicyEntry], error: BpfError) -> None:
        self.reload()
        if error.errno != errno.ENOSPC:
            raise error
        try:
            self._deny_first(wanted)
            self._write(self._difference(wanted))
        except BpfError:
            self.reload()
            raise

    def _deny_first(self, wanted: Mapping[PolicyKey, PolicyEntry]) -> None:
        """In a full map, make room for the denies by deleting allows.

        Raises BpfError, without allows, if the denies alone do not fit. Packets that both policies allow may
        be dropped; none passes that both deny. So all allows are deleted, the broadest first, if deleting
        only some could let a packet pass: with conditional entries, or if stale denies make room.
        """
        present = self._present
        allows = [key for key, old in present.items() if not old.deny]
        stale = [key for key, old in present.items() if old.deny and key not in wanted]
        denies = {
            key: entry
            for key, entry in wanted.items()
            if entry.deny and not ((old := present.get(key)) is not None and old.deny)
        }
        staying: list[PolicyKey] = []
        if not stale and not any(one.conditional for each in (present, wanted) for one in each.values()):
            room = self.map.spec.max_entries - (len(present) - len(allows)) - len(denies)
            staying = [key for key in allows if key in wanted and present[key].same_verdict(wanted[key])]
            staying = staying[: max(room, 0)]
        self._forget(sorted(set(allows) - set(staying), key=precedence))
        self._forget(stale)
        self._put(EntryChanges(denies, ()).step({})[0])
        self._present = {**self._present, **denies}

    def _forget(self, keys: Sequence[PolicyKey]) -> None:
        self._drop([key.pack() for key in keys])
        dropped = set(keys)
        self._present = {key: old for key, old in self._present.items() if key not in dropped}

    def _difference(self, wanted: Mapping[PolicyKey, PolicyEntry]) -> EntryChanges:
        """The changes that lead to the wanted entries."""
        present = self._present
        if isinstance(present, PolicyEntryMap) and isinstance(wanted, PolicyEntryMap):
            return wanted.difference(present)
        if not present and isinstance(wanted, PolicyEntryMap):  # a new pod, which waits for this call
            return wanted.from_nothing
        missing = {
            key: entry
            for key, entry in wanted.items()
            if (old := present.get(key)) is None or not old.same_verdict(entry)
        }
        return EntryChanges(missing, (key for key in present if key not in wanted))

    @property
    def entries(self) -> int:
        """Number of entries, as far as this object wrote or read them."""
        return len(self._present)

    @property
    def held(self) -> Mapping[PolicyKey, PolicyEntry]:
        """The entries as last written or read, with the counters of that time."""
        return self._present

    def dump(self) -> dict[PolicyKey, PolicyEntry]:
        """The kernel's entries, with their counters."""
        return {PolicyKey.unpack(key): PolicyEntry.unpack(value) for key, value in self.map.items()}

    def reload(self) -> None:
        """Read the kernel's entries again."""
        self._present = self.dump()

    def clear(self) -> None:
        """Delete all entries, also those that other programs wrote."""
        with self._epochs:
            self._drop([key.pack() for key in self._present])
            self._present = {}
            if self.map.first_key() is not None:  # another program wrote entries
                self.map.clear()

    def _write(self, changes: EntryChanges) -> None:
        puts, drops = changes.step(self._present)
        self._put(puts)
        if drops:
            self._drop(drops)

    def _put(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        if len(entries) <= _FEW:
            for key, value in entries:
                self.map.update(key, value)
        else:
            self.map.update_batch(entries)

    def _drop(self, keys: Sequence[bytes]) -> None:
        if len(keys) > _FEW:
            try:
                self.map.delete_batch(keys)
            except BpfError as error:
                if error.errno != errno.ENOENT:
                    raise
                for key in keys:  # a key was missing: delete the others singly
                    self.map.delete(key)
        else:
            for key in keys:
                self.map.delete(key)
