"""Policy objects, CIDR groups and identities to policies of endpoints, in an order that is safe.

Controller: the tables of objects, identities, remote endpoints in; EndpointPolicies, claims of prefixes out.
Why:    a prefix gets its identity in policy maps before the ipcache gives it to packets, and loses it there
        first, so no packet is evaluated by half a policy.
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
from cells.cluster.remote_endpoints import RemoteEndpoint
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
    Followed,
    PolicyObject,
    PolicyRuleSettings,
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
from lifecycle import Change, Health, Jobs, Logger, Table

NAMES_PATIENCE: Final = 5.0
"""Seconds that a change of rules waits for addresses of names to get their identities."""

VALID = "Policy validation succeeded"


class PolicyStatuses:
    """What became of each policy object: in the table ``policies``, in the log, and in the agent's health."""

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
        """Objects with rules for requests that no proxy follows, and why."""
        self._unlike: dict[PolicySource, Unenforced] = {}
        """Objects that are in force otherwise than they are written, and the first reason of each."""
        self._outdated: set[PolicySource] = set()
        """Objects with a refused latest version: an earlier one is in force, if any."""
        jobs.observe("http-proxy", Followed(proxies).batches, self._follow_proxy)

    def removed(self, source: PolicySource) -> None:
        """The object is there no more."""
        self._counts.changed(valid=True)
        with self._statuses.txn() as statuses:
            statuses.delete((source.kind, source.namespace, source.name))
        self._enforced(source)
        self._note(source, ())
        self._outdated.discard(source)

    def accepted(self, source: PolicySource) -> None:
        """Its latest version is in force."""
        self._outdated.discard(source)
        self._accepted(source)

    def refused(self, source: PolicySource, error: PolicyError) -> None:
        """Its latest version is not in force."""
        self._outdated.add(source)
        self._refused(source, error)

    def translated(self, failed: Mapping[PolicySource, PolicyError]) -> None:
        """The rules of objects that name CIDR groups are translated anew; some of them ``failed``."""
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
        """A CIDR group has a text that cannot be read as a network."""
        self._log.warning(
            "network of a CIDR group ignored: correct it to ADDRESS/LENGTH",
            group=group,
            network=network,
            error=str(error),
        )

    def unanswered(self, failed: Mapping[PolicySource, PolicyError]) -> None:
        """Rules that name services cannot be followed."""
        for source, error in failed.items():
            self._refused(source, error)

    async def _follow_proxy(self, changes: list[Change[str, HTTPProxyState]]) -> None:
        """The proxy of HTTP runs, or has taken the rules, or not: what policies' rows say of it follows."""
        del changes
        self._policies.follow_proxies()
        for row in self._statuses.all():
            source = PolicySource(row.kind, row.namespace, row.name)
            unenforced = self._enforced(source)
            if unenforced != row.unenforced:
                with self._statuses.txn() as statuses:
                    statuses.put(msgspec.structs.replace(row, unenforced=unenforced))

    def _enforced(self, source: PolicySource) -> str:
        """Why rules of the object for requests are not enforced, if so; the log and health have it, too."""
        reads = self._policy.reads_requests(source)
        why = self._policy.http_proxy.message if reads else ""
        if why == self._unenforced.get(source, ""):
            return why
        if why:
            self._unenforced[source] = why
            self._log.warning("HTTP rules not enforced", policy=str(source), reason=why)
        else:
            del self._unenforced[source]
            if reads:
                self._log.info("HTTP rules enforced", policy=str(source))
        if self._unenforced:
            first, *others = self._unenforced
            more = f" and {len(others)} other policies" if others else ""
            self._health.child("http-rules").degraded(f"{first}{more}: {self._unenforced[first]}")
        else:
            self._health.child("http-rules").remove()
        return why

    def _accepted(self, source: PolicySource) -> None:
        self._note(source, self._policy.unenforced(source))
        self._put(self._row(source))

    def _row(self, source: PolicySource) -> PolicyObject:
        """The status of an object with rules in force, as they are written or not."""
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

    def _note(self, source: PolicySource, unenforced: Sequence[Unenforced]) -> None:
        """Log rules that are not in force as they are written, and have health name them."""
        for one in unenforced:
            self._log.warning(
                "policy rule not enforced as written", policy=str(source), path=one.path, error=one.text
            )
        if unenforced:
            self._unlike[source] = unenforced[0]
        elif self._unlike.pop(source, None) is None:
            return
        if not self._unlike:
            self._health.child("rules").remove()
            return
        first, one = next(iter(self._unlike.items()))
        more = f", and {len(self._unlike) - 1} other policies" if len(self._unlike) > 1 else ""
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
    """Has policy maps and addresses follow the rules in an order in which no flow is cut."""

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
        """Open until restored endpoints' maps know the identities that the ipcache is to give."""
        self._starting.enter_context(policies.deferring_deletes())
        self._started = False
        jobs.one_shot("first", self._first)

    async def take_in(self, changes: AsyncIterable[RulesChanged]) -> None:
        """Follow these changes of rules, as they come."""
        # While it takes turns with others, maps must not lose what its own new rules are to allow.
        with self._policies.deferring_deletes():
            rows = await self._policy.follow([change async for change in changes])
        await self.follow_rules(rows)
        await self._policies.apply()

    async def _first(self) -> None:
        """Give prefixes and names their identities, after the maps of restored endpoints have those.

        Then what an earlier agent left may go, in the maps, too.
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
        """Rules have changed. May be called again with more, where it was cut short.

        Maps get what is new, then addresses get their identities, then maps lose what is over: a flow that
        was allowed, and is, is not cut because its peer is another identity's now.
        """
        new, removed = self._prefixes.beside(self._policy.prefixes)
        if not new and not removed and not self._names.concerned:
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
                await self._names.all_settled()
            self._prefixes.withdraw(removed)
        self._prefixes.release(removed)
        await self._policies.apply()

    async def realize(self, rows: Iterable[EndpointPolicy], reason: str) -> None:
        """Update the endpoints of these rows."""
        await self._policies.change_and_wait(rows, reason)


class PeerWatch:
    """Follows the peers that rules select: identities, and the named ports of pods here and elsewhere."""

    def __init__(
        self,
        resources: Resources,
        identities: Identities,
        remote: Table[tuple[str, str], RemoteEndpoint],
        policy: RulePolicy,
        rollout: PolicyRollout,
        sources: RuleSources,
        *,
        jobs: Jobs,
    ) -> None:
        self._policy = policy
        self._rollout = rollout
        self._ports = ClusterPorts()
        follow = sources.follow
        jobs.observe("identities", follow(identities.table).batches, self._follow_identities)
        jobs.observe("pods", follow(resources.table(PODS)).batches, self._follow_pods)
        jobs.observe("remote-endpoints", follow(remote).batches, self._follow_remote)

    async def _follow_identities(self, changes: list[Change[int, Identity]]) -> None:
        rows = await self._policy.follow_identities(changes)
        await self._rollout.realize(rows, "identities changed")

    async def _follow_pods(self, changes: list[Change[tuple[str, str], Pod]]) -> None:
        for change in changes:
            self._ports.report(("pod", change.key), of_pod(change.row) if change.row is not None else NONE)
        await self._follow_ports({change.key for change in changes})

    async def _follow_remote(self, changes: list[Change[tuple[str, str], RemoteEndpoint]]) -> None:
        for change in changes:
            ports = of_remote(change.row) if change.row is not None else NONE
            self._ports.report(("remote", change.key), ports)
        await self._follow_ports(())

    async def _follow_ports(self, pods: Collection[PodKey]) -> None:
        """Names of ports have changed in these pods of this node, or anywhere."""
        rows = self._policy.follow_pods(pods)
        rows += self._policy.follow_ports(self._ports.all())
        await self._rollout.realize(rows, "named ports changed")


class PolicyWatch:
    """Follows what rules are made of: policy objects, groups of networks, and services that rules name."""

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
        self._taken: dict[PolicySource, dict[str, Any]] = {}
        """What became of an object is known: a change of its status alone is not taken in again."""
        follow = sources.follow
        jobs.observe("cidr-groups", follow(resources.table(CILIUM_CIDR_GROUPS)).batches, self._follow_groups)
        for name, services in (("services", SERVICES), ("endpoint-slices", ENDPOINT_SLICES)):
            jobs.observe(name, follow(resources.table(services)).batches, self._follow_services)
        for kind in policy_kinds(settings):
            batches = follow(resources.table(kind)).batches
            jobs.observe(kind.plural, batches, partial(self._follow_policies, kind))

    async def _follow_policies(self, kind: Kind[Any], changes: list[Change[tuple[str, str], Object]]) -> None:
        began = time.monotonic()
        taken: dict[PolicySource, dict[str, Any]] = {}

        async def changed() -> AsyncIterator[RulesChanged]:
            async for change in in_slices(changes):
                for one in self._take_in(kind, change, taken):
                    yield one

        await self._rollout.take_in(changed())
        self._taken |= taken
        if taken:
            self._counts.realized(kind.kind, time.monotonic() - began)

    def _take_in(
        self,
        kind: Kind[Any],
        change: Change[tuple[str, str], Object],
        taken: dict[PolicySource, dict[str, Any]],
    ) -> Iterator[RulesChanged]:
        """Change the rules as one object did; nothing where that was its status alone, or is refused."""
        namespace, name = change.key
        source = PolicySource(kind.kind, namespace, name)
        if change.row is None:
            self._taken.pop(source, None)
            yield self._policy.remove(source)
            self._statuses.removed(source)
            return
        object_ = _as_object(kind, change.row)
        if self._taken.get(source) == object_:
            return
        taken[source] = object_
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
        """The networks of a group. One that cannot be read is logged and left out."""
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
        self._statuses.unanswered(failed)
        await self._rollout.follow_rules(rows)


def _as_object(kind: Kind[Any], row: Object) -> dict[str, Any]:
    """The object as the policy engine reads it."""
    object_: dict[str, Any] = msgspec.to_builtins(row)
    object_.pop("status", None)
    return object_ | {"kind": kind.kind}
