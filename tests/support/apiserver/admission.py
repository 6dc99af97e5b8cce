"""Admission: what may be written where, and by whom, besides what roles say.

Gives: Admission. Source: NamespaceLifecycle, NodeRestriction, RBAC's escalation check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.apiserver import errors
from tests.support.apiserver.auth import RBAC, User, covered
from tests.support.apiserver.errors import Obj, Resource, refused

if TYPE_CHECKING:
    from tests.support.apiserver.call import Call
    from tests.support.apiserver.server import ApiServer

PROTECTED_NAMESPACES = {"default", "kube-system", "kube-public"}
NODE_LABELS = {
    "kubernetes.io/hostname",
    "kubernetes.io/arch",
    "kubernetes.io/os",
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
}


class Admission:
    """Refuses writes that may not be."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    def create(self, call: Call, obj: Obj) -> None:
        """Raises StatusError."""
        self._namespace(call, obj)
        self._definition(call, obj)
        if isinstance(call.user, User):
            if call.user.node:
                self._node_creates(call, obj, call.user.node)
            self._escalation(call, obj, call.user)

    def update(self, call: Call, new: Obj, old: Obj) -> None:
        """Raises StatusError."""
        if isinstance(call.user, User) and call.user.node:
            self._node_updates(call, new, old, call.user.node)

    def delete(self, call: Call, obj: Obj) -> None:
        """Raises StatusError."""
        if call.kind.plural == "namespaces" and call.name in PROTECTED_NAMESPACES:
            raise refused(call.kind.resource, call.name, "this namespace may not be deleted")

    def _namespace(self, call: Call, obj: Obj) -> None:
        if not call.kind.namespaced:
            return
        found = self._server.store.get(Resource("", "namespaces"), ("", call.namespace))
        if found is None:
            raise errors.not_found(Resource("", "namespaces"), call.namespace)
        if not found["metadata"].get("deletionTimestamp"):
            return
        resource, name = call.kind.resource, obj["metadata"].get("name", "")
        why = f"unable to create new content in namespace {call.namespace} because it is being terminated"
        details = resource.details(name)
        details["causes"] = [
            {
                "reason": "NamespaceTerminating",
                "message": f"namespace {call.namespace} is being terminated",
                "field": "metadata.namespace",
            }
        ]
        raise refused(resource, name, why, details)

    def _definition(self, call: Call, obj: Obj) -> None:
        if call.kind.custom is None:
            return
        name = f"{call.kind.plural}.{call.kind.group}"
        found = self._server.store.get(
            Resource("apiextensions.k8s.io", "customresourcedefinitions"), ("", name)
        )
        if found is not None and found["metadata"].get("deletionTimestamp"):
            why = "create not allowed while custom resource definition is terminating"
            raise refused(call.kind.resource, obj["metadata"].get("name", ""), why)

    def _escalation(self, call: Call, obj: Obj, user: User) -> None:
        if call.kind.group != RBAC or "system:masters" in user.groups:
            return
        if call.kind.plural in {"clusterroles", "roles"}:
            wanted = obj.get("rules") or []
        else:
            wanted = self._server.authorizer.role_rules(obj["roleRef"], call.namespace)
        held = [rule for rule, _ in self._server.authorizer.rules(user, call.namespace)]
        missing = [rule for rule in wanted if not covered(held, rule)]
        if not missing:
            return
        groups = " ".join(f'"{one}"' for one in user.groups)
        lines = "\n".join(_shown(rule) for rule in sorted(_broken_down(missing), key=_order))
        why = f'user "{user.name}" (groups=[{groups}]) is attempting to grant RBAC permissions not currently held:\n{lines}'
        raise refused(call.kind.resource, obj["metadata"]["name"], why)

    # ---- kubelets

    def _node_creates(self, call: Call, obj: Obj, node: str) -> None:
        name = obj["metadata"].get("name", "")
        if call.kind.plural == "nodes" and name != node:
            why = f'node "{node}" is not allowed to modify node "{name}"'
            raise refused(call.kind.resource, name, why)
        if call.kind.plural == "leases" and name != node:
            why = "can only access node lease with the same name as the requesting node"
            raise refused(call.kind.resource, name, why)

    def _node_updates(self, call: Call, new: Obj, old: Obj, node: str) -> None:
        if call.kind.plural == "leases" and call.name != node:
            why = "can only access node lease with the same name as the requesting node"
            raise refused(call.kind.resource, call.name, why)
        if call.kind.plural != "nodes":
            return
        if call.name != node:
            why = f'node "{node}" is not allowed to modify node "{call.name}"'
            raise refused(call.kind.resource, call.name, why)
        if (new.get("spec") or {}).get("taints") != (old.get("spec") or {}).get("taints"):
            raise refused(call.kind.resource, call.name, f'node "{node}" is not allowed to modify taints')
        before, after = old["metadata"].get("labels") or {}, new["metadata"].get("labels") or {}
        changed = sorted(one for one in before.keys() | after.keys() if before.get(one) != after.get(one))
        if bad := [one for one in changed if not _node_label(one)]:
            why = f"is not allowed to modify labels: {', '.join(bad)}"
            raise refused(call.kind.resource, call.name, why)


def _node_label(label: str) -> bool:
    """Whether a kubelet may set a label."""
    domain = label.partition("/")[0] if "/" in label else ""
    if label in NODE_LABELS:
        return True
    for own in ("kubelet.kubernetes.io", "node.kubernetes.io"):
        if domain == own or domain.endswith(f".{own}"):
            return True
    return not any(domain == one or domain.endswith(f".{one}") for one in ("kubernetes.io", "k8s.io"))


def _broken_down(rules: list[Obj]) -> list[Obj]:
    found = []
    for rule in rules:
        found += [{**rule, "resources": [resource]} for resource in rule.get("resources") or ()]
        found += [
            {"nonResourceURLs": [url], "verbs": rule.get("verbs")}
            for url in rule.get("nonResourceURLs") or ()
        ]
    return found


def _order(rule: Obj) -> tuple[bool, str]:
    return (bool(rule.get("nonResourceURLs")), str(rule))


def _shown(rule: Obj) -> str:
    parts = []
    for field, name in (
        ("nonResourceURLs", "NonResourceURLs"),
        ("apiGroups", "APIGroups"),
        ("resources", "Resources"),
        ("resourceNames", "ResourceNames"),
        ("verbs", "Verbs"),
    ):
        if values := rule.get(field):
            parts.append(f"{name}:[" + " ".join(f'"{one}"' for one in values) + "]")
    return "{" + ", ".join(parts) + "}"
