"""Which identities each selector selects, updated as identities come and go.

A new identity is compared with the selectors that could select it, found by the keys of its labels, not with
all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import msgspec

from cells.policy.labels import LabelSet
from cells.policy.selectors import IndexKey, PeerSelector

__all__ = ["SelectorCache"]


class SelectorChange(msgspec.Struct, frozen=True):
    """An identity that came or went, and the selectors that select it."""

    identity: int
    added: bool
    selectors: Set[PeerSelector]


class SelectorCache:
    """Selectors in use, each once, with the identities they select."""

    def __init__(self) -> None:
        self._labels: dict[int, LabelSet] = {}
        self._users: dict[PeerSelector, int] = {}
        self._selections: dict[PeerSelector, set[int]] = {}
        self._by_key: dict[IndexKey | None, dict[PeerSelector, None]] = {}
        self._having: dict[IndexKey, set[int]] = {}
        self._of_identity: dict[int, set[PeerSelector]] = {}

    @property
    def identities(self) -> Mapping[int, LabelSet]:
        """Every known identity's labels."""
        return self._labels

    @property
    def selectors(self) -> Iterable[PeerSelector]:
        """Selectors in use."""
        return self._users.keys()

    def users(self, selector: PeerSelector) -> int:
        """How many rules use a selector."""
        return self._users.get(selector, 0)

    def selections(self, selector: PeerSelector) -> Set[int]:
        """The identities that a selector in use selects."""
        return self._selections[selector]

    def selecting(self, identity: int) -> Set[PeerSelector]:
        """The selectors in use that select an identity."""
        return self._of_identity.get(identity, set())

    def add_selector(self, selector: PeerSelector) -> None:
        """Use a selector once more."""
        self._users[selector] = self._users.get(selector, 0) + 1
        if selector in self._selections:
            return
        keys = selector.index_keys()
        for key in keys or (None,):
            self._by_key.setdefault(key, {})[selector] = None
        candidates: Iterable[int] = self._labels
        if keys:
            candidates = {identity for key in keys for identity in self._having.get(key, ())}
        selected = {identity for identity in candidates if selector.matches(self._labels[identity])}
        self._selections[selector] = selected
        for identity in selected:
            self._of_identity[identity].add(selector)

    def remove_selector(self, selector: PeerSelector) -> None:
        """Use a selector once less; forget it with its last use."""
        self._users[selector] -= 1
        if self._users[selector]:
            return
        del self._users[selector]
        for identity in self._selections.pop(selector):
            self._of_identity[identity].discard(selector)
        for key in selector.index_keys() or (None,):
            del self._by_key[key][selector]
            if not self._by_key[key]:
                del self._by_key[key]

    def add_identity(self, identity: int, labels: LabelSet) -> SelectorChange:
        """Know an identity. Its labels never change: a change of labels is another identity.

        Reserved identities are the exception (the host's labels follow the node's): an identity that is
        known with other labels is replaced.
        """
        if identity in self._labels:
            self.remove_identity(identity)
        self._labels[identity] = labels
        for key in labels.index_keys:
            self._having.setdefault(key, set()).add(identity)
        selecting = {
            selector
            for key in (None, *labels.index_keys)
            for selector in self._by_key.get(key, ())
            if selector.matches(labels)
        }
        self._of_identity[identity] = selecting
        for selector in selecting:
            self._selections[selector].add(identity)
        return SelectorChange(identity, added=True, selectors=frozenset(selecting))

    def remove_identity(self, identity: int) -> SelectorChange:
        """Forget an identity; nothing happens for an unknown one."""
        labels = self._labels.pop(identity, None)
        for key in labels.index_keys if labels is not None else ():
            self._having[key].discard(identity)
            if not self._having[key]:
                del self._having[key]
        selecting = frozenset(self._of_identity.pop(identity, ()))
        for selector in selecting:
            self._selections[selector].discard(identity)
        return SelectorChange(identity, added=False, selectors=selecting)
