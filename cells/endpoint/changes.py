"""Changes of endpoints at run time: labels, source address verification and policy enforcement.

``EndpointChanges`` serves the API and ``PodLabelsWatch``; ``PolicyEnforcement`` serves ``PATCH /config``.
Each change updates the endpoint's row and requests a regeneration.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any, Final

import anyio
import msgspec

from cells.base.labels import Label
from cells.cluster.identity.identities import Identities, Identity
from cells.endpoint.labels import EndpointLabels, labels_of, with_custom_labels, with_pod_labels
from cells.endpoint.manager import Endpoints
from cells.endpoint.model import Endpoint, EndpointError, RegenerationLevel, State
from cells.endpoint.pods import KubernetesPods
from cells.endpoint.regeneration import Regenerations
from cells.kubernetes.objects.core import Namespace, Pod
from cells.policy import Enforcement
from cells.policy.maps import EndpointPolicies, NodePolicy
from lifecycle import Backoff, Change, Health, Jobs, Logger, Table

# Changes of one endpoint: labels and source address verification.
#
# Source: Cilium 1.17, PATCH /endpoint/{id}/labels and /config.


class EndpointChanges:
    """Changes an endpoint's row and regenerates the endpoint; failed regenerations are retried."""

    def __init__(self, endpoints: Endpoints, regenerations: Regenerations, identities: Identities) -> None:
        self._endpoints = endpoints
        self._regenerations = regenerations
        self._identities = identities
        self._filter = identities.filter

    async def relabel(self, endpoint: Endpoint, wanted: Iterable[str]) -> str:
        """Replace the endpoint's custom labels.

        Returns the error of the regeneration; empty if it succeeded or nothing changed. Raises EndpointError
        500.
        """
        custom = tuple(wanted)
        if not await self._endpoints.relabel(
            endpoint.id, lambda now: with_custom_labels(now, custom, self._filter)
        ):
            return ""
        return await self._regenerate(endpoint, "updated security labels")

    def is_outdated(self, endpoint: Endpoint, labels: Iterable[Label] | None) -> bool:
        """Whether the endpoint's labels or identity differ from those of its pod.

        ``labels`` are the pod's; with None (unknown), only the identity is compared with the endpoint's
        labels.
        """
        if labels is not None and with_pod_labels(endpoint, labels, self._filter) != labels_of(endpoint):
            return True
        return not self._identities.is_current(endpoint.identity, endpoint.labels)

    async def apply_pod_labels(self, endpoint: Endpoint, labels: Iterable[Label] | None) -> str:
        """Apply the labels of the endpoint's pod; custom labels stay.

        Returns the error of the regeneration; empty if it succeeded or nothing changed. With None for
        ``labels``, only an identity that no longer represents the endpoint's labels is replaced. Raises
        EndpointError 500.
        """
        pod = None if labels is None else tuple(labels)

        def wanted(now: Endpoint) -> EndpointLabels:
            return labels_of(now) if pod is None else with_pod_labels(now, pod, self._filter)

        if not await self._endpoints.relabel(endpoint.id, wanted):
            return ""
        return await self._regenerate(endpoint, "updated security labels")

    async def verify_source(self, endpoint: Endpoint, verify: bool) -> str:
        """Enable or disable source address verification for the endpoint.

        Returns the error of the regeneration; empty if it succeeded or nothing changed.
        """
        if endpoint.datapath.disable_sip_verification is not verify:
            return ""
        self._endpoints.verify_source(endpoint.id, verify)
        return await self._regenerate(endpoint, "endpoint options changed via API")

    async def _regenerate(self, endpoint: Endpoint, reason: str) -> str:
        return await self._regenerations.request(endpoint.id, RegenerationLevel.DATAPATH, reason).result()


# Changes of the agent's runtime configuration.
#
# Source: Cilium 1.17, the daemon's configuration.


