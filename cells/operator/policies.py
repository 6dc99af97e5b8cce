"""Writes to the status of Cilium's policies whether they are valid, as ``kubectl get cnp`` shows.

Table ``policy-verdicts``: the pending conditions of CiliumNetworkPolicies and
CiliumClusterwideNetworkPolicies. A reconciler writes them. Policies are validated by the agents' code; one
operator writes the conditions, not every node.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import msgspec

from cells.kubernetes.objects.cilium_policy import (
    CILIUM_CLUSTERWIDE_NETWORK_POLICIES,
    CILIUM_NETWORK_POLICIES,
    CiliumNetworkPolicy,
)
from cells.kubernetes.objects.kind import Kind
from cells.operator.api_server import ClusterAPI, ObjectWriter
from cells.operator.objects import ClusterObjects
from cells.operator.options import ServedCluster
from cells.policy import rules
from cells.policy.rules.peers import TranslationContext
from cells.policy.rules.translate import translate
from lifecycle import (
    Change,
    Jobs,
    Logger,
    Reconciler,
    Settings,
    Table,
    config,
    invoke,
    minutes,
    module,
    provide,
)

__all__ = ["OperatorPolicySettings", "PolicyVerdict", "PolicyVerdicts", "cell"]


# The agents' options, by which policies are evaluated.


class OperatorPolicySettings(Settings, frozen=True):
    """Settings of the policies cell; names and values are those of the agents' settings."""

    validate_network_policy: bool = True
    """Write to status.conditions of Cilium's policies whether they are valid."""

    enable_l7_proxy: bool = True
    """Whether agents enforce HTTP and DNS rules; if not, such policies are reported as invalid."""

    enable_icmp_rules: bool = True
    """Whether agents enforce ICMP rules; if not, such policies are reported as invalid."""

    enable_node_selector_labels: bool = False
    """Whether agents enforce fromNodes and toNodes; if not, such policies are reported as invalid."""


# Validates policies as agents do.
#
# Source: Cilium 1.17's operator: the condition's message is the error; an object without rules is valid.

KINDS: Final[tuple[Kind[Any], ...]] = (CILIUM_NETWORK_POLICIES, CILIUM_CLUSTERWIDE_NETWORK_POLICIES)
VALID: Final = "Valid"
SUCCEEDED: Final = "Policy validation succeeded"


class PolicyVerdict(msgspec.Struct, frozen=True, gc=False):
    """The desired condition of a policy."""

    kind: str
    namespace: str
    name: str
    uid: str
    valid: bool
    message: str


class PolicyVerdicts:
    """Maintains the pending conditions of policies."""

    def __init__(
        self,
        settings: OperatorPolicySettings,
        cluster: ServedCluster,
        objects: ClusterObjects,
        rows: Table[tuple[str, str, str], PolicyVerdict],
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self.active = settings.validate_network_policy
        """Whether policies are validated."""
        self._context = TranslationContext(policy_options(settings, cluster))
        self._rows = rows
        self._log = log
        if self.active:
            for kind in KINDS:
                follow = partial(self._follow, kind)
                jobs.observe(kind.plural, objects.table(kind).changes, follow)

    async def _follow(
        self, kind: Kind[Any], changes: list[Change[tuple[str, str], CiliumNetworkPolicy]]
    ) -> None:
        with self._rows.txn() as txn:
            for change in changes:
                namespace, name = change.key
                if change.row is None or (verdict := self._checked(kind, change.row)) is None:
                    txn.delete((kind.kind, namespace, name))
                else:
                    txn.put(verdict)

    def _checked(self, kind: Kind[Any], policy: CiliumNetworkPolicy) -> PolicyVerdict | None:
        """Return the pending condition, or None if the policy has it already."""
        valid, message = True, SUCCEEDED
        if policy.rules:
            object_ = msgspec.to_builtins(policy) | {"kind": kind.kind}
            try:
                translated = translate(object_, self._context)
            except rules.PolicyError as error:
                valid, message = False, error.reason
            else:
                for unenforced in (one for rule in translated for one in rule.unenforced):
                    valid, message = False, unenforced.text
                    break
        if has_condition(policy, valid, message):
            return None
        if not valid:
            self._log.warning("policy is not valid", policy="/".join(policy.key), error=message)
        namespace, name = policy.key
        return PolicyVerdict(kind.kind, namespace, name, policy.metadata.uid, valid, message)


def has_condition(policy: CiliumNetworkPolicy, valid: bool, message: str) -> bool:
    """Whether a policy's condition has this status and message."""
    conditions: Iterable[Any] = policy.status.conditions or ()
    return any((one.type, one.status, one.message) == (VALID, str(valid), message) for one in conditions)


def policy_options(settings: OperatorPolicySettings, cluster: ServedCluster) -> rules.PolicyOptions:
    """Return the agents' options, from the operator's settings."""
    return msgspec.structs.replace(
        rules.SUPPORTED,
        cluster_name=cluster.name,
        enable_ipv4=cluster.ipv4,
        enable_ipv6=cluster.ipv6,
        enable_l7_proxy=settings.enable_l7_proxy,
        enable_icmp_rules=settings.enable_icmp_rules,
        enable_node_selector_labels=settings.enable_node_selector_labels,
    )


# Writes the conditions of policies.
#
# Source: CiliumNetworkPolicy ``status.conditions``; one of type Valid, without a reason.


class ConditionWriter(ObjectWriter[tuple[str, str, str], PolicyVerdict]):
    """Writes the condition Valid of policies; other conditions are unchanged."""

    async def write(self, patch: PolicyVerdict) -> None:
        """See ObjectWriter."""
        kind = next(kind for kind in KINDS if kind.kind == patch.kind)
        change = partial(with_condition, patch)
        await self.server.client.update(kind, patch.name, change, patch.namespace, subresource="status")


def with_condition(verdict: PolicyVerdict, live: dict[str, Any]) -> dict[str, Any] | None:
    """Return the object with its condition, or None if it has it already or was recreated."""
    if live["metadata"].get("uid") != verdict.uid:
        return None
    wanted = {"type": VALID, "status": str(verdict.valid), "message": verdict.message}
    status = live.get("status") or {}
    conditions = status.get("conditions") or []
    held: dict[str, Any] = next((one for one in conditions if one.get("type") == VALID), {})
    if wanted.items() <= held.items():
        return None
    since = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    if held.get("status") == wanted["status"] and held.get("lastTransitionTime"):
        since = held["lastTransitionTime"]
    written = {**wanted, "lastTransitionTime": since}
    replaced = [written if one is held else one for one in conditions]
    return {**live, "status": {**status, "conditions": replaced if held else [*replaced, written]}}


AGAIN: Final = minutes(1)


def policy_verdicts() -> Table[tuple[str, str, str], PolicyVerdict]:
    """Create the table of pending conditions, by kind, namespace and name."""
    return Table("policy-verdicts", key=lambda one: (one.kind, one.namespace, one.name))


def write(
    server: ClusterAPI, rows: Table[tuple[str, str, str], PolicyVerdict], verdicts: PolicyVerdicts, jobs: Jobs
) -> None:
    """Start the reconciler of conditions, if policies are validated."""
    if verdicts.active:
        writer = ConditionWriter(server)
        jobs.observe("write", Reconciler(rows, writer, full_every=AGAIN, put_early=True))


cell = module(
    "policies",
    "Conditions of policies",
    config(OperatorPolicySettings),
    provide(policy_verdicts, PolicyVerdicts),
    invoke(write),
)
