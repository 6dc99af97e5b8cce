"""Allocates service and backend IDs, and counts the users of backends.

``LoadBalancer`` uses one allocator per kind of ID. A released ID is reused only after all others: conntrack
entries may still contain it, and would send their connections to its new owner.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Generic, TypeVar

from cells.maps.bpf import PackedColumn
from cells.services import BackendState, ServiceAddress, map_entries
from cells.services.map_entries import backend_number, numbers_of

__all__ = ["IdAllocator", "IdsExhaustedError", "NumberedBackends", "active_entries"]

Name = TypeVar("Name")


class IdsExhaustedError(Exception):
    """Every ID is in use."""


class IdAllocator(Generic[Name]):
    """Allocates IDs from 1 to ``last``: the next free one after the last allocation, wrapping around."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._next = 1
        self._names: dict[int, Name] = {}

    def __len__(self) -> int:
        return len(self._names)

    def allocate(self, name: Name) -> int:
        """Return a new ID for a name. Raises IdsExhaustedError."""
        if len(self._names) >= self._last:
            raise IdsExhaustedError(f"all {self._last} numbers are in use")
        number = self._next
        while number in self._names:
            number = self._after(number)
        self._names[number] = name
        self._next = self._after(number)
        return number

    def allocate_all(self, names: Sequence[Name]) -> Sequence[int]:
        """Allocate an ID for each name, in this order, or none. Raises IdsExhaustedError."""
        numbers = range(self._next, self._next + len(names))
        if numbers.stop <= self._last and self._names.keys().isdisjoint(numbers):
            self._names.update(zip(numbers, names, strict=True))
            self._next = numbers.stop
            return numbers
        if len(self._names) + len(names) > self._last:
            raise IdsExhaustedError(f"all {self._last} numbers are in use")
        return [self.allocate(name) for name in names]

    def restore(self, number: int, name: Name) -> bool:
        """Allocate this ID; False if another name has it. Later allocations continue after it."""
        if self._names.setdefault(number, name) != name:
            return False
        if number >= self._next:
            self._next = self._after(number)
        return True

    def release(self, number: int) -> Name | None:
        """Free an ID and return its name; None if it was free."""
        return self._names.pop(number, None)

    def _after(self, number: int) -> int:
        return 1 if number >= self._last else number + 1


LAST_BACKEND_ID: Final = (1 << 32) - 1


class NumberedBackends:
    """The IDs, states and use counts of the backends in the maps, by the bytes of addresses.

    There are ten times as many backends as frontends, and nearly all are active, without a zone, and used by
    one frontend. Only deviations from that are stored, and many backends are added in one pass.
    """

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        """The number of each backend; read-only for callers."""
        self._allocator: IdAllocator[bytes] = IdAllocator(LAST_BACKEND_ID)
        self._states: dict[bytes, BackendState] = {}
        """States of backends that are not active."""
        self._zones: dict[bytes, int] = {}
        self._more_users: dict[bytes, int] = {}
        """Counts of users beyond the first, for backends with several."""
        self._unused: dict[bytes, None] = {}
        self.unwritten: set[int] = set()
        """Numbers with entries that may be missing or outdated in the maps; all others are up to date."""

    def restore(self, number: int, address: ServiceAddress, state: BackendState, zone: int) -> bool:
        """Add an unused backend from the maps; False if it already has another ID."""
        self._allocator.restore(number, address)
        if self.numbers.setdefault(address, number) != number:
            return False
        self.set_state(address, state)
        if zone:
            self._zones[address] = zone
        self._unused[address] = None
        self.unwritten.add(number)
        return True

    def add(self, addresses: Sequence[bytes]) -> Sequence[int]:
        """Allocate IDs for new backends: active, and used by one frontend.

        Raises IdsExhaustedError without adding any.
        """
        numbers = self._allocator.allocate_all(addresses)
        self.numbers.update(zip(addresses, numbers, strict=True))
        self.unwritten.update(numbers)
        return numbers

    def set_state(self, address: bytes, state: BackendState) -> None:
        """Set the desired state of a backend's entry."""
        if self._states.get(address, BackendState.ACTIVE) is state:
            return
        if state is BackendState.ACTIVE:
            del self._states[address]
        else:
            self._states[address] = state
        self.unwritten.add(self.numbers[address])

    def entries(self, addresses: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
        """Return the keys and values of these backends' entries."""
        numbers, states, zones = self.numbers, self._states, self._zones
        if not states and not zones:  # as nearly always
            return zip(*active_entries(addresses, [numbers[one] for one in addresses]), strict=True)
        active, value = BackendState.ACTIVE, map_entries.backend_value
        return [
            (backend_number(numbers[one]), value(one, states.get(one, active), zones.get(one, 0)))
            for one in addresses
        ]

    def missing(self, addresses: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
        """Return the keys and values of unwritten backends among these."""
        unwritten = self.unwritten
        return self.entries([one for one in addresses if self.numbers[one] in unwritten]) if unwritten else ()

    def observe(self, version: int, held: Mapping[bytes, bytes]) -> None:
        """Compare with a family's map: backends with the desired entry need no write."""
        current = [key for key, value in self._of_family(version) if held.get(key) == value]
        self.unwritten = self.unwritten - {*numbers_of(current)}

    def wanted(self, version: int, held: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """Return the desired entries of a family; for unwritten backends, the present ones."""
        entries = dict(self._of_family(version))
        for key in map(backend_number, self.unwritten):
            entries.pop(key, None)
            if key in held:
                entries[key] = held[key]
        return entries

    def _of_family(self, version: int) -> Iterable[tuple[bytes, bytes]]:
        return self.entries([one for one in self.numbers if one[0] == version])

    def use(self, addresses: Iterable[bytes]) -> None:
        """Increment the use count of each backend."""
        unused, more = self._unused, self._more_users
        for address in addresses:
            if address in unused:
                del unused[address]
            else:
                more[address] = more.get(address, 0) + 1

    def release(self, addresses: Iterable[bytes]) -> None:
        """Decrement the use count of each backend."""
        more = self._more_users
        for address in addresses:
            users = more.pop(address, 0)
            if users > 1:
                more[address] = users - 1
            elif not users:
                self._unused[address] = None

    def unused(self) -> Iterator[tuple[ServiceAddress, bytes]]:
        """Yield backends without a frontend, with their keys."""
        for address in list(self._unused):
            yield ServiceAddress.read(address), backend_number(self.numbers[address])

    def remove(self, number: int) -> None:
        """Free the ID of an entry deleted from the maps; delete its backend if it is unused."""
        address = self._allocator.release(number)
        self.unwritten.discard(number)
        if address in self._unused and self.numbers[address] == number:
            del self.numbers[address], self._unused[address]
            self._states.pop(address, None)
            self._zones.pop(address, None)


def active_entries(addresses: Sequence[bytes], numbers: Sequence[int]) -> tuple[PackedColumn, PackedColumn]:
    """Return keys and values of active backends of one family, without a zone."""
    keys = PackedColumn(array("I", numbers).tobytes(), map_entries.NUMBER_SIZE)
    return keys, map_entries.active_backends(addresses)