class Enforced(msgspec.Struct, frozen=True):
    """The configuration that ``PATCH /config`` can change."""

    enforcement: Enforcement
    source_ip_verification: bool


class PolicyEnforcement:
    """Changes the policy enforcement mode and source address verification of all endpoints."""

    def __init__(
        self,
        policy: NodePolicy,
        policies: EndpointPolicies,
        endpoints: Endpoints,
        regenerations: Regenerations,
        log: Logger,
    ) -> None:
        self._policy = policy
        self._policies = policies
        self._endpoints = endpoints
        self._regenerations = regenerations
        self._log = log

    @property
    def now(self) -> Enforced:
        """The current configuration."""
        return Enforced(self._policy.enforcement, self._endpoints.source_ip_verification)

    def refusal(self, wanted: Enforced) -> str:
        """Return why the change is impossible now, in one line; empty if it is possible.

        Restored endpoints keep their policies until all rules are received, in every mode: without the rules,
        the traffic that a mode allows is unknown.
        """
        policies = self._policies
        waiting = sum(policies.keeps_restored_policy(endpoint.id) for endpoint in self._endpoints.all())
        if wanted.enforcement is self.now.enforcement or not waiting:
            return ""
        return (
            f"policy enforcement not changed: {waiting} restored endpoints keep their policies"
            f" until received: {policies.unknown_rules}; retry then"
        )

    async def change(self, wanted: Enforced) -> list[int]:
        """Apply the configuration; return the ids of endpoints that failed to regenerate.

        Failed regenerations are retried. Returns at once if nothing changes. Call refusal() first. On return,
        the maps of all other endpoints conform to this configuration or a later one.
        """
        if wanted == self.now:
            return []
        self._endpoints.source_ip_verification = wanted.source_ip_verification
        self._policy.enforce(wanted.enforcement)
        self._log.info(
            "configuration changed",
            enforcement=wanted.enforcement.value,
            source_ip_verification=wanted.source_ip_verification,
            revision=self._policy.revision,
        )
        reason = "agent configuration update"
        requested = [
            self._regenerations.request(endpoint.id, RegenerationLevel.POLICY, reason)
            for endpoint in self._endpoints.all()
        ]
        failed = [one.endpoint_id for one in requested if await one.result()]
        return [number for number in failed if self._endpoints.get(number) is not None]


# Updates of endpoints' labels from pods and namespaces.
#
# Controller: tables of pods, namespaces, identities and endpoints in; changed endpoints out.
# Source:     Cilium 1.17, updates of pods and namespaces.

RETRY: Final = Backoff(first=1.0, maximum=30.0)


