"""Who asks, and what they may: tokens, client certificates, impersonation, RBAC."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.support.apiserver.errors import Obj, Resource, StatusError
from tests.support.apiserver.store import Store
from tests.support.apiserver.wire import Request

RBAC = "rbac.authorization.k8s.io"
DISCOVERY = ["/api", "/api/*", "/apis", "/apis/*", "/openapi", "/openapi/*"]
PUBLIC = ["/healthz", "/livez", "/readyz", "/version"]
BOOTSTRAP: Mapping[str, tuple[list[Obj], tuple[str, ...]]] = {
    "cluster-admin": (
        [
            {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]},
            {"verbs": ["*"], "nonResourceURLs": ["*"]},
        ],
        ("system:masters",),
    ),
    "system:discovery": (
        [{"verbs": ["get"], "nonResourceURLs": [*DISCOVERY, *PUBLIC]}],
        ("system:authenticated",),
    ),
    "system:public-info-viewer": (
        [{"verbs": ["get"], "nonResourceURLs": PUBLIC}],
        ("system:authenticated", "system:unauthenticated"),
    ),
}
"""The roles of a new cluster, and the groups that have them."""


@dataclass(frozen=True)
class User:
    """Who asks."""

    name: str
    groups: tuple[str, ...] = ()


ANONYMOUS = User("system:anonymous", ("system:unauthenticated",))


class Users:
    """The tokens that are known, and the client certificates."""

    def __init__(self, tokens: Mapping[str, User]) -> None:
        self.tokens = dict(tokens)

    def authenticate(self, request: Request) -> User:
        """Who sends a request. Raises StatusError 401 and, of who impersonates without a right to, 403."""
        found = self._sender(request)
        if name := request.header("Impersonate-User"):
            if "system:masters" not in found.groups:
                raise StatusError(
                    403, "Forbidden", f'users "{name}" is forbidden: only administrators impersonate here'
                )
            found = User(name, tuple(request.all_headers("Impersonate-Group")))
        if found == ANONYMOUS:
            return found
        return User(found.name, tuple(dict.fromkeys((*found.groups, "system:authenticated"))))

    def _sender(self, request: Request) -> User:
        if isinstance(request.certified, User):
            return request.certified
        scheme, _, token = request.header("Authorization").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return ANONYMOUS
        found = self.tokens.get(token.strip())
        if found is None:
            raise StatusError(401, "Unauthorized", "Unauthorized")
        return found


class Attributes(NamedTuple):
    """What a client wants to do."""

    verb: str
    group: str = ""
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    path: str = ""

    @property
    def full(self) -> str:
        """The resource with its subresource."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource


class Authorizer:
    """Decides by the roles and bindings in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def check(self, user: User, wanted: Attributes) -> None:
        """Raises StatusError 403."""
        if "system:masters" in user.groups:
            return
        if not any(_covers(rule, wanted) for rule in self._rules(user, wanted.namespace)):
            raise refusal(user, wanted)

    def _rules(self, user: User, namespace: str) -> Iterator[Obj]:
        for plural, scope in (("clusterrolebindings", ""), ("rolebindings", namespace)):
            for (where, _), binding in self._store.of(Resource(RBAC, plural)).objects.items():
                subjects = binding.get("subjects") or ()
                if where == scope and any(_is_subject(one, user, scope) for one in subjects):
                    yield from self._role_rules(binding["roleRef"], scope)

    def _role_rules(self, reference: Mapping[str, Any], namespace: str) -> list[Obj]:
        """The rules of a role."""
        cluster = reference.get("kind") == "ClusterRole"
        resource = Resource(RBAC, "clusterroles" if cluster else "roles")
        role = self._store.get(resource, ("" if cluster else namespace, reference.get("name", "")))
        return list((role or {}).get("rules") or ())


def refusal(user: User, wanted: Attributes) -> StatusError:
    """403 as the authorization filter answers it."""
    headers = {"X-Content-Type-Options": "nosniff"}
    if wanted.path:
        message = f'forbidden: User "{user.name}" cannot {wanted.verb} path "{wanted.path}"'
        return StatusError(403, "Forbidden", message, {}, headers=headers)
    resource = Resource(wanted.group, wanted.resource)
    who = f'{resource.qualified} "{wanted.name}"' if wanted.name else resource.qualified
    where = f'in the namespace "{wanted.namespace}"' if wanted.namespace else "at the cluster scope"
    message = (
        f'{who} is forbidden: User "{user.name}" cannot {wanted.verb} resource "{wanted.full}" in API group'
        f' "{wanted.group}" {where}'
    )
    return StatusError(403, "Forbidden", message, resource.details(wanted.name), headers=headers)


def _is_subject(subject: Obj, user: User, namespace: str) -> bool:
    kind, name = subject.get("kind"), subject.get("name", "")
    if kind == "User":
        return bool(name == user.name)
    if kind == "Group":
        return name in user.groups
    where = subject.get("namespace") or namespace
    return bool(user.name == f"system:serviceaccount:{where}:{name}")


def _any(wanted: Iterable[str], value: str) -> bool:
    return any(one in {"*", value} for one in wanted)


def _covers(rule: Obj, wanted: Attributes) -> bool:
    if not _any(rule.get("verbs") or (), wanted.verb):
        return False
    if wanted.path:
        urls = rule.get("nonResourceURLs") or ()
        return any(
            one in {"*", wanted.path} or (one.endswith("*") and wanted.path.startswith(one[:-1]))
            for one in urls
        )
    if not _any(rule.get("apiGroups") or (), wanted.group):
        return False
    resources = rule.get("resources") or ()
    if not (_any(resources, wanted.full) or (wanted.subresource and f"*/{wanted.subresource}" in resources)):
        return False
    names = rule.get("resourceNames") or ()
    return not names or wanted.name in names


def bootstrap(store: Store, now: str) -> None:
    """Put the roles of a new cluster into its store."""
    for name, (rules, groups) in BOOTSTRAP.items():
        subjects = [{"kind": "Group", "apiGroup": RBAC, "name": group} for group in groups]
        reference = {"apiGroup": RBAC, "kind": "ClusterRole", "name": name}
        for kind, body in (
            ("ClusterRole", {"rules": rules}),
            ("ClusterRoleBinding", {"subjects": subjects, "roleRef": reference}),
        ):
            metadata = {"name": name, "uid": str(uuid.uuid4()), "creationTimestamp": now}
            obj: Obj = {"kind": kind, "apiVersion": f"{RBAC}/v1", "metadata": metadata, **body}
            store.put(Resource(RBAC, f"{kind.lower()}s"), ("", name), obj)
