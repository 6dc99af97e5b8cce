"""The policy maps in the kernel.

For:    EndpointPolicies. Needs: PolicyMaps. Gives: KernelPolicyMaps.
"""

from collections.abc import Mapping

from cells.maps import PolicyMap, PolicyMaps
from cells.policy.maps.rows import PolicyEntries


class KernelPolicyMaps:
    """The real :class:`~cells.policy.maps.edges.PolicyMapPool`."""

    def __init__(self, pool: PolicyMaps) -> None:
        self._pool = pool
        self._slots: dict[int, PolicyMap] = {}

    def acquire(self) -> int:
        """A prepared number and policy map."""
        return self._keep(self._pool.acquire())

    def adopt(self, endpoint_id: int) -> PolicyEntries:
        """The number and policy map from before the restart."""
        return self._slots[self._keep(self._pool.adopt(endpoint_id))].held

    def write(self, endpoint_id: int, entries: PolicyEntries) -> None:
        """Write what changed since it was last written."""
        self._slots[endpoint_id].replace(entries)

    def write_all(self, wanted: Mapping[int, PolicyEntries]) -> dict[int, OSError]:
        """The same of several."""
        slots = self._slots
        return self._pool.replace_all((slots[number], entries) for number, entries in wanted.items())

    def repair(self, endpoint_id: int, entries: PolicyEntries) -> int:
        """Read the whole map; write it only where it is wrong."""
        slot = self._slots[endpoint_id]
        present = slot.dump()
        wrong = len(present.keys() ^ entries.keys()) + sum(
            not entry.same_verdict(present[key]) for key, entry in entries.items() if key in present
        )
        if wrong:
            slot.reload()
            slot.replace(entries)
        return wrong

    def release(self, endpoint_id: int) -> None:
        """Give it back."""
        slot = self._slots.pop(endpoint_id, None)
        if slot is not None:
            self._pool.release(slot)

    def _keep(self, slot: PolicyMap) -> int:
        self._slots[slot.endpoint_id] = slot
        return slot.endpoint_id
