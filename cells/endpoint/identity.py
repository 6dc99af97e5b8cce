"""Security identities of this node's endpoints: one number for each set of labels.

For:   Endpoints and endpoint restore.   Needs: nothing.   Gives: Identities, Identity, the reserved ones.
Source: Cilium 1.17, numeric identities. They are local to the node until there is a cluster-wide allocator.
"""

from dataclasses import dataclass
from typing import Final

from cells.endpoint.labels import labels_sha256

FIRST_IDENTITY: Final = 256
LAST_IDENTITY: Final = 65535

RESERVED_IDENTITIES: Final[dict[int, tuple[str, ...]]] = {
    1: ("reserved:host",),
    2: ("reserved:world",),
    3: ("reserved:unmanaged",),
    4: ("reserved:health",),
    5: ("reserved:init",),
    6: ("reserved:remote-node",),
    7: ("reserved:kube-apiserver", "reserved:remote-node"),
    8: ("reserved:ingress",),
    9: ("reserved:world-ipv4",),
    10: ("reserved:world-ipv6",),
    11: ("reserved:encrypted-overlay",),
}
HOST: Final = 1
WORLD: Final = 2
HEALTH: Final = 4
INIT: Final = 5
INIT_LABELS: Final = RESERVED_IDENTITIES[INIT]


class NoIdentityError(Exception):
    """Raised when every number from 256 to 65535 is in use."""


@dataclass(slots=True)
class Identity:
    """A number and the sorted labels it stands for."""

    id: int
    labels: tuple[str, ...]
    references: int = 0
    """How many endpoints have it; reserved ones are not counted down to nothing."""

    @property
    def labels_sha256(self) -> str:
        """``labelsSHA256`` of the API."""
        return labels_sha256(self.labels)


class Identities:
    """Allocates identities by label set, counted by reference.

    Numbers are handed out in a circle, so a freed one is not reused at once: conntrack entries and
    events may still carry it.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Identity] = {
            number: Identity(number, labels) for number, labels in RESERVED_IDENTITIES.items()
        }
        self._by_labels: dict[tuple[str, ...], Identity] = {i.labels: i for i in self._by_id.values()}
        self._held: set[int] = set()
        self._cursor = FIRST_IDENTITY

    def acquire(self, labels: tuple[str, ...]) -> Identity:
        """One more reference to the identity of ``labels`` (sorted); raises NoIdentityError when full."""
        identity = self._by_labels.get(labels)
        if identity is None:
            identity = self._add(self._free_number(), labels)
        identity.references += 1
        return identity

    def restore(self, number: int, labels: tuple[str, ...]) -> Identity:
        """One more reference to the identity of ``labels``, with its former number where that is free.

        The number differs from ``number`` when the labels have another one already, when it stands for
        other labels, or when it is outside the range of this node.
        """
        known = self._by_labels.get(labels)
        if known is None and FIRST_IDENTITY <= number <= LAST_IDENTITY and number not in self._by_id:
            self._held.discard(number)
            known = self._add(number, labels)
            if number >= self._cursor:
                self._cursor = number + 1
        if known is None:
            return self.acquire(labels)
        known.references += 1
        return known

    def hold(self, number: int) -> None:
        """Never give ``number`` to new labels: something unknown on the node may still mean it."""
        if number not in self._by_id:
            self._held.add(number)

    def let_go(self, number: int) -> None:
        """Take :meth:`hold` back: nothing means the number any more."""
        self._held.discard(number)

    def release(self, number: int) -> None:
        """Give one reference back; the last one frees the number. Unknown numbers are ignored."""
        identity = self._by_id.get(number)
        if identity is None:
            return
        identity.references = max(0, identity.references - 1)
        if identity.references == 0 and number not in RESERVED_IDENTITIES:
            del self._by_id[number]
            del self._by_labels[identity.labels]

    def get(self, number: int) -> Identity | None:
        """The identity of that number, None when nothing has it."""
        return self._by_id.get(number)

    def by_labels(self, labels: tuple[str, ...]) -> Identity | None:
        """The identity of exactly these sorted labels, None when there is none."""
        return self._by_labels.get(labels)

    def all(self) -> list[Identity]:
        """Every identity, reserved ones too, by number."""
        return [self._by_id[number] for number in sorted(self._by_id)]

    def _add(self, number: int, labels: tuple[str, ...]) -> Identity:
        identity = self._by_id[number] = self._by_labels[labels] = Identity(number, labels)
        return identity

    def _free_number(self) -> int:
        for _ in range(FIRST_IDENTITY, LAST_IDENTITY + 1):
            if self._cursor > LAST_IDENTITY:
                self._cursor = FIRST_IDENTITY
            number, self._cursor = self._cursor, self._cursor + 1
            if number not in self._by_id and number not in self._held:
                return number
        raise NoIdentityError(f"no free identity between {FIRST_IDENTITY} and {LAST_IDENTITY}")
