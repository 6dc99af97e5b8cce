"""Reviews, which are asked and not stored, and the subresources of pods that act.

Gives: REVIEWS, review, pod_subresource.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.apiserver import errors
from tests.support.apiserver.account_tokens import AUDIENCE
from tests.support.apiserver.auth import Attributes, User
from tests.support.apiserver.call import Call, now
from tests.support.apiserver.decode import decode
from tests.support.apiserver.errors import Obj, invalid
from tests.support.apiserver.managed import Manager, after_update, with_managers
from tests.support.apiserver.wire import Response

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer

AUTHZ, AUTHN = "authorization.k8s.io", "authentication.k8s.io"
REVIEWS = {
    (AUTHZ, "selfsubjectaccessreviews"),
    (AUTHZ, "subjectaccessreviews"),
    (AUTHZ, "localsubjectaccessreviews"),
    (AUTHZ, "selfsubjectrulesreviews"),
    (AUTHN, "selfsubjectreviews"),
    (AUTHN, "tokenreviews"),
}


def review(server: ApiServer, user: User, call: Call, body: Obj) -> Obj:
    """The answer to a review. Raises StatusError."""
    kind = call.kind
    obj = decode(body, kind.type, kind.kind, kind.version).obj
    obj = {**obj, "kind": kind.kind, "apiVersion": kind.api_version, "metadata": obj.get("metadata") or {}}
    head = {"kind": kind.kind, "apiVersion": kind.api_version}
    if kind.plural == "selfsubjectreviews":
        return {**head, "metadata": {"creationTimestamp": now()}, "status": {"userInfo": user.info}}
    spec = obj.get("spec") or {}
    if kind.plural == "selfsubjectrulesreviews":
        return {**head, "metadata": {}, "spec": {}, "status": _rules(server, user, spec)}
    obj["spec"] = spec
    who = Manager(call.manager, "Update", kind.api_version, "")
    managed = after_update({"metadata": {}, "spec": {}}, obj, kind.type, {}, who, now(), (("f:status",),))
    obj = with_managers(obj, managed)
    if kind.plural == "tokenreviews":
        status = _token_status(server, spec)
    else:
        asked = (
            user
            if kind.plural == "selfsubjectaccessreviews"
            else User(spec.get("user", ""), tuple(spec.get("groups") or ()))
        )
        status = _access(server, asked, spec)
    return {**head, "metadata": obj["metadata"], "spec": spec, "status": status}


def _access(server: ApiServer, user: User, spec: Obj) -> Obj:
    resource, plain = spec.get("resourceAttributes"), spec.get("nonResourceAttributes")
    if resource is not None and plain is not None:
        shown = {"Path": plain.get("path", ""), "Verb": plain.get("verb", "")}
        wrong = invalid(
            "spec.nonResourceAttributes", shown, "cannot be specified in combination with resourceAttributes"
        )
        raise _review_error(wrong)
    if resource is None and plain is None:
        why = "exactly one of nonResourceAttributes or resourceAttributes must be specified"
        raise _review_error(invalid("spec.resourceAttributes", None, why))
    if resource is None:
        plain = plain or {}
        wanted = Attributes(plain.get("verb", ""), path=plain.get("path", ""))
    else:
        wanted = Attributes(
            resource.get("verb", ""),
            resource.get("group", ""),
            resource.get("resource", ""),
            resource.get("subresource", ""),
            resource.get("namespace", ""),
            resource.get("name", ""),
        )
    verdict = server.authorizer.decide(user, wanted)
    status: Obj = {"allowed": verdict.allowed}
    if verdict.reason:
        status["reason"] = verdict.reason
    return status


def _review_error(wrong: errors.FieldError) -> errors.StatusError:
    error = errors.unprocessable(AUTHZ, "", "", [wrong])
    error.body["details"].pop("kind")
    return error


def _rules(server: ApiServer, user: User, spec: Obj) -> Obj:
    namespace = spec.get("namespace")
    if not namespace:
        raise errors.bad_request("no namespace on request")
    resources: list[Obj] = []
    paths: list[Obj] = []
    for rule, _ in server.authorizer.rules(user, namespace):
        (paths if rule.get("nonResourceURLs") else resources).append(rule)
    return {"resourceRules": resources, "nonResourceRules": paths, "incomplete": False}


def _token_status(server: ApiServer, spec: Obj) -> Obj:
    user = server.users.find(spec.get("token", ""))
    if user is None:
        return {"user": {}, "error": "invalid bearer token"}
    return {"authenticated": True, "user": user.info, "audiences": [AUDIENCE]}


def pod_subresource(server: ApiServer, call: Call, body: Any, name: str) -> Response:
    """Bind a pod to a node, or evict it. Raises StatusError."""
    kind = call.kind
    pod = server.store.get(kind.storage, (call.namespace, call.name))
    if pod is None:
        raise errors.not_found(kind.resource, call.name)
    success: Obj = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
    if name == "eviction":
        options = body.get("deleteOptions") or {}
        server.writes.delete(Call(kind, call.namespace, call.name), dict(options))
        return Response(201, success)
    target = (body.get("target") or {}).get("name", "")
    if not target:
        wrong = errors.required("target.name")
        raise errors.unprocessable("", "Binding", call.name, [wrong])
    bound = pod.get("spec", {}).get("nodeName")
    if bound:
        why = f'pod {call.name} is already assigned to node "{bound}"'
        raise errors.conflict(errors.Resource("", "pods/binding"), call.name, why)
    if pod["metadata"].get("deletionTimestamp"):
        raise errors.conflict(
            errors.Resource("", "pods/binding"),
            call.name,
            f"pod {call.name} is being deleted, cannot be assigned to a host",
        )
    conditions = [
        one for one in pod.get("status", {}).get("conditions") or () if one["type"] != "PodScheduled"
    ]
    conditions.insert(
        0, {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": now()}
    )
    changed = {
        **pod,
        "spec": {**pod["spec"], "nodeName": target},
        "status": {**pod.get("status", {}), "conditions": conditions},
    }
    if "generation" in pod["metadata"]:
        changed["metadata"] = {**pod["metadata"]}
    server.store.put(kind.storage, (call.namespace, call.name), changed)
    return Response(201, success)
