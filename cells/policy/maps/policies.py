"""Each endpoint's policy: computed, in a table, and made so in its policy map; deletions can wait.

Why: an address changes its identity in the ipcache. Until then its packets are checked by the old one: what
     that may do goes afterwards.
"""

import errno
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio.lowlevel
from msgspec.structs import replace

from cells.cluster.identity.identities import Identity
from cells.maps.policy_map import EntryChanges, PolicyEntryMap
from cells.maps.records.endpoints import PolicyKey
from cells.policy.compute import SLICE
from cells.policy.maps.rows import (
    NO_POD,
    EndpointPolicy,
    OutdatedPolicy,
    PodKey,
    PolicyComputer,
    PolicyEntries,
    PolicyMapPool,
    RealizedPolicy,
    enforced_directions,
)
from lifecycle import HiveError, Logger, Table


class DeferredDeletes:
    """The entries of maps that have more than is wanted, by endpoint id."""

    def __init__(self) -> None:
        self._depth = 0
        self._entries: dict[int, PolicyEntries] = {}

    def __contains__(self, endpoint_id: int) -> bool:
        return endpoint_id in self._entries

    @contextmanager
    def deferring_deletes(self) -> Iterator[None]:
        """As long as one such block goes on, with_previous() keeps entries."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def nothing(self) -> bool:
        """Whether maps are to have what is wanted, and have it."""
        return not self._depth and not self._entries

    @property
    def over(self) -> Collection[int]:
        """Endpoints with maps that may be written as wanted now."""
        return () if self._depth else list(self._entries)

    def with_previous(
        self, endpoint_id: int, previous: PolicyEntries | None, wanted: PolicyEntries
    ) -> PolicyEntries:
        """What to write: ``wanted``, with what the map has besides, if that stays.

        Note it with keep().
        """
        previous = self._entries.get(endpoint_id, previous)
        if (
            not self._depth
            or not isinstance(previous, PolicyEntryMap)
            or not isinstance(wanted, PolicyEntryMap)
        ):
            return wanted
        changes = wanted.difference(previous)
        keeps = any(key in previous for key in changes.removed)
        return previous.changed(EntryChanges(changes.new, ())) if keeps else wanted

    def keep(self, endpoint_id: int, written: PolicyEntries, wanted: PolicyEntries) -> None:
        """The map has what was written."""
        if written is wanted:
            self._entries.pop(endpoint_id, None)
        else:
            self._entries[endpoint_id] = written

    def forget(self, endpoint_id: int) -> None:
        """The endpoint is removed."""
        self._entries.pop(endpoint_id, None)


# Each endpoint's policy: computed, put in a table, and written to its policy map.
#
# Source: Cilium 1.17, policy maps, desired and realized policy, and their full reconciliation.

STRETCH: Final = 50
"""Most maps looked at before others get their turn on the event loop: about 5 ms where little changes."""


class PolicyMapError(HiveError):
    """Some policy maps could not be made right."""


class EndpointPolicies:
    """What endpoints may do, and their policy maps. All but the two jobs is synchronous.

    A foreign entry in a policy map stays until the next comparison of whole maps.
    """

    def __init__(
        self,
        table: Table[int, EndpointPolicy],
        realized: Table[int, RealizedPolicy],
        computer: PolicyComputer,
        pool: PolicyMapPool,
        log: Logger,
        *,
        lockdown: bool = False,
        apply_soon: Callable[[], object] = lambda: None,
    ) -> None:
        """``apply_soon`` has apply() called."""
        self.table = table
        """What is wanted, by endpoint id."""
        self.realized = realized
        """What the maps have, by endpoint id."""
        self._computer = computer
        self._pool = pool
        self._log = log
        self._lockdown = lockdown
        self._overflowed: dict[int, int] = {}
        """Endpoints with a map that had no room, and is empty therefore; for how many entries."""
        self._changed: set[int] = set()
        """Endpoints with maps that are to follow."""
        self._written: dict[int, EndpointPolicy] = {}
        """What maps have, as far as it is known."""
        self._deferred = DeferredDeletes()
        self._previous: dict[int, PolicyEntries] = {}
        """What maps had that were taken over and are not written yet."""
        self._hosts: set[int] = set()
        """Endpoints that are not regenerated: of the node itself there is nothing but its policy map."""
        self.outdated: Table[int, OutdatedPolicy] = Table(
            "endpoint-policies-outdated", key=lambda row: row.endpoint_id
        )
        """Endpoints that are to be regenerated, by id: each asks to realize()."""
        self._awaiting: set[int] = set()
        """Endpoints with maps that are right, and proxies that are behind."""
        self._apply_soon = apply_soon

    # Numbers and maps

    def acquire(self) -> int:
        """A free endpoint number; its policy map allows nothing.

        Raises PoolEmpty when none is prepared at the moment, PolicyIdsExhausted when there are none left,
        OSError.
        """
        return self._pool.acquire()

    def adopt(self, endpoint_id: int) -> None:
        """Take over the number and policy map from before a restart; raises HiveError, OSError.

        The caller is an initializer of ``realized`` until the map has been written, or could not be.
        """
        self._previous[endpoint_id] = self._pool.adopt(endpoint_id)

    def release(self, endpoint_id: int) -> None:
        """The endpoint is removed: give its number and map back; raises OSError."""
        self._changed.discard(endpoint_id)
        self._written.pop(endpoint_id, None)
        self._previous.pop(endpoint_id, None)
        self._deferred.forget(endpoint_id)
        self._hosts.discard(endpoint_id)
        self._computer.forget(endpoint_id)
        self._overflowed.pop(endpoint_id, None)
        self.table.delete(endpoint_id)
        self.realized.delete(endpoint_id)
        self.outdated.delete(endpoint_id)
        self._pool.release(endpoint_id)

    def follow_host(self, endpoint_id: int) -> None:
        """The endpoint is the node itself: its map follows its policy, and nothing else is regenerated."""
        self._hosts.add(endpoint_id)

    # Policies

    @property
    def revision(self) -> int:
        """Of the rules in force."""
        return self._computer.revision

    def status(self, endpoint_id: int) -> RealizedPolicy:
        """What the endpoint's map has; of revision 0 when that is not known."""
        return self.realized.get(endpoint_id) or RealizedPolicy(endpoint_id=endpoint_id)

    @property
    def unknown_rules(self) -> str:
        """What must be known before policies follow from the rules; empty when nothing is missing."""
        return self._computer.missing

    def awaits_rules(self, endpoint_id: int) -> bool:
        """Whether the endpoint keeps its policy from before a restart, because rules are not known yet.

        Computed from a part of the rules, a policy would allow what the others forbid.
        """
        return endpoint_id in self._previous and bool(self.unknown_rules)

    def ensure_identity(self, identity: int, labels: Collection[str]) -> None:
        """Add this identity to the maps of all endpoints, before any packet carries it.

        A map that refuses is tried again, see apply().
        """
        rows = self._computer.update_identities([Identity(identity, tuple(labels))])
        if not rows:  # as nearly always: other endpoints have it
            return
        present = self.table.keys()
        there = [row for row in rows if row.endpoint_id in present]
        with self.table.txn() as txn:
            for row in there:
                txn.put(row)
        for row, error in self._write_all(there):
            self._log.warning("policy map not updated", endpoint=row.endpoint_id, error=str(error))
            self._changed.add(row.endpoint_id)
        if self._changed:
            self._apply_soon()

    def written(self, endpoint_id: int) -> EndpointPolicy | None:
        """The policy that the endpoint's map was last made, or has after a refusal; None before the first."""
        return self._written.get(endpoint_id)

    def realize(self, endpoint_id: int, identity: int, labels: Collection[str], pod: PodKey = NO_POD) -> None:
        """Compute the policy of a pod's endpoint by its identity, make its map so, after its peers' maps.

        Nothing happens as long as the endpoint awaits_rules(); the restore asks again then.
        Raises HiveError when it cannot be computed, or OSError when the kernel refuses: the map has what it
        had, or a part of the change, and its status has that.
        """
        self.ensure_identity(identity, labels)
        if self.awaits_rules(endpoint_id):
            return
        try:
            policy = self._computer.compute(endpoint_id, identity, labels, pod)
        except HiveError as error:
            self._failed(endpoint_id, error)
            raise
        self.table.put(policy)
        self._write(policy)

    def change(self, policies: Iterable[EndpointPolicy], reason: str) -> None:
        """These are the policies of their endpoints now; their maps follow soon.

        Of rules with another revision the endpoints are regenerated, which their logs have with the reason;
        one with a map that is right has the new revision already, and is not. What changes without a new
        revision (peers that come and go) is written at once, and tried again until it is.
        """
        outdated: list[OutdatedPolicy] = []
        with self.table.txn() as rows:
            for policy in policies:
                known = rows.get(policy.endpoint_id)
                if known is None:  # it was removed, or its first policy is not computed yet
                    continue
                rows.put(policy)
                if self._is_realized(policy, known):
                    self._mark(policy)
                elif policy.endpoint_id in self._hosts:
                    self._changed.add(policy.endpoint_id)
                elif policy.revision != self.status(policy.endpoint_id).written:
                    outdated.append(OutdatedPolicy(policy.endpoint_id, policy.revision, reason))
                elif policy != known:
                    self._changed.add(policy.endpoint_id)
        if outdated:
            with self.outdated.txn() as waiting:
                for row in outdated:
                    waiting.put(row)
        if self._changed:
            self._apply_soon()

    @contextmanager
    def deferring_deletes(self) -> Iterator[None]:
        """During the block maps get what is new, and keep what they have; what is over goes afterwards.

        Until then their status does not say that they have the new revision.
        """
        try:
            with self._deferred.deferring_deletes():
                yield
        finally:
            self._changed.update(self._deferred.over)
            if self._changed:
                self._apply_soon()

    def _is_realized(self, policy: EndpointPolicy, known: EndpointPolicy) -> bool:
        """Whether the map has these entries already, as those that were wanted before."""
        status = self.status(policy.endpoint_id)
        return (
            policy.entries is known.entries
            and enforced_directions(policy) == enforced_directions(known)
            and self._written.get(policy.endpoint_id) is known
            and policy.endpoint_id not in self._deferred
            and not status.error
        )

    # Jobs

    async def change_and_wait(self, policies: Iterable[EndpointPolicy], reason: str) -> None:
        """As change(); wait until the maps have followed, or one has failed. Raises PolicyMapError."""
        latest = {row.endpoint_id: row for row in policies}
        if not latest:
            return
        self.change(latest.values(), reason)
        await self.apply()
        for endpoint_id, row in latest.items():
            seen = self.realized.get(endpoint_id)
            while seen is not None and not seen.error and seen.written < row.revision:
                seen = await self.realized.wait_changed(endpoint_id, seen)

    async def apply(self) -> None:
        """Make maps follow what changed without a new revision. Raises PolicyMapError, to be called again."""
        failed = []
        waiting, count = list(self._changed), 1
        while waiting:
            some, waiting = waiting[:count], waiting[count:]
            began = time.monotonic()
            policies = [policy for one in some if (policy := self.table.get(one)) is not None]
            self._changed.difference_update(some)
            refused = self._write_all(policies)
            self._changed.update(policy.endpoint_id for policy, _ in refused)
            failed += [f"endpoint {policy.endpoint_id}: {error}" for policy, error in refused]
            # A map takes from some microseconds to 15 ms, by how much of it changes.
            count = min(2 * count, STRETCH) if time.monotonic() - began < SLICE / 2 else max(count // 2, 1)
            await anyio.lowlevel.checkpoint()
        if failed:
            raise PolicyMapError(f"{len(failed)} policy maps are not updated, {failed[0]}")

    async def reconcile(self) -> None:
        """Compare every policy map as a whole, and put right what differs; raises OSError."""
        for position, policy in enumerate(self.table.all()):
            skipped = policy.endpoint_id in self._overflowed or policy.endpoint_id in self._deferred
            if self.table.get(policy.endpoint_id) is policy and not skipped:
                wrong = self._pool.repair(policy.endpoint_id, policy.entries)
                if wrong:
                    self._log.warning(
                        "policy map was changed by others, repaired",
                        endpoint=policy.endpoint_id,
                        entries=wrong,
                    )
            if position % STRETCH == STRETCH - 1:
                await anyio.lowlevel.checkpoint()

    def _write_all(self, policies: Collection[EndpointPolicy]) -> list[tuple[EndpointPolicy, OSError]]:
        """Make the maps so; those that refuse, and why. Who refuses at first is asked once more, singly."""
        singly = policies
        if self._deferred.nothing and not self._overflowed:
            refused = self._pool.write_all({one.endpoint_id: one.entries for one in policies})
            singly = [one for one in policies if one.endpoint_id in refused]
            self._mark(*(one for one in policies if one.endpoint_id not in refused) if refused else policies)
        failed = []
        for one in singly:
            try:
                self._write(one)
            except OSError as error:
                failed.append((one, error))
        return failed

    def _write(self, policy: EndpointPolicy) -> None:
        try:
            self._write_map(policy)
        except OSError as error:
            self._written[policy.endpoint_id] = self._held(policy.endpoint_id)
            self._failed(policy.endpoint_id, error)
            raise
        self._mark(policy)

    def _held(self, endpoint_id: int) -> EndpointPolicy:
        """What a map has that refused a policy: not what it had, nor what it was to have."""
        held = PolicyEntryMap(self._pool.held(endpoint_id))

        def enforced(*, egress: bool) -> bool:
            anyone = held.get(PolicyKey(identity=0, egress=egress))
            return anyone is None or anyone.deny

        return EndpointPolicy(
            endpoint_id=endpoint_id,
            revision=self.status(endpoint_id).revision,
            ingress_enforced=enforced(egress=False),
            egress_enforced=enforced(egress=True),
            entries=held,
        )

    def _mark(self, *policies: EndpointPolicy) -> None:
        """The maps have these policies."""
        if len(policies) == 1:  # as nearly always, and pods wait for it
            self.outdated.delete(policies[0].endpoint_id)
            self.realized.put(self._realized(policies[0]))
            return
        waiting = self.outdated.keys()
        if done := [one.endpoint_id for one in policies if one.endpoint_id in waiting]:
            with self.outdated.txn() as outdated:
                for endpoint_id in done:
                    outdated.delete(endpoint_id)
        with self.realized.txn() as rows:
            for policy in policies:
                rows.put(self._realized(policy))

    def _realized(self, policy: EndpointPolicy) -> RealizedPolicy:
        """Note that the map has the policy: its status."""
        number, revision = policy.endpoint_id, policy.revision
        self._changed.discard(number)
        self._written[number] = policy
        self._previous.pop(number, None)
        waits = not self._computer.acknowledged(number)
        if waits:
            self._awaiting.add(number)
        if waits or number in self._deferred:
            revision = self.status(number).revision
        return RealizedPolicy(
            endpoint_id=number,
            revision=revision,
            written=policy.revision,
            ingress_enforced=policy.ingress_enforced,
            egress_enforced=policy.egress_enforced,
            entries=len(policy.entries),
        )

    def follow_proxies(self) -> None:
        """Proxies have acknowledged something: endpoints that waited for that may have their revision now."""
        awaiting, self._awaiting = self._awaiting, set()
        self._mark(*(self._written[one] for one in awaiting if one in self._written))

    def _write_map(self, policy: EndpointPolicy) -> None:
        """Make the map so. One without room is emptied with ``lockdown``, until fewer entries are wanted."""
        number, wanted = policy.endpoint_id, len(policy.entries)
        least = self._overflowed.get(number, wanted + 1)
        if wanted < least:
            try:
                self._write_entries(number, policy.entries)
            except OSError as error:
                if error.errno != errno.ENOSPC or not self._lockdown:
                    raise
                least = wanted
            else:
                self._overflowed.pop(number, None)
                return
        self._overflowed[number] = least
        self._deferred.forget(number)
        self._pool.write(number, {})
        text = f"locked down, nothing is allowed: {wanted} entries have no room (bpf-policy-map-max)"
        raise OSError(errno.ENOSPC, text)

    def _write_entries(self, number: int, wanted: PolicyEntries) -> None:
        known = self._written.get(number)
        previous = known.entries if known is not None else self._over(number, wanted)
        entries = self._deferred.with_previous(number, previous, wanted)
        if entries is not wanted:
            try:
                self._pool.write(number, entries)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            else:
                self._deferred.keep(number, entries, wanted)
                return
        self._pool.write(number, wanted)
        self._deferred.keep(number, wanted, wanted)

    def _over(self, number: int, wanted: PolicyEntries) -> PolicyEntryMap | None:
        """What a map had when it was taken over, if it is to lose something of that."""
        held = self._previous.get(number)
        if held is None or all(key in wanted for key in held):
            return None
        return PolicyEntryMap(held)

    def _failed(self, endpoint_id: int, error: Exception) -> None:
        """Its status has the error, and what the map has now; of revision and rules, those before."""
        known, has = self.status(endpoint_id), self._written.get(endpoint_id)
        row = replace(known, error=str(error))
        if has is not None:
            row = replace(
                row,
                ingress_enforced=has.ingress_enforced,
                egress_enforced=has.egress_enforced,
                entries=len(has.entries),
            )
        with self.realized.txn() as rows:
            rows.put(row)
