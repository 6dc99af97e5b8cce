"""Who asks, and what they may: tokens, client certificates, impersonation, RBAC, the node authorizer.

Gives: User, Users, Attributes, Authorizer, ANONYMOUS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.support.apiserver.errors import Obj, Resource, StatusError, bad_request
from tests.support.apiserver.store import Store
from tests.support.apiserver.wire import Request

RBAC = "rbac.authorization.k8s.io"
DISCOVERY = [
    "/api",
    "/api/*",
    "/apis",
    "/apis/*",
    "/healthz",
    "/livez",
    "/openapi",
    "/openapi/*",
    "/readyz",
    "/version",
    "/version/",
]
PUBLIC = ["/healthz", "/livez", "/readyz", "/version", "/version/"]
BOOTSTRAP_ROLES: Mapping[str, list[Obj]] = {
    "cluster-admin": [
        {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]},
        {"verbs": ["*"], "nonResourceURLs": ["*"]},
    ],
    "system:basic-user": [
        {
            "verbs": ["create"],
            "apiGroups": ["authorization.k8s.io"],
            "resources": ["selfsubjectaccessreviews", "selfsubjectrulesreviews"],
        },
        {"verbs": ["create"], "apiGroups": ["authentication.k8s.io"], "resources": ["selfsubjectreviews"]},
    ],
    "system:discovery": [{"verbs": ["get"], "nonResourceURLs": DISCOVERY}],
    "system:public-info-viewer": [{"verbs": ["get"], "nonResourceURLs": PUBLIC}],
    "system:service-account-issuer-discovery": [
        {"verbs": ["get"], "nonResourceURLs": ["/.well-known", "/.well-known/*"]},
        {
            "verbs": ["get"],
            "nonResourceURLs": [
                "/.well-known/openid-configuration",
                "/.well-known/openid-configuration/",
                "/openid/v1/jwks",
                "/openid/v1/jwks/",
            ],
        },
    ],
}
BOOTSTRAP_BINDINGS = [
    ("cluster-admin", "system:masters"),
    ("system:basic-user", "system:authenticated"),
    ("system:discovery", "system:authenticated"),
    ("system:service-account-issuer-discovery", "system:serviceaccounts"),
    ("system:public-info-viewer", "system:authenticated"),
    ("system:public-info-viewer", "system:unauthenticated"),
]


@dataclass(frozen=True)
class User:
    """Who asks."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def info(self) -> Obj:
        """As reviews show it."""
        found: Obj = {"username": self.name}
        if self.uid:
            found["uid"] = self.uid
        if self.groups:
            found["groups"] = list(self.groups)
        if self.extra:
            found["extra"] = dict(self.extra)
        return found

    @property
    def node(self) -> str:
        """The node this is the kubelet of, or nothing."""
        is_node = "system:nodes" in self.groups and self.name.startswith("system:node:")
        return self.name.removeprefix("system:node:") if is_node else ""


ANONYMOUS = User("system:anonymous", ("system:unauthenticated",))


def unauthorized() -> StatusError:
    """401."""
    return StatusError(401, "Unauthorized", "Unauthorized")


def service_account_groups(name: str) -> tuple[str, ...]:
    """The groups of a service account; none of any other user."""
    parts = name.split(":")
    if len(parts) == 4 and parts[:2] == ["system", "serviceaccount"]:
        return ("system:serviceaccounts", f"system:serviceaccounts:{parts[2]}")
    return ()


class Users:
    """The tokens that are known, and the client certificates."""

    def __init__(self, tokens: Mapping[str, User]) -> None:
        self.tokens = dict(tokens)
        self.of_accounts: Callable[[str], User | None] = lambda _: None
        """Whose service account token this is."""
        self.proxy_names = {"front-proxy-client"}

    def authenticate(self, request: Request) -> User:
        """Who sends a request. Raises StatusError 401."""
        certificate = request.client_certificate
        if certificate is not None:
            if certificate["commonName"] in self.proxy_names and (proxied := _proxied(request)):
                return proxied
            if certificate["commonName"] not in self.proxy_names:
                groups = (*certificate["organizations"], "system:authenticated")
                extra = {"authentication.kubernetes.io/credential-id": [certificate["id"]]}
                return User(certificate["commonName"], groups, "", extra)
        scheme, _, token = request.header("Authorization").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return ANONYMOUS
        found = self.find(token.strip())
        if found is None:
            raise unauthorized()
        return found

    def find(self, token: str) -> User | None:
        """Whose token this is."""
        found = self.tokens.get(token) or self.of_accounts(token)
        if found is None:
            return None
        groups = tuple(dict.fromkeys((*found.groups, "system:authenticated")))
        return User(found.name, groups, found.uid, found.extra)


