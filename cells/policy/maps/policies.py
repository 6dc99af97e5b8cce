"""Computes each endpoint's policy and writes it to the endpoint's policy map; deletions can be deferred.

Why: when the ipcache changes the identity of an address, packets carry the old identity until then. Its
entries are deleted afterwards, so that no flow is cut.
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
    """The contents of policy maps with deferred deletions, by endpoint id."""

    def __init__(self) -> None:
        self._depth = 0
        self._entries: dict[int, PolicyEntries] = {}

    def __contains__(self, endpoint_id: int) -> bool:
        return endpoint_id in self._entries

    @contextmanager
    def deferring_deletes(self) -> Iterator[None]:
        """Defer deletions while at least one such block is active."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def empty(self) -> bool:
        """Whether no deletion is deferred and no block is active."""
        return not self._depth and not self._entries

    @property
    def due(self) -> Collection[int]:
        """Endpoints with deferred deletions that can be done now."""
        return () if self._depth else list(self._entries)

    def with_previous(
        self, endpoint_id: int, previous: PolicyEntries | None, wanted: PolicyEntries
    ) -> PolicyEntries:
        """Return the entries to write: ``wanted``, and during a block the map's other entries.

        After the write, the caller records it by record().
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

    def record(self, endpoint_id: int, written: PolicyEntries, wanted: PolicyEntries) -> None:
        """Record the entries that were written to a map."""
        if written is wanted:
            self._entries.pop(endpoint_id, None)
        else:
            self._entries[endpoint_id] = written

    def forget(self, endpoint_id: int) -> None:
        """Drop the deferred deletions of an endpoint."""
        self._entries.pop(endpoint_id, None)


# Desired policies in a table, and their realization in policy maps.
#
# Source: Cilium 1.17, policy maps, desired and realized policy, and their full reconciliation.

BATCH: Final = 50
"""Maps that are compared or written before the job yields to the event loop: about 5 ms if little changes."""


class PolicyMapError(HiveError):
    """Some policy maps could not be updated."""


class EndpointPolicies:
    """Computes endpoints' policies and writes them to policy maps. Synchronous, except its jobs.

    An entry that another program adds to a policy map stays until the next full reconciliation.
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
        """``apply_soon`` schedules a call of apply()."""
        self.table = table
        """Desired policies, by endpoint id."""
        self.realized = realized
        """Realized policies, by endpoint id."""
        self._computer = computer
        self._pool = pool
        self._log = log
        self._lockdown = lockdown
        self._overflowed: dict[int, int] = {}
        """Endpoints in lockdown, and the number of entries that did not fit into their maps."""
        self._changed: set[int] = set()
        """Endpoints with maps that apply() must update."""
        self._written: dict[int, EndpointPolicy] = {}
        """The policy that was last written to each map."""
        self._deferred = DeferredDeletes()
        self._previous: dict[int, PolicyEntries] = {}
        """The entries of adopted maps that are not written yet."""
        self._host_endpoints: set[int] = set()
        """Endpoints that are not regenerated, because they only have a policy map: the host endpoint."""
        self.outdated: Table[int, OutdatedPolicy] = Table(
            "endpoint-policies-outdated", key=lambda row: row.endpoint_id
        )
        """Endpoints that must be regenerated, by id; the regeneration calls realize()."""
        self._awaiting_proxies: set[int] = set()
        """Endpoints with written maps that wait for the acknowledgement of a proxy."""
        self._apply_soon = apply_soon

    # Endpoint ids and maps

    def acquire(self) -> int:
        """Return a free endpoint id, with a policy map that allows nothing.

        Raises PoolEmpty if no map is prepared yet, PolicyIdsExhausted if all ids are in use, OSError.
        """
        return self._pool.acquire()

    def adopt(self, endpoint_id: int) -> None:
        """Reserve the id and policy map of a restored endpoint. Raises HiveError, OSError.

        The caller keeps an initializer of ``realized`` until the map is written or its write has failed.
        """
        self._previous[endpoint_id] = self._pool.adopt(endpoint_id)

    def release(self, endpoint_id: int) -> None:
        """Drop the state of a removed endpoint; its id and map return to the pool. Raises OSError."""
        self._changed.discard(endpoint_id)
        self._written.pop(endpoint_id, None)
        self._previous.pop(endpoint_id, None)
        self._deferred.forget(endpoint_id)
        self._host_endpoints.discard(endpoint_id)
        self._computer.forget(endpoint_id)
        self._overflowed.pop(endpoint_id, None)
        self.table.delete(endpoint_id)
        self.realized.delete(endpoint_id)
        self.outdated.delete(endpoint_id)
        self._pool.release(endpoint_id)

    def follow_host(self, endpoint_id: int) -> None:
        """Treat the endpoint as the host endpoint: its policy map is updated without a regeneration."""
        self._host_endpoints.add(endpoint_id)

    # Policies

    @property
    def revision(self) -> int:
        """Revision of the rules in force."""
        return self._computer.revision

    def status(self, endpoint_id: int) -> RealizedPolicy:
        """The realized policy of an endpoint; with revision 0 if its map is not written yet."""
        return self.realized.get(endpoint_id) or RealizedPolicy(endpoint_id=endpoint_id)

    @property
    def unknown_rules(self) -> str:
        """The sources of rules that are not read yet; empty if none."""
        return self._computer.missing

    def keeps_restored_policy(self, endpoint_id: int) -> bool:
        """Whether a restored endpoint keeps the previous run's policy until rules are read.

        A policy computed from a part of the rules could allow what other rules deny.
        """
        return endpoint_id in self._previous and bool(self.unknown_rules)

    def ensure_identity(self, identity: int, labels: Collection[str]) -> None:
        """Add an identity to the maps of all endpoints, before any packet carries it.

        apply() retries failed writes.
        """
        rows = self._computer.update_identities([Identity(identity, tuple(labels))])
        if not rows:  # the usual case: another endpoint has this identity
            return
        present = self.table.keys()
        present_rows = [row for row in rows if row.endpoint_id in present]
        with self.table.txn() as txn:
            for row in present_rows:
                txn.put(row)
        for row, error in self._write_all(present_rows):
            self._log.warning("policy map not updated", endpoint=row.endpoint_id, error=str(error))
            self._changed.add(row.endpoint_id)
        if self._changed:
            self._apply_soon()

    def written(self, endpoint_id: int) -> EndpointPolicy | None:
        """The policy in the endpoint's map, also after a failed write; None before the first write."""
        return self._written.get(endpoint_id)

    def realize(self, endpoint_id: int, identity: int, labels: Collection[str], pod: PodKey = NO_POD) -> None:
        """Compute the policy of an endpoint and write it to its map, after the maps of its peers.

        A no-op while keeps_restored_policy(); the restoration calls again afterwards. Raises HiveError if the
        policy cannot be computed, and OSError if the kernel rejects a write: then the map is unchanged or
        partially changed, as its status shows.
        """
        self.ensure_identity(identity, labels)
        if self.keeps_restored_policy(endpoint_id):
            return
        try:
            policy = self._computer.compute(endpoint_id, identity, labels, pod)
        except HiveError as error:
            self._failed(endpoint_id, error)
            raise
        self.table.put(policy)
        self._write(policy)

    def change(self, policies: Iterable[EndpointPolicy], reason: str) -> None:
        """Set the desired policies of endpoints; jobs update their maps.

        An endpoint with a new revision of the rules is regenerated, and its log shows the reason; if its
        entries are unchanged, only its revision is updated. Changes without a new revision (identities of
        peers) are written to the map without a regeneration, and retried until they succeed.
        """
        outdated: list[OutdatedPolicy] = []
        with self.table.txn() as rows:
            for policy in policies:
                known = rows.get(policy.endpoint_id)
                if known is None:  # removed, or its first policy is not computed yet
                    continue
                rows.put(policy)
                if self._is_realized(policy, known):
                    self._mark_written(policy)
                elif policy.endpoint_id in self._host_endpoints:
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
        """Defer deletions from maps during the block; additions are written.

        Until the deletions, the realized revision is the previous one.
        """
        try:
            with self._deferred.deferring_deletes():
                yield
        finally:
            self._changed.update(self._deferred.due)
            if self._changed:
                self._apply_soon()

    def _is_realized(self, policy: EndpointPolicy, known: EndpointPolicy) -> bool:
        """Whether the map already has the policy, because its entries equal the previous ones."""
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
        """Do change(), and wait until all maps are updated or one has failed. Raises PolicyMapError."""
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
        """Write changes without a new revision to the maps.

        Raises PolicyMapError; the next call retries the failed maps.
        """
        failed = []
        waiting, count = list(self._changed), 1
        while waiting:
            some, waiting = waiting[:count], waiting[count:]
            started_at = time.monotonic()
            policies = [policy for one in some if (policy := self.table.get(one)) is not None]
            self._changed.difference_update(some)
            refused = self._write_all(policies)
            self._changed.update(policy.endpoint_id for policy, _ in refused)
            failed += [f"endpoint {policy.endpoint_id}: {error}" for policy, error in refused]
            # A write takes from some microseconds to 15 ms, depending on the number of changed entries.
            count = min(2 * count, BATCH) if time.monotonic() - started_at < SLICE / 2 else max(count // 2, 1)
            await anyio.lowlevel.checkpoint()
        if failed:
            raise PolicyMapError(f"{len(failed)} policy maps are not updated, {failed[0]}")

    async def reconcile(self) -> None:
        """Compare whole policy maps with the desired policies and correct them. Raises OSError."""
        for position, policy in enumerate(self.table.all()):
            skipped = policy.endpoint_id in self._overflowed or policy.endpoint_id in self._deferred
            if self.table.get(policy.endpoint_id) is policy and not skipped:
                wrong = self._pool.repair(policy.endpoint_id, policy.entries)
                if wrong:
                    self._log.warning(
                        "policy map was changed by another program, repaired",
                        endpoint=policy.endpoint_id,
                        entries=wrong,
                    )
            if position % BATCH == BATCH - 1:
                await anyio.lowlevel.checkpoint()

    def _write_all(self, policies: Collection[EndpointPolicy]) -> list[tuple[EndpointPolicy, OSError]]:
        """Write policies to their maps; return the policies that failed, with the errors.

        Policies that fail in a batch are written again one by one.
        """
        one_by_one = policies
        if self._deferred.empty and not self._overflowed:
            refused = self._pool.write_all({one.endpoint_id: one.entries for one in policies})
            one_by_one = [one for one in policies if one.endpoint_id in refused]
            self._mark_written(
                *(one for one in policies if one.endpoint_id not in refused) if refused else policies
            )
        failed = []
        for one in one_by_one:
            try:
                self._write(one)
            except OSError as error:
                failed.append((one, error))
        return failed

    def _write(self, policy: EndpointPolicy) -> None:
        try:
            self._write_map(policy)
        except OSError as error:
            self._written[policy.endpoint_id] = self._map_contents(policy.endpoint_id)
            self._failed(policy.endpoint_id, error)
            raise
        self._mark_written(policy)

    def _map_contents(self, endpoint_id: int) -> EndpointPolicy:
        """Return the contents of a map after a failed write, as a policy."""
        held = PolicyEntryMap(self._pool.held(endpoint_id))

        def enforced(*, egress: bool) -> bool:
            wildcard = held.get(PolicyKey(identity=0, egress=egress))
            return wildcard is None or wildcard.deny

        return EndpointPolicy(
            endpoint_id=endpoint_id,
            revision=self.status(endpoint_id).revision,
            ingress_enforced=enforced(egress=False),
            egress_enforced=enforced(egress=True),
            entries=held,
        )

    def _mark_written(self, *policies: EndpointPolicy) -> None:
        """Record that these policies are written to their maps."""
        if len(policies) == 1:  # the usual case, which an ADD awaits_proxies for
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
        """Record that a policy is written to its map; return its status."""
        number, revision = policy.endpoint_id, policy.revision
        self._changed.discard(number)
        self._written[number] = policy
        self._previous.pop(number, None)
        awaits_proxies = not self._computer.acknowledged(number)
        if awaits_proxies:
            self._awaiting_proxies.add(number)
        if awaits_proxies or number in self._deferred:
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
        """Update the realized revisions of endpoints that awaited a proxy's acknowledgement."""
        awaiting, self._awaiting_proxies = self._awaiting_proxies, set()
        self._mark_written(*(self._written[one] for one in awaiting if one in self._written))

    def _write_map(self, policy: EndpointPolicy) -> None:
        """Write a policy to its map.

        With ``lockdown``, the map of a policy that does not fit is emptied, until the policy has fewer
        entries.
        """
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
        text = f"locked down, nothing is allowed: {wanted} entries do not fit (bpf-policy-map-max)"
        raise OSError(errno.ENOSPC, text)

    def _write_entries(self, number: int, wanted: PolicyEntries) -> None:
        known = self._written.get(number)
        previous = known.entries if known is not None else self._adopted_entries(number, wanted)
        entries = self._deferred.with_previous(number, previous, wanted)
        if entries is not wanted:
            try:
                self._pool.write(number, entries)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            else:
                self._deferred.record(number, entries, wanted)
                return
        self._pool.write(number, wanted)
        self._deferred.record(number, wanted, wanted)

    def _adopted_entries(self, number: int, wanted: PolicyEntries) -> PolicyEntryMap | None:
        """Return the entries of an adopted map if some of them must be deleted, else None."""
        held = self._previous.get(number)
        if held is None or all(key in wanted for key in held):
            return None
        return PolicyEntryMap(held)

    def _failed(self, endpoint_id: int, error: Exception) -> None:
        """Set the error and the map's contents in the status; its revisions are unchanged."""
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
