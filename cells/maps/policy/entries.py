"""The entries of a policy map as a value: changing some costs little, and so does telling two apart.

For:    who computes policies, and PolicyMap, which writes what differs. Needs: the layout of policy maps.
Gives:  PolicyEntryMap.
Why:    an identity that comes changes one entry of a thousand in each of a hundred maps.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from typing import Final

from cells.maps.records.layouts import PolicyEntry, PolicyKey

_SLICES: Final = 128
"""Entries are in slices by their identity. Values that follow from one another share those that are alike."""

_Slice = dict[PolicyKey, PolicyEntry]
_NOTHING: Final[_Slice] = {}


class PolicyEntryMap(Mapping[PolicyKey, PolicyEntry]):
    """Never changed: :meth:`changed` gives another one."""

    __slots__ = ("changes", "former", "length", "slices", "version")

    def __init__(self, entries: Mapping[PolicyKey, PolicyEntry] = _NOTHING) -> None:
        slices: list[_Slice] = [_NOTHING] * _SLICES
        for key, entry in entries.items():
            where = key.identity % _SLICES
            if slices[where] is _NOTHING:
                slices[where] = {}
            slices[where][key] = entry
        self.slices = slices
        self.length = len(entries)
        self.version = object()
        self.former: object = None
        """The version that ``changes`` were made to."""
        self.changes: Mapping[PolicyKey, PolicyEntry | None] = {}

    def changed(self, changes: Mapping[PolicyKey, PolicyEntry | None]) -> PolicyEntryMap:
        """With these entries, those of None taken out."""
        slices = self.slices.copy()
        copied: dict[int, _Slice] = {}
        length = self.length
        for key, entry in changes.items():
            where = key.identity % _SLICES
            held = copied.get(where)
            if held is None:
                held = copied[where] = slices[where] = slices[where].copy()
            if entry is None:
                length -= held.pop(key, None) is not None
            else:
                length += key not in held
                held[key] = entry
        made = PolicyEntryMap.__new__(PolicyEntryMap)
        made.slices, made.length = slices, length
        made.version, made.former, made.changes = object(), self.version, changes
        return made

    def difference(self, former: PolicyEntryMap) -> tuple[_Slice, list[PolicyKey]]:
        """Entries that ``former`` may not have, or otherwise, and keys of those that it may have alone."""
        new: _Slice = {}
        gone: list[PolicyKey] = []
        if self.former is former.version:  # as nearly always
            for key, entry in self.changes.items():
                if entry is not None:
                    new[key] = entry
                else:
                    gone.append(key)
            return new, gone
        for ours, theirs in zip(self.slices, former.slices, strict=True):
            if ours is not theirs:
                new.update((key, entry) for key, entry in ours.items() if theirs.get(key) != entry)
                gone += (key for key in theirs if key not in ours)
        return new, gone

    def __getitem__(self, key: PolicyKey) -> PolicyEntry:
        return self.slices[key.identity % _SLICES][key]

    def __iter__(self) -> Iterator[PolicyKey]:
        return (key for one in self.slices for key in one)

    def __len__(self) -> int:
        return self.length

    def items(self) -> ItemsView[PolicyKey, PolicyEntry]:
        """As of any mapping, but without a search for each."""
        return _Items(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PolicyEntryMap):
            return self.slices == other.slices
        return Mapping.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]  # as dict

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"


class _Items(ItemsView[PolicyKey, PolicyEntry]):
    _mapping: PolicyEntryMap

    def __iter__(self) -> Iterator[tuple[PolicyKey, PolicyEntry]]:
        return (item for one in self._mapping.slices if one for item in one.items())  # most are empty