def _proxied(request: Request) -> User | None:
    name = request.header("X-Remote-User")
    if not name:
        return None
    groups = (*request.all_headers("X-Remote-Group"), "system:authenticated")
    prefix = "x-remote-extra-"
    extra: dict[str, list[str]] = {}
    for header, value in request.headers:
        if header.lower().startswith(prefix):
            extra.setdefault(header.lower().removeprefix(prefix), []).append(value)
    return User(name, groups, "", extra)


class Attributes(NamedTuple):
    """What somebody wants to do."""

    verb: str
    group: str = ""
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    path: str = ""
    selector: str = ""
    """The field selector of a list or a watch."""

    @property
    def full(self) -> str:
        """The resource with its subresource."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource


class Verdict(NamedTuple):
    """Whether it is allowed, and why."""

    allowed: bool
    reason: str = ""


class Authorizer:
    """Decides by the roles and bindings in the store, and for kubelets by the node authorizer."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def decide(self, user: User, wanted: Attributes) -> Verdict:
        """Whether a user may."""
        if "system:masters" in user.groups:
            return Verdict(True)
        for rule, why in self.rules(user, wanted.namespace):
            if _covers(rule, wanted):
                return Verdict(True, why)
        if user.node:
            return _node_decides(user.node, wanted)
        return Verdict(False)

    def check(self, user: User, wanted: Attributes) -> None:
        """Raises StatusError 403."""
        verdict = self.decide(user, wanted)
        if not verdict.allowed:
            raise refusal(user, wanted, verdict.reason)

    def rules(self, user: User, namespace: str) -> Iterator[tuple[Obj, str]]:
        """The rules for a user, with the reason they would be named as."""
        for kind, scope in (("ClusterRoleBinding", ""), ("RoleBinding", namespace)):
            if kind == "RoleBinding" and not namespace:
                continue
            plural = f"{kind.lower()}s"
            for (where, name), binding in self._store.of(Resource(RBAC, plural)).objects.items():
                if where != scope:
                    continue
                subject = next(
                    (one for one in binding.get("subjects") or () if _is_subject(one, user, scope)), None
                )
                if subject is None:
                    continue
                reference = binding["roleRef"]
                shown = f"{name}/{scope}" if scope else name
                why = (
                    f'RBAC: allowed by {kind} "{shown}" of {reference["kind"]} "{reference["name"]}"'
                    f' to {subject["kind"]} "{_subject_name(subject)}"'
                )
                for rule in self.role_rules(reference, scope):
                    yield rule, why

    def role_rules(self, reference: Mapping[str, Any], namespace: str) -> list[Obj]:
        """The rules of a role."""
        cluster = reference.get("kind") == "ClusterRole"
        resource = Resource(RBAC, "clusterroles" if cluster else "roles")
        role = self._store.get(resource, ("" if cluster else namespace, reference.get("name", "")))
        return list((role or {}).get("rules") or ())


