"""What the kvstore says of identities, and how.

Source: keys below identities/v1/id in, rows of ``shared-identities`` out.
Needs:  KVStore.   Gives: SharedIdentity, SharedIdentities, encode(), value_key().
Source: Cilium 1.17, the kvstore's allocator: labels as ``source:key=value;``, sorted by key.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cells.cluster.identity import CLUSTER, parse, texts
from cells.cluster.kvstore import IDS, VALUES, KVStore, PrefixWatch
from lifecycle import Jobs, Table, Tables

BY_LABELS: Final = "labels"


class SharedIdentity(msgspec.Struct, frozen=True, gc=False):
    """A row: a number, and the labels that all nodes know it for."""

    name: str
    """The key: the number as text."""
    number: int
    labels: tuple[str, ...]


class SharedIdentities:
    """The table ``shared-identities``; empty, and complete, where nodes agree otherwise."""

    def __init__(self, *, tables: Tables) -> None:
        self.table: Table[SharedIdentity] = Table(
            "shared-identities", key=lambda row: row.name, indexes={BY_LABELS: lambda row: [row.labels]}
        )
        self._tables = tables

    def follow(self, store: KVStore, jobs: Jobs) -> None:
        """Fill it, for ever."""
        self._tables.add(self.table)
        jobs.observe("follow identities", PrefixWatch(store, IDS, self.table, read, scope="identities/v1"))

    def numbers(self, labels: tuple[str, ...]) -> list[int]:
        """The numbers that stand for these labels, the lowest first."""
        return sorted(row.number for row in self.table.by(BY_LABELS).get(labels))


def read(key: str, value: bytes) -> SharedIdentity | None:
    """The identity of a key; None for one that is no number of a cluster's."""
    number = int(key) if key.isascii() and key.isdigit() else 0
    text = value.decode(errors="replace")
    if number not in CLUSTER or str(number) != key or not text:
        return None
    return SharedIdentity(key, number, texts(parse(part) for part in text.split(";") if part))


def encode(labels: tuple[str, ...]) -> str:
    """The labels as they are in keys and values."""
    parsed = sorted((parse(text) for text in labels), key=lambda label: label.key)
    return "".join(f"{label.source}:{label.key}={label.value};" for label in parsed)


def value_key(labels: tuple[str, ...], node: str) -> str:
    """The key that says that the node, by its address, uses the identity of the labels."""
    return f"{VALUES}{encode(labels)}/{node}"
