"""Judges policies as agents do.

Needs: PolicySettings, OperatorOptions, ClusterObjects, the table of verdicts.   Gives: PolicyVerdicts.
Source: Cilium 1.17's operator: the message is what is wrong, an object without any rule is valid.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final, cast

import msgspec

from cells.kubernetes import (
    CILIUM_CLUSTERWIDE_NETWORK_POLICIES,
    CILIUM_NETWORK_POLICIES,
    CiliumNetworkPolicy,
    Key,
    Kind,
)
from cells.operator.objects import ClusterObjects
from cells.operator.options import OperatorOptions
from cells.operator.policies.settings import PolicySettings
from cells.policy import rules
from lifecycle import Change, Jobs, Logger, Table

KINDS: Final[tuple[Kind[Any], ...]] = (CILIUM_NETWORK_POLICIES, CILIUM_CLUSTERWIDE_NETWORK_POLICIES)
VALID: Final = "Valid"
SUCCEEDED: Final = "Policy validation succeeded"


class PolicyVerdict(msgspec.Struct, frozen=True, gc=False):
    """What a policy shall say of itself."""

    kind: str
    namespace: str
    name: str
    uid: str
    valid: bool
    message: str


class PolicyVerdicts:
    """A verdict of each policy that does not say it already."""

    def __init__(
        self,
        settings: PolicySettings,
        options: OperatorOptions,
        objects: ClusterObjects,
        rows: Table[PolicyVerdict],
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self.active = settings.validate_network_policy
        """Whether policies are judged."""
        self._world = rules.World(policy_options(settings, options))
        self._rows = rows
        self._log = log
        if self.active:
            for kind in KINDS:
                follow = partial(self._follow, kind)
                jobs.observe(kind.plural, objects.table(kind).changes, follow)

    async def _follow(self, kind: Kind[Any], changes: list[Change[CiliumNetworkPolicy]]) -> None:
        with self._rows.txn() as txn:
            for change in changes:
                namespace, name = cast("Key", change.key)
                if change.row is None or (verdict := self._judged(kind, change.row)) is None:
                    txn.delete((kind.kind, namespace, name))
                else:
                    txn.put(verdict)

    def _judged(self, kind: Kind[Any], policy: CiliumNetworkPolicy) -> PolicyVerdict | None:
        """The verdict; None where the policy says it already."""
        valid, message = True, SUCCEEDED
        if policy.rules:
            object_ = msgspec.to_builtins(policy) | {"kind": kind.kind}
            try:
                translated = rules.translate(object_, self._world)
            except rules.PolicyError as error:
                valid, message = False, error.reason
            else:
                for unenforced in (one for rule in translated for one in rule.unenforced):
                    valid, message = False, unenforced.text
                    break
        if says(policy, valid, message):
            return None
        if not valid:
            self._log.warning("policy is not valid", policy="/".join(policy.key), error=message)
        namespace, name = policy.key
        return PolicyVerdict(kind.kind, namespace, name, policy.metadata.uid, valid, message)


def says(policy: CiliumNetworkPolicy, valid: bool, message: str) -> bool:
    """Whether a policy's condition has this status and this message."""
    conditions: Iterable[Any] = policy.status.conditions or ()
    return any((one.type, one.status, one.message) == (VALID, str(valid), message) for one in conditions)


def policy_options(settings: PolicySettings, options: OperatorOptions) -> rules.PolicyOptions:
    """What the operator's settings say of the agents."""
    return msgspec.structs.replace(
        rules.SERVED,
        cluster_name=options.cluster_name,
        enable_ipv4=options.enable_ipv4,
        enable_ipv6=options.enable_ipv6,
        enable_l7_proxy=settings.enable_l7_proxy,
        enable_icmp_rules=settings.enable_icmp_rules,
        enable_node_selector_labels=settings.enable_node_selector_labels,
    )
