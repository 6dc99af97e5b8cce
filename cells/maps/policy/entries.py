"""The entries of a policy map as a value: changing some costs little, and so does telling two apart.

For:    who computes policies, and PolicyMap, which writes what differs. Needs: the layout of policy maps.
Gives:  PolicyEntryMap, EntryChanges, Write.
Why:    an identity that comes changes one entry of a thousand in each of a hundred maps, in most of them the
        same.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final, NamedTuple, TypeVar, overload

from cells.maps.records.policy import PolicyEntry, PolicyKey

_FAN: Final = 16
"""Entries are in so many groups of as many slices, by their identity. Values that follow from one another
share those that are alike; a copy has as few references as can be, as each is to another part of memory."""

_T = TypeVar("_T")
_Slice = dict[PolicyKey, PolicyEntry]
_Group = list[_Slice]
_NOTHING: Final[_Slice] = {}
_NO_GROUP: Final[_Group] = [_NOTHING] * _FAN


class Write(NamedTuple):
    """An entry to be set, as values and as the kernel has it."""

    key: PolicyKey
    entry: PolicyEntry
    packed: tuple[bytes, bytes]


class EntryChanges:
    """Entries that are set and keys that are taken out, packed once for all maps that get them."""

    __slots__ = ("_by_group", "_writes", "gone", "new")

    def __init__(self, new: Mapping[PolicyKey, PolicyEntry], gone: Iterable[PolicyKey]) -> None:
        self.new = new
        self.gone = tuple(gone)
        self._writes: tuple[Write, ...] | None = None
        self._by_group: _ByGroup | None = None

    @classmethod
    def of(cls, changes: Mapping[PolicyKey, PolicyEntry | None]) -> EntryChanges:
        """From entries by key, None for those that are taken out."""
        new = {key: entry for key, entry in changes.items() if entry is not None}
        return cls(new, (key for key, entry in changes.items() if entry is None))

    @property
    def writes(self) -> tuple[Write, ...]:
        """What is set, in the order in which it is written: denies before allows.

        Where something is to pass a proxy, what decides a packet comes before what would let it through
        otherwise.
        """
        if self._writes is None:
            writes = [Write(key, entry, (key.pack(), entry.pack(key))) for key, entry in self.new.items()]
            allows = [one for one in writes if not one.entry.deny]
            if any(one.entry.proxy_port for one in allows):
                allows.sort(key=lambda one: precedence(one.key), reverse=True)
            self._writes = (*(one for one in writes if one.entry.deny), *allows)
        return self._writes

    @property
    def by_group(self) -> _ByGroup:
        """By group and slice of a PolicyEntryMap, those that are taken out as None."""
        if self._by_group is None:
            self._by_group = {}
            for key, entry in chain(((key, None) for key in self.gone), self.new.items()):
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

    __slots__ = ("changes", "former", "groups", "length", "version")

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
        self.former: object = None
        """The version that ``changes`` were made to."""
        self.changes: EntryChanges | None = None

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
        made.version, made.former, made.changes = object(), self.version, changes
        return made

    def difference(self, former: PolicyEntryMap) -> EntryChanges:
        """Entries that ``former`` may not have, or otherwise, and keys of those that it may have alone."""
        if self.changes is not None and self.former is former.version:  # as nearly always
            return self.changes
        new: _Slice = {}
        gone: list[PolicyKey] = []
        for ours, theirs in _different(self, former):
            new.update((key, entry) for key, entry in ours.items() if theirs.get(key) != entry)
            gone += (key for key in theirs if key not in ours)
        return EntryChanges(new, gone)

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