def refusal(user: User, wanted: Attributes, why: str = "") -> StatusError:
    """403 as the authorization filter answers it."""
    tail = f": {why}" if why else ""
    headers = {"X-Content-Type-Options": "nosniff"}
    if wanted.path:
        message = f'forbidden: User "{user.name}" cannot {wanted.verb} path "{wanted.path}"{tail}'
        return StatusError(403, "Forbidden", message, {}, headers=headers)
    resource = Resource(wanted.group, wanted.resource)
    who = f'{resource.qualified} "{wanted.name}"' if wanted.name else resource.qualified
    where = f'in the namespace "{wanted.namespace}"' if wanted.namespace else "at the cluster scope"
    message = (
        f'{who} is forbidden: User "{user.name}" cannot {wanted.verb} resource "{wanted.full}" in API group'
        f' "{wanted.group}" {where}{tail}'
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


def _subject_name(subject: Obj) -> str:
    name: str = subject["name"]
    return f"{name}/{subject['namespace']}" if subject.get("namespace") else name


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


def covered(rules: Iterable[Obj], wanted: Obj) -> bool:
    """Whether rules one has grant everything of a rule one wants to give."""
    held = list(rules)
    for verb in wanted.get("verbs") or ():
        for group in wanted.get("apiGroups") or ():
            for resource in wanted.get("resources") or ():
                names = wanted.get("resourceNames") or [""]
                name, _, sub = resource.partition("/")
                asked = [Attributes(verb, group, name, sub, "", one) for one in names]
                if not all(any(_covers(rule, one) for rule in held) for one in asked):
                    return False
        for url in wanted.get("nonResourceURLs") or ():
            if not any(_covers(rule, Attributes(verb, path=url)) for rule in held):
                return False
    return True


_NODE_READS = {
    ("", "services"),
    ("", "endpoints"),
    ("discovery.k8s.io", "endpointslices"),
    ("node.k8s.io", "runtimeclasses"),
    ("storage.k8s.io", "csidrivers"),
}


def _node_decides(node: str, wanted: Attributes) -> Verdict:
    key = (wanted.group, wanted.resource)
    if key in _NODE_READS and wanted.verb in {"get", "list", "watch"}:
        return Verdict(True)
    if key == ("", "events"):
        return Verdict(wanted.verb in {"create", "update", "patch"})
    if key == ("", "nodes"):
        return _node_decides_nodes(node, wanted)
    if key == ("", "pods"):
        if wanted.verb in {"list", "watch"} and f"spec.nodeName={node}" not in wanted.selector.split(","):
            return Verdict(False, "can only list/watch pods with spec.nodeName field selector")
        return Verdict(wanted.verb in {"create", "delete", "get", "list", "watch", "update", "patch"})
    if key == ("coordination.k8s.io", "leases"):
        if wanted.namespace != "kube-node-lease":
            return Verdict(False)
        if wanted.verb not in {"get", "create", "update", "patch", "delete"}:
            return Verdict(False)
        return Verdict(True)
    if key in {("", "secrets"), ("", "configmaps")}:
        if not wanted.name:
            return Verdict(False, "No Object name found")
        return Verdict(False, f"no relationship found between node '{node}' and this object")
    reviews = {"tokenreviews", "subjectaccessreviews", "localsubjectaccessreviews"}
    return Verdict(wanted.resource in reviews and wanted.verb == "create")


def _node_decides_nodes(node: str, wanted: Attributes) -> Verdict:
    if wanted.verb == "create":
        return Verdict(True)
    if wanted.verb in {"get", "list", "watch"}:
        if wanted.name == node:
            return Verdict(True)
        return Verdict(
            False,
            f"node '{node}' cannot read all nodes, only its own Node object"
            if not wanted.name
            else f"node '{node}' cannot read '{wanted.name}', only its own Node object",
        )
    return Verdict(wanted.verb in {"update", "patch"})


def impersonate(request: Request, user: User, authorizer: Authorizer, wanted: Attributes) -> User:
    """Who the request shall be of. Raises StatusError 400 and 403."""
    name = request.header("Impersonate-User")
    groups = tuple(request.all_headers("Impersonate-Group"))
    uid = request.header("Impersonate-Uid")
    prefix = "impersonate-extra-"
    extra: dict[str, list[str]] = {}
    for header, value in request.headers:
        if header.lower().startswith(prefix):
            extra.setdefault(header.lower().removeprefix(prefix), []).append(value)
    if not (name or groups or uid or extra):
        return user
    if not name:
        shown = "[]string{" + ", ".join(f'"{one}"' for one in groups) + "}" if groups else "[]string(nil)"
        error = bad_request(
            f'requested &user.DefaultInfo{{Name:"", UID:"{uid}", Groups:{shown},'
            " Extra:map[string][]string(nil)} without impersonating a user name"
        )
        error.headers["X-Content-Type-Options"] = "nosniff"
        raise error
    account = service_account_groups(name)
    _may_impersonate(user, authorizer, wanted, name, groups)
    all_groups = groups or account
    if name == ANONYMOUS.name:
        return User(name, all_groups or ANONYMOUS.groups, uid, extra)
    return User(name, (*all_groups, "system:authenticated"), uid, extra)


def _may_impersonate(
    user: User, authorizer: Authorizer, wanted: Attributes, name: str, groups: tuple[str, ...]
) -> None:
    account = service_account_groups(name)
    if account:
        parts = name.split(":")
        asked = [Attributes("impersonate", "", "serviceaccounts", "", parts[2], parts[3])]
    else:
        asked = [Attributes("impersonate", "", "users", name=name)]
    asked += [Attributes("impersonate", "", "groups", name=one) for one in groups]
    if all(authorizer.decide(user, one).allowed for one in asked):
        return
    mode = "serviceaccount" if account else "user-info"
    raise refusal(user, wanted._replace(verb=f"impersonate-on:{mode}:{wanted.verb}"))


def bootstrap(store: Store, now: str, uid: Any) -> None:
    """Put the roles of a new cluster into its store."""
    for name, rules in BOOTSTRAP_ROLES.items():
        _put(store, "clusterroles", name, {"rules": rules}, now, uid())
    by_role: dict[str, list[str]] = {}
    for role, group in BOOTSTRAP_BINDINGS:
        by_role.setdefault(role, []).append(group)
    for role, groups in by_role.items():
        subjects = [{"kind": "Group", "apiGroup": RBAC, "name": group} for group in groups]
        reference = {"apiGroup": RBAC, "kind": "ClusterRole", "name": role}
        _put(store, "clusterrolebindings", role, {"subjects": subjects, "roleRef": reference}, now, uid())


def _put(store: Store, plural: str, name: str, body: Obj, now: str, uid: str) -> None:
    kind = {"clusterroles": "ClusterRole", "clusterrolebindings": "ClusterRoleBinding"}[plural]
    metadata = {"name": name, "uid": uid, "creationTimestamp": now}
    obj = {"kind": kind, "apiVersion": f"{RBAC}/v1", "metadata": metadata, **body}
    store.put(Resource(RBAC, plural), ("", name), obj)
