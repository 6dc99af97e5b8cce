"""The selector cache: which identities each selector in use selects, updated incrementally.

A new identity is compared only with selectors that are indexed by a key of its labels.

Source: Cilium's pkg/policy/selectorcache.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import msgspec

from cells.policy.labels import LabelSet
from cells.policy.selectors import IndexKey, PeerSelector

__all__ = ["SelectorCache"]


class SelectorChange(msgspec.Struct, frozen=True):
    """An identity that was added or removed, and the selectors that select it."""

    identity: int
    added: bool
    selectors: Set[PeerSelector]


class SelectorCache:
    """Selectors in use, with a use count each, and the identities that they select."""

    def __init__(self) -> None:
        self._labels: dict[int, LabelSet] = {}
        self._use_counts: dict[PeerSelector, int] = {}
        self._selections: dict[PeerSelector, set[int]] = {}
        self._selectors_by_key: dict[IndexKey | None, dict[PeerSelector, None]] = {}
        self._identities_by_key: dict[IndexKey, set[int]] = {}
        self._selectors_by_identity: dict[int, set[PeerSelector]] = {}

    @property
    def identities(self) -> Mapping[int, LabelSet]:
        """The labels of every added identity."""
        return self._labels

    @property
    def selectors(self) -> Iterable[PeerSelector]:
        """The selectors in use."""
        return self._use_counts.keys()

    def users(self, selector: PeerSelector) -> int:
        """Return the number of uses of a selector."""
        return self._use_counts.get(selector, 0)

    def selections(self, selector: PeerSelector) -> Set[int]:
        """Return the identities that a selector in use selects."""
        return self._selections[selector]

    def selecting(self, identity: int) -> Set[PeerSelector]:
        """Return the selectors in use that select an identity."""
        return self._selectors_by_identity.get(identity, set())

    def add_selector(self, selector: PeerSelector) -> None:
        """Add a use of a selector."""
        self._use_counts[selector] = self._use_counts.get(selector, 0) + 1
        if selector in self._selections:
            return
        keys = selector.index_keys()
        for key in keys or (None,):
            self._selectors_by_key.setdefault(key, {})[selector] = None
        candidates: Iterable[int] = self._labels
        if keys:
            candidates = {identity for key in keys for identity in self._identities_by_key.get(key, ())}
        selected = {identity for identity in candidates if selector.matches(self._labels[identity])}
        self._selections[selector] = selected
        for identity in selected:
            self._selectors_by_identity[identity].add(selector)

    def remove_selector(self, selector: PeerSelector) -> None:
        """Remove a use of a selector, and the selector with its last use."""
        self._use_counts[selector] -= 1
        if self._use_counts[selector]:
            return
        del self._use_counts[selector]
        for identity in self._selections.pop(selector):
            self._selectors_by_identity[identity].discard(selector)
        for key in selector.index_keys() or (None,):
            del self._selectors_by_key[key][selector]
            if not self._selectors_by_key[key]:
                del self._selectors_by_key[key]

    def add_identity(self, identity: int, labels: LabelSet) -> SelectorChange:
        """Add an identity and return the selectors that select it.

        The labels of an identity never change, except those of reserved identities (the host has the node's
        labels). An identity with other labels is replaced.
        """
        if identity in self._labels:
            self.remove_identity(identity)
        self._labels[identity] = labels
        for key in labels.index_keys:
            self._identities_by_key.setdefault(key, set()).add(identity)
        selecting = {
            selector
            for key in (None, *labels.index_keys)
            for selector in self._selectors_by_key.get(key, ())
            if selector.matches(labels)
        }
        self._selectors_by_identity[identity] = selecting
        for selector in selecting:
            self._selections[selector].add(identity)
        return SelectorChange(identity, added=True, selectors=frozenset(selecting))

    def remove_identity(self, identity: int) -> SelectorChange:
        """Remove an identity; a no-op if it is unknown."""
        labels = self._labels.pop(identity, None)
        for key in labels.index_keys if labels is not None else ():
            self._identities_by_key[key].discard(identity)
            if not self._identities_by_key[key]:
                del self._identities_by_key[key]
        selecting = frozenset(self._selectors_by_identity.pop(identity, ()))
        for selector in selecting:
            self._selections[selector].discard(identity)
        return SelectorChange(identity, added=False, selectors=selecting)
