"""Policy maps: a pool of endpoint ids with a map each, made before pods need them."""

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


# The entries of a policy map as a value: changing some costs little, and so does telling two apart.
#
# Why: an identity that comes changes one entry of a thousand in each of a hundred maps, in most of them the
#      same.

_FAN: Final = 16
"""Entries are in so many groups of as many slices, by their identity. Values that follow from one another
share those that are alike; a copy has as few references as can be, as each is to another part of memory."""

_FEW: Final = 8  # up to so many entries, single writes are quicker than a batch

_T = TypeVar("_T")
_Slice = dict[PolicyKey, PolicyEntry]
_Group = list[_Slice]
_NOTHING: Final[_Slice] = {}
_NO_GROUP: Final[_Group] = [_NOTHING] * _FAN


class PolicyEntryWrite(msgspec.Struct, frozen=True):
    """An entry to be set, as values and as the kernel has it."""

    key: PolicyKey
    entry: PolicyEntry
    packed: tuple[bytes, bytes]


_Step = tuple[Sequence[tuple[bytes, bytes]], Sequence[bytes]]
"""What is set and then taken out to change a map, in order."""


class EntryChanges:
    """Entries that are set and keys that are taken out, packed once for all maps that get them."""

    __slots__ = ("_by_group", "_step", "_writes", "new", "removed")

    def __init__(self, new: Mapping[PolicyKey, PolicyEntry], removed: Iterable[PolicyKey]) -> None:
        self.new = new
        self.removed = tuple(removed)
        self._writes: tuple[PolicyEntryWrite, ...] | None = None
        self._by_group: _ByGroup | None = None
        self._step: tuple[object, _Step] | None = None
        """With the version of the entries that it is from: these would hold those before, and so on."""

    @property
    def writes(self) -> tuple[PolicyEntryWrite, ...]:
        """What is set, in the order in which it is written: denies before allows.

        Where something is conditional, what decides a packet comes before what would let it through
        otherwise.
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
        """The system calls' arguments for a map that has these; made once for maps that have the same."""
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
        """By group and slice of a PolicyEntryMap, those that are taken out as None."""
        if self._by_group is None:
            self._by_group = {}
            for key, entry in chain(((key, None) for key in self.removed), self.new.items()):
                slices = self._by_group.setdefault(key.identity % _FAN, {})
                slices.setdefault(key.identity // _FAN % _FAN, []).append((key, entry))
        return self._by_group


def precedence(key: PolicyKey) -> tuple[int, bool, int]:
    """Of two entries that are for a packet, that with the larger one decides (see policy_choose() in C)."""
    return bool(key.protocol) + bool(key.port_bits), bool(key.identity), key.port_bits


_ByGroup = dict[int, dict[int, list[tuple[PolicyKey, PolicyEntry | None]]]]
"""Changes by group and slice."""


class PolicyEntryMap(Mapping[PolicyKey, PolicyEntry]):
    """Never changed: :meth:`changed` gives another one."""

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
        """The version that ``changes`` were made to."""
        self.changes: EntryChanges | None = None
        self.whole: EntryChanges | None = None

    def changed(self, changes: EntryChanges) -> PolicyEntryMap:
        """With these entries, and without those that are taken out."""
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
        """All entries, for a map that has none. Few are packed once, for all pods that are alike."""
        if self.whole is not None:
            return self.whole
        changes = EntryChanges(dict(self.items()), ())
        if self.length <= _FEW:
            self.whole = changes
        return changes

    def difference(self, previous: PolicyEntryMap) -> EntryChanges:
        """Entries that ``previous`` may not have, or otherwise, and keys of those that it may have alone."""
        if self.changes is not None and self.previous is previous.version:  # as nearly always
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
        """As of any mapping, but without an exception for what is not there."""
        return self.groups[key.identity % _FAN][key.identity // _FAN % _FAN].get(key, default)

    def __iter__(self) -> Iterator[PolicyKey]:
        return (key for group in self.groups if group is not _NO_GROUP for one in group for key in one)

    def __len__(self) -> int:
        return self.length

    def items(self) -> ItemsView[PolicyKey, PolicyEntry]:
        """As of any mapping, but without a search for each."""
        return _Items(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PolicyEntryMap):
            return self.length == other.length and all(one == two for one, two in _different(self, other))
        return Mapping.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]  # as dict

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"


def _different(one: PolicyEntryMap, other: PolicyEntryMap) -> Iterator[tuple[_Slice, _Slice]]:
    """The slices that the two do not share."""
    for ours, theirs in zip(one.groups, other.groups, strict=True):
        if ours is not theirs:
            yield from (pair for pair in zip(ours, theirs, strict=True) if pair[0] is not pair[1])


class _Items(ItemsView[PolicyKey, PolicyEntry]):
    _mapping: PolicyEntryMap

    def __iter__(self) -> Iterator[tuple[PolicyKey, PolicyEntry]]:
        groups = (group for group in self._mapping.groups if group is not _NO_GROUP)
        return (item for group in groups for one in group if one for item in one.items())  # most are empty


# One endpoint's policy map: made equal to what is wanted, by as few writes as possible.


class PolicyMap:
    """An endpoint id and its policy map. An empty map allows nothing."""

    __slots__ = ("_epochs", "_present", "endpoint_id", "map")

    def __init__(self, endpoint_id: int, table: Map, epochs: Epochs) -> None:
        self.endpoint_id = endpoint_id
        self.map = table
        table.epochs = self._epochs = epochs
        self._present: Mapping[PolicyKey, PolicyEntry] = {}
        """Its entries: as they were last made, or as the kernel has them."""

    def __repr__(self) -> str:
        return f"<PolicyMap {self.endpoint_id} {self.map!r}>"

    def replace(self, wanted: Mapping[PolicyKey, PolicyEntry]) -> None:
        """Make the map hold exactly these verdicts: denies, then allows, then deletions, of allows first.

        So after any of the writes it allows nothing that neither policy does, and denies nothing both allow.
        Nor does anything pass by a proxy that is to read it, or without its authentication: where there is
        one, what decides first is written first, and deleted last.

        An entry with the same verdict is not touched, so its counters go on. If any changed, the endpoint's
        flows are evaluated anew from the next packet on. Raises BpfError (ENOSPC: more entries than
        bpf-policy-map-max); what was written until then stays. A full map is closed rather than open: allows
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
        """In a full map: have what is to be denied, at the cost of what is allowed. Raises BpfError if even
        that has no room; then nothing is allowed.

        Packets may be dropped that both policies allow; none passes that neither does. So all allows go, the
        broadest first, where less than all would open something: what passes a proxy or is authenticated, or
        what denies that make room were for.
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
        """What the map may lack or have otherwise, or too much."""
        present = self._present
        if isinstance(present, PolicyEntryMap) and isinstance(wanted, PolicyEntryMap):
            return wanted.difference(present)
        if not present and isinstance(wanted, PolicyEntryMap):  # a new pod's: it waits for it
            return wanted.from_nothing
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
        with self._epochs:
            self._drop([key.pack() for key in self._present])
            self._present = {}
            if self.map.first_key() is not None:  # written by someone else
                self.map.clear()

    def _write(self, changes: EntryChanges) -> None:
        puts, drops = changes.step(self._present)
        self._put(puts)
        if drops:
            self._drop(drops)

    def _put(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """Set entries, in their order."""
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
                for key in keys:  # one did not exist: the rest one by one
                    self.map.delete(key)
        else:
            for key in keys:
                self.map.delete(key)
