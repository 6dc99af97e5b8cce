"""What became of each policy object: in force, or refused and why, as a table and as events.

Gives: PolicyObject, policy_objects, policy_events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from cells.kubernetes import (
    CILIUM_CLUSTERWIDE_NETWORK_POLICIES,
    CILIUM_NETWORK_POLICIES,
    NETWORK_POLICIES,
    EventDraft,
    EventSource,
    Kind,
    Regarding,
    Resources,
)
from cells.policy.control.settings import PolicyRuleSettings
from lifecycle import Member, Table


class PolicyObject(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``policies``."""

    kind: str
    namespace: str
    name: str
    valid: bool
    """Whether it is in force as it is written."""
    refused: bool = False
    """Whether its latest version is refused, and the previous one is in force, if there was one."""
    message: str
    """``Policy validation succeeded``, or why the object is refused and its previous version is in force, or
    what of it is in force otherwise than it is written."""
    path: str = ""
    """The field that is wrong."""
    unenforced: str = ""
    """Why connections that its rules.http select are dropped, or may go by rules of before; else empty."""
    revision: int = 0
    """Of the rules, when the object was last taken in."""

    @property
    def text(self) -> str:
        """The message, and where in the object."""
        return f"{self.message} (at {self.path})" if self.path else self.message


def policy_objects() -> Table[PolicyObject]:
    """The ``policies`` table, by kind, namespace and name."""
    return Table("policies", key=lambda one: (one.kind, one.namespace, one.name))


def policy_kinds(settings: PolicyRuleSettings) -> Iterator[Kind[Any]]:
    """The kinds of objects that count."""
    if settings.enable_k8s_networkpolicy:
        yield NETWORK_POLICIES
    if settings.enable_cilium_network_policy:
        yield CILIUM_NETWORK_POLICIES
    if settings.enable_cilium_clusterwide_network_policy:
        yield CILIUM_CLUSTERWIDE_NETWORK_POLICIES


def policy_events(
    policies: Table[PolicyObject], settings: PolicyRuleSettings, resources: Resources
) -> Member[EventSource]:
    """Policies that are refused, or in force otherwise than they are written."""
    tables = {kind.kind: (kind, resources.table(kind)) for kind in policy_kinds(settings)}

    def drafts(row: PolicyObject) -> Iterator[EventDraft]:
        if row.kind not in tables or (row.valid and not row.unenforced):
            return
        kind, table = tables[row.kind]
        held = table.get((row.namespace, row.name))
        about = Regarding(kind, row.name, row.namespace, held.metadata.uid if held is not None else "")
        if not row.valid:
            reason = "PolicyRefused" if row.refused else "NotEnforcedAsWritten"
            yield EventDraft(about, reason, row.text, "Enforce")
        if row.unenforced:
            yield EventDraft(about, "RequestsNotAllowed", row.unenforced, "Enforce", shared=False)

    return EventSource("policies", policies, drafts)
