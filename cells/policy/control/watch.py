"""Follows policy objects, CIDR groups and identities, and updates maps in an order that cuts no flow.

Controller: reads the tables of objects, identities and remote endpoints; calls EndpointPolicies and claims
prefixes in the ipcache.

Why: the entries of a prefix's identity are added to policy maps before the ipcache assigns the identity to
packets, and deleted after the ipcache does not assign it any more. So no packet is subject to a partial
policy.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import anyio
import msgspec

from cells.cluster.identity.identities import Identities, Identity
from cells.cluster.remote_endpoints import PeerPods, RemoteEndpoint
from cells.kubernetes.objects.cilium_policy import CILIUM_CIDR_GROUPS, CiliumCIDRGroup
from cells.kubernetes.objects.core import ENDPOINT_SLICES, PODS, SERVICES, Pod
from cells.kubernetes.objects.kind import Kind, Object
from cells.kubernetes.resources import Resources
from cells.policy.compute import in_slices
from cells.policy.compute.repository import RulesChanged
from cells.policy.control.computer import RulePolicy
from cells.policy.control.http_redirects import HTTPProxyState
from cells.policy.control.names import NamedAddresses, PolicyPrefixes
from cells.policy.control.objects import (
    NONE,
    ClusterPorts,
    PolicyObject,
    PolicyRuleSettings,
    ProcessedChanges,
    RuleSources,
    of_pod,
    of_remote,
    policy_kinds,
)
from cells.policy.control.view import PolicyCounts
from cells.policy.labels import Prefix, parse_prefix
from cells.policy.maps import EndpointPolicies, EndpointPolicy, PodKey
from cells.policy.rules import PolicyError, Unenforced
from cells.policy.rules import RuleSource as PolicySource
from lifecycle import Change, Health, Jobs, Logger, Member, Table

NAMES_PATIENCE: Final = 5.0
"""Seconds that a change of rules waits for the identities of addresses of DNS names."""

VALID = "Policy validation succeeded"


class PolicyStatuses:
    """The status of each policy object: in the table ``policies``, in the log, and in the agent's health."""

    def __init__(
        self,
        policy: RulePolicy,
        policies: EndpointPolicies,
        statuses: Table[tuple[str, str, str], PolicyObject],
        proxies: Table[str, HTTPProxyState],
        counts: PolicyCounts,
        *,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._policy = policy
        self._policies = policies
        self._statuses = statuses
        self._counts = counts
        self._log = log
        self._health = health
        self._unenforced: dict[PolicySource, str] = {}
        """Objects with HTTP rules that the proxy does not enforce, and why."""
        self._not_as_written: dict[PolicySource, Unenforced] = {}
        """Objects that are not enforced as written, and the first reason of each."""
        self._outdated: set[PolicySource] = set()
        """Objects with a rejected latest version; the previous version, if any, is in force."""
        jobs.observe("http-proxy", ProcessedChanges(proxies).batches, self._follow_proxy)

    def removed(self, source: PolicySource) -> None:
        """Delete the status of a deleted object."""
        self._counts.changed(valid=True)
        self._counts.ingest(source.kind, "delete")
        with self._statuses.txn() as statuses:
            statuses.delete((source.kind, source.namespace, source.name))
        self._enforced(source)
        self._report_unenforced(source, ())
        self._outdated.discard(source)

    def accepted(self, source: PolicySource) -> None:
        """Record that the latest version of an object is in force."""
        self._counts.ingest(source.kind, "add")
        self._outdated.discard(source)
        self._accepted(source)

    def refused(self, source: PolicySource, error: PolicyError) -> None:
        """Record that the latest version of an object is rejected."""
        self._counts.ingest(source.kind, "add")
        self._outdated.add(source)
        self._refused(source, error)

    def translated(self, failed: Mapping[PolicySource, PolicyError]) -> None:
        """Update the statuses of objects that were translated again, some of which ``failed``."""
        for source, error in failed.items():
            self._refused(source, error)
        for source in self._policy.following_sources():
            if source in failed or source in self._outdated:
                continue
            row = self._row(source)
            held = self._statuses.get((source.kind, source.namespace, source.name))
            if held is not None and (row.valid, row.text) != (held.valid, held.text):
                self._accepted(source)

    def unreadable(self, group: str, network: str, error: ValueError) -> None:
        """Log an invalid prefix in a CIDR group."""
        self._log.warning(
            "network of a CIDR group ignored: correct it to ADDRESS/LENGTH",
            group=group,
            network=network,
            error=str(error),
        )

    def untranslated(self, failed: Mapping[PolicySource, PolicyError]) -> None:
        """Record that objects that refer to services cannot be translated."""
        for source, error in failed.items():
            self._refused(source, error)

    async def _follow_proxy(self, changes: list[Change[str, HTTPProxyState]]) -> None:
        """Update the statuses of HTTP rules after a change of the proxy's state."""
        del changes
        self._policies.follow_proxies()
        for row in self._statuses.all():
            source = PolicySource(row.kind, row.namespace, row.name)
            unenforced = self._enforced(source)
            if unenforced != row.unenforced:
                with self._statuses.txn() as statuses:
                    statuses.put(msgspec.structs.replace(row, unenforced=unenforced))

    def _enforced(self, source: PolicySource) -> str:
        """Why HTTP rules of an object are not enforced, empty if they are; also shown in log and health."""
        requests = self._policy.http_rules(source)
        why = self._policy.http_proxy.reason(requests) if requests else ""
        if why == self._unenforced.get(source, ""):
            return why
        if why:
            self._unenforced[source] = why
            self._log.warning("HTTP rules not enforced", policy=str(source), reason=why)
        else:
            del self._unenforced[source]
            if requests:
                self._log.info("HTTP rules enforced", policy=str(source))
        if self._unenforced:
            first, *others = self._unenforced
            more = f" and {len(others)} other policies" if others else ""
            self._health.child("http-rules").degraded(f"{first}{more}: {self._unenforced[first]}")
        else:
            self._health.child("http-rules").remove()
        return why

    def _accepted(self, source: PolicySource) -> None:
        self._report_unenforced(source, self._policy.unenforced(source))
        self._put(self._row(source))

    def _row(self, source: PolicySource) -> PolicyObject:
        """The status of an object with its latest version in force."""
        wrong = next(iter(self._policy.unenforced(source)), None)
        return PolicyObject(
            kind=source.kind,
            namespace=source.namespace,
            name=source.name,
            valid=wrong is None,
            message=VALID if wrong is None else wrong.text,
            path="" if wrong is None else wrong.path,
            unenforced=self._enforced(source),
            revision=self._policy.revision,
        )

    def _report_unenforced(self, source: PolicySource, unenforced: Sequence[Unenforced]) -> None:
        """Report rules that are not enforced as written, in log and health."""
        for one in unenforced:
            self._log.warning(
                "policy rule not enforced as written", policy=str(source), path=one.path, error=one.text
            )
        if unenforced:
            self._not_as_written[source] = unenforced[0]
        elif self._not_as_written.pop(source, None) is None:
            return
        if not self._not_as_written:
            self._health.child("rules").remove()
            return
        first, one = next(iter(self._not_as_written.items()))
        more = (
            f", and {len(self._not_as_written) - 1} other policies" if len(self._not_as_written) > 1 else ""
        )
        self._health.child("rules").degraded(
            f"{first} at {one.path}: {one.text}{more}; see hive policy list --refused"
        )

    def _refused(self, source: PolicySource, error: PolicyError) -> None:
        self._log.warning("policy refused", policy=str(source), path=error.path, error=str(error))
        held = self._statuses.get((source.kind, source.namespace, source.name))
        self._put(
            PolicyObject(
                kind=source.kind,
                namespace=source.namespace,
                name=source.name,
                valid=False,
                refused=True,
                message=str(error),
                path=error.path,
                unenforced=self._enforced(source),
                revision=held.revision if held is not None else 0,
            ),
        )

    def _put(self, row: PolicyObject) -> None:
        self._counts.changed(valid=row.valid)
        with self._statuses.txn() as statuses:
            statuses.put(row)


class PolicyRollout:
    """Updates policy maps and the ipcache after changes of rules, in an order that cuts no flow."""

    def __init__(
        self,
        policy: RulePolicy,
        policies: EndpointPolicies,
        prefixes: PolicyPrefixes,
        names: NamedAddresses,
        sources: RuleSources,
        *,
        jobs: Jobs,
    ) -> None:
        self._policy = policy
        self._policies = policies
        self._prefixes = prefixes
        self._names = names
        self._sources = sources
        self._claimed = prefixes.claims()
        self._starting = ExitStack()
        """Defers deletions until maps of restored endpoints have the identities of prefixes and names."""
        self._starting.enter_context(policies.deferring_deletes())
        self._started = False
        jobs.one_shot("first", self._first)

    async def apply_batch(self, changes: AsyncIterable[RulesChanged]) -> None:
        """Apply a batch of changes of rules."""
        # Other tasks write maps between slices: entries that later changes allow again must not be deleted.
        with self._policies.deferring_deletes():
            rows = await self._policy.follow([change async for change in changes])
        await self.follow_rules(rows)
        await self._policies.apply()

    async def _first(self) -> None:
        """Assign identities to prefixes and names, once the maps of restored endpoints have their entries.

        Then entries of the previous run may be deleted, also in the maps.
        """
        await self._sources.known()
        await self._names.begin()
        await self._policies.realized.wait_initialized()
        self._started = True
        await self.follow_rules([])
        self._names.follow_rules((), ())
        self._starting.close()
        self._claimed()

    async def follow_rules(self, rows: list[EndpointPolicy]) -> None:
        """Update maps and ipcache after a change of rules; may be called again if it was cancelled.

        Entries are added to maps, then addresses get their identities, then entries are deleted from maps: a
        flow that stays allowed is not cut while the identity of its peer changes.
        """
        new, removed = self._prefixes.difference(self._policy.prefixes)
        if not new and not removed and not self._names.selectors_changed:
            await self.realize(rows, "policy rules changed")
            return
        rows += self._policy.update_identities(await self._prefixes.acquire(new))
        if not self._started:
            await self.realize(rows, "policy rules changed")
            return
        with self._policies.deferring_deletes():
            await self.realize(rows, "policy rules changed")
            self._prefixes.claim(new)
            self._names.follow_rules(new, removed)
            with anyio.move_on_after(NAMES_PATIENCE):
                await self._names.wait_all_written()
            self._prefixes.withdraw(removed)
        self._prefixes.release(removed)
        await self._policies.apply()

    async def realize(self, rows: Iterable[EndpointPolicy], reason: str) -> None:
        """Set policies of endpoints and wait until their maps are written. Raises PolicyMapError."""
        await self._policies.change_and_wait(rows, reason)


class PeerWatch:
    """Follows the peers of rules: identities, and the named ports of all pods."""

    def __init__(
        self,
        resources: Resources,
        identities: Identities,
        remote: Table[tuple[str, str], RemoteEndpoint],
        policy: RulePolicy,
        rollout: PolicyRollout,
        sources: RuleSources,
        others: list[Member[PeerPods]],
        *,
        jobs: Jobs,
    ) -> None:
        self._policy = policy
        self._rollout = rollout
        self._ports = ClusterPorts()
        follow = sources.follow
        jobs.observe("identities", follow(identities.table).batches, self._follow_identities)
        jobs.observe("pods", follow(resources.table(PODS)).batches, self._follow_pods)
        jobs.observe(remote.name, follow(remote).batches, partial(self._follow_remote, remote.name))
        for pods in others:  # rules do not wait for these: a kvstore or another cluster may be away
            name = pods.table.name
            jobs.observe(name, pods.table.changes, partial(self._follow_remote, name))

    async def _follow_identities(self, changes: list[Change[int, Identity]]) -> None:
        rows = await self._policy.follow_identities(changes)
        await self._rollout.realize(rows, "identities changed")

    async def _follow_pods(self, changes: list[Change[tuple[str, str], Pod]]) -> None:
        for change in changes:
            self._ports.report(("pod", change.key), of_pod(change.row) if change.row is not None else NONE)
        await self._follow_ports({change.key for change in changes})

    async def _follow_remote(self, table: str, changes: Iterable[Change[Any, Any]]) -> None:
        for change in changes:
            ports = of_remote(change.row) if change.row is not None else NONE
            self._ports.report((table, change.key), ports)
        await self._follow_ports(())

    async def _follow_ports(self, pods: Collection[PodKey]) -> None:
        """Update policies after named ports changed, in these pods of this node or in other pods."""
        rows = self._policy.follow_pods(pods)
        rows += self._policy.follow_ports(self._ports.all())
        await self._rollout.realize(rows, "named ports changed")


class PolicyWatch:
    """Follows policy objects, and the CIDR groups and services that their rules refer to."""

    def __init__(
        self,
        resources: Resources,
        settings: PolicyRuleSettings,
        policy: RulePolicy,
        rollout: PolicyRollout,
        statuses: PolicyStatuses,
        counts: PolicyCounts,
        sources: RuleSources,
        *,
        jobs: Jobs,
    ) -> None:
        self._policy = policy
        self._rollout = rollout
        self._statuses = statuses
        self._counts = counts
        self._processed: dict[PolicySource, dict[str, Any]] = {}
        """Processed objects without their status, so that an update of the status is a no-op."""
        follow = sources.follow
        jobs.observe("cidr-groups", follow(resources.table(CILIUM_CIDR_GROUPS)).batches, self._follow_groups)
        for name, services in (("services", SERVICES), ("endpoint-slices", ENDPOINT_SLICES)):
            jobs.observe(name, follow(resources.table(services)).batches, self._follow_services)
        for kind in policy_kinds(settings):
            batches = follow(resources.table(kind)).batches
            jobs.observe(kind.plural, batches, partial(self._follow_policies, kind))

    async def _follow_policies(self, kind: Kind[Any], changes: list[Change[tuple[str, str], Object]]) -> None:
        started_at = time.monotonic()
        processed: dict[PolicySource, dict[str, Any]] = {}

        async def changed() -> AsyncIterator[RulesChanged]:
            async for change in in_slices(changes):
                for one in self._apply_change(kind, change, processed):
                    yield one

        await self._rollout.apply_batch(changed())
        self._processed |= processed
        if processed:
            self._counts.realized(kind.kind, time.monotonic() - started_at)

    def _apply_change(
        self,
        kind: Kind[Any],
        change: Change[tuple[str, str], Object],
        processed: dict[PolicySource, dict[str, Any]],
    ) -> Iterator[RulesChanged]:
        """Apply the change of one object; a no-op if only its status changed or it is rejected."""
        namespace, name = change.key
        source = PolicySource(kind.kind, namespace, name)
        if change.row is None:
            self._processed.pop(source, None)
            yield self._policy.remove(source)
            self._statuses.removed(source)
            return
        object_ = _as_object(kind, change.row)
        if self._processed.get(source) == object_:
            return
        processed[source] = object_
        try:
            yield self._policy.put(object_)
        except PolicyError as error:
            self._statuses.refused(source, error)
        else:
            self._statuses.accepted(source)

    async def _follow_groups(self, changes: list[Change[tuple[str, str], CiliumCIDRGroup]]) -> None:
        groups = {
            change.key[1]: self._group_prefixes(change.row) if change.row is not None else None
            for change in changes
        }
        rows, failed = self._policy.set_groups(groups)
        self._statuses.translated(failed)
        await self._rollout.follow_rules(rows)

    def _group_prefixes(self, group: CiliumCIDRGroup) -> tuple[Prefix, ...]:
        """Return the prefixes of a group. Invalid ones are logged and ignored."""
        found = []
        for text in group.spec.external_cidrs or ():
            try:
                found.append(parse_prefix(text))
            except ValueError as error:
                self._statuses.unreadable(group.name, text, error)
        return tuple(found)

    async def _follow_services(self, changes: list[Change[Any, Any]]) -> None:
        del changes
        rows, failed = self._policy.follow_services()
        self._statuses.untranslated(failed)
        await self._rollout.follow_rules(rows)


def _as_object(kind: Kind[Any], row: Object) -> dict[str, Any]:
    """The object without its status, as the policy engine reads it."""
    object_: dict[str, Any] = msgspec.to_builtins(row)
    object_.pop("status", None)
    return object_ | {"kind": kind.kind}