class PodLabelsWatch:
    """Applies changed labels of pods and namespaces to endpoints, each in its own task.

    An endpoint that waits for its identity does not delay others.
    """

    def __init__(
        self,
        pods: KubernetesPods,
        changes: EndpointChanges,
        endpoints: Table[int, Endpoint],
        *,
        pod_table: Table[tuple[str, str], Pod],
        namespaces: Table[tuple[str, str], Namespace],
        identities: Table[int, Identity],
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self._pods = pods
        self._changes = changes
        self._endpoints = endpoints
        self._health = health.child("pod-labels")
        self._log = log
        self._queued: set[int] = set()
        self._updating: set[int] = set()
        self._failing: dict[int, str] = {}
        self._pending = anyio.Event()
        self.lag: float | None = None
        """Seconds from the creation of an endpoint to the first event of its pod, for the newest pod.

        0 if the pod's object was received first; None before the first pod.
        """
        jobs.observe("pods", pod_table.changes, self._follow_pods)
        jobs.observe("namespaces", namespaces.changes, self._follow_namespaces)
        jobs.observe("identities", identities.changes, self._follow_identities)
        jobs.observe("endpoints", partial(endpoints.changes, only=self._needs_update), self._follow_endpoints)
        jobs.one_shot("rules", self._follow_rules)
        jobs.one_shot("pod-labels", self._run)

    async def _follow_rules(self) -> None:
        """Check all endpoints once all rules are received; before, pods' labels are not applied."""
        await self._pods.ready()
        self._check(one.id for one in self._endpoints.all())

    async def _follow_pods(self, changes: list[Change[tuple[str, str], Pod]]) -> None:
        self._check_by({change.key for change in changes}, lambda one: (one.pod_namespace, one.pod_name))
        for change in changes:
            if change.old is None and change.row is not None:
                self.lag = self._lag_of(change.row)

    def _lag_of(self, pod: Pod) -> float:
        """Return the seconds since the creation of the pod's endpoint; 0 without an endpoint.

        Source: Cilium's cilium_k8s_event_lag_seconds.
        """
        now = time.time()
        created = [
            one.created
            for one in self._endpoints.all()
            if (one.pod_namespace, one.pod_name) == (pod.namespace, pod.name)
        ]
        return max((max(0.0, now - when) for when in created), default=0.0)

    async def _follow_namespaces(self, changes: list[Change[tuple[str, str], Namespace]]) -> None:
        self._check_by({change.key for change in changes}, lambda one: ("", one.pod_namespace))

    async def _follow_endpoints(self, changes: list[Change[int, Endpoint]]) -> None:
        """Check new and restored endpoints, which may have missed changes of their pods."""
        self._check(change.row.id for change in changes if change.row is not None)

    def _needs_update(self, _key: Hashable, _old: Endpoint | None, row: Endpoint | None) -> bool:
        return row is not None and self._is_outdated(row.id)

    async def _follow_identities(self, changes: list[Change[int, Identity]]) -> None:
        """Check the endpoints with a changed identity."""
        self._check_by({change.key for change in changes}, lambda one: one.identity)

    def _check_by(self, keys: set[Any], key_of: Any) -> None:
        self._check(one.id for one in self._endpoints.all() if key_of(one) in keys)

    def _check(self, numbers: Iterable[int]) -> None:
        self._queued.update(numbers)
        if self._queued:
            self._pending.set()

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            while True:
                if not self._queued - self._updating:
                    self._pending = anyio.Event()
                    await self._pending.wait()
                for number in self._queued - self._updating:
                    self._queued.discard(number)
                    if self._is_outdated(number):
                        self._updating.add(number)
                        tasks.start_soon(self._update_labels, number)
                await anyio.lowlevel.checkpoint()

    def _is_outdated(self, number: int) -> bool:
        endpoint = self._endpoints.get(number)
        if endpoint is None or endpoint.state is not State.READY:
            return False
        return self._changes.is_outdated(endpoint, self._labels(endpoint))

    def _labels(self, endpoint: Endpoint) -> list[Label] | None:
        """Return the labels of the endpoint's pod; None without a pod, or if its object is not received."""
        if not endpoint.pod_name:
            return None
        return self._pods.of(endpoint.pod_namespace, endpoint.pod_name, endpoint.pod_uid)

    async def _update_labels(self, number: int) -> None:
        failures = 0
        try:
            while (endpoint := self._endpoints.get(number)) is not None:
                try:
                    await self._changes.apply_pod_labels(endpoint, self._labels(endpoint))
                    break
                except EndpointError as error:
                    failures += 1
                    self._set_error(number, f"{endpoint.title}: {error.text}")
                    await anyio.sleep(RETRY.pause(failures))
            self._set_error(number, "")
        finally:
            self._updating.discard(number)
            self._check([number])

    def _set_error(self, number: int, error: str) -> None:
        if not error:
            self._failing.pop(number, None)
        elif self._failing.get(number) != error:
            self._failing[number] = error
            self._log.warning("pod labels not applied to the endpoint", endpoint=number, error=error)
        if self._failing:
            more = f" and {len(self._failing) - 1} more" if len(self._failing) > 1 else ""
            self._health.degraded(f"{next(iter(self._failing.values()))}{more}")
        else:
            self._health.ok("endpoints have their pods' labels")
