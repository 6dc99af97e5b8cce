"""Tokens of service accounts: asked for, and known again while account and time allow it.

Gives: AccountTokens.
Source: Kubernetes API, TokenRequest authentication.k8s.io/v1; KEP-1205 (bound tokens). Signed by HMAC: nobody
but this server has to check them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from tests.support.apiserver import errors
from tests.support.apiserver.auth import User, service_account_groups
from tests.support.apiserver.call import Call, now
from tests.support.apiserver.errors import Obj

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer

AUDIENCE: Final = "https://kubernetes.default.svc.cluster.local"
SHORTEST, LONGEST = 600, 1 << 32
"""Seconds a token may be asked for."""


class AccountTokens:
    """Gives tokens to service accounts, and tells whose a token is."""

    def __init__(self, server: ApiServer) -> None:
        self.kept = 10.0
        """Seconds for which what was found of a token counts, whatever becomes of its account."""
        self._server = server
        self._key = secrets.token_bytes(32)
        self._known: dict[str, tuple[float, User]] = {}

    def request(self, call: Call, body: Any) -> Obj:
        """The answer to a TokenRequest. Raises StatusError."""
        spec = dict((body.get("spec") if isinstance(body, dict) else None) or {})
        seconds = spec.get("expirationSeconds") or 3600
        if not isinstance(seconds, int):
            raise errors.bad_request("TokenRequest: spec.expirationSeconds is no number")
        for wrong, why in (
            (seconds < SHORTEST, "may not specify a duration less than 10 minutes"),
            (seconds > LONGEST, "may not specify a duration larger than 2^32 seconds"),
        ):
            if wrong:
                fault = errors.invalid("spec.expirationSeconds", seconds, why)
                raise errors.unprocessable("authentication.k8s.io", "TokenRequest", "", [fault])
        account = self._stored("serviceaccounts", call.namespace, call.name)
        if account is None:
            raise errors.not_found(errors.Resource("", "serviceaccounts"), call.name)
        of: Obj = {"namespace": call.namespace, "serviceaccount": _named(account)}
        if bound := spec.get("boundObjectRef"):
            if bound.get("kind") != "Pod":
                why = f"the fake API server binds tokens to no {bound.get('kind')}"
                raise errors.StatusError(501, "NotImplemented", why)
            pod = self._stored("pods", call.namespace, bound.get("name", ""))
            if pod is None:
                raise errors.not_found(errors.Resource("", "pods"), bound.get("name", ""))
            of["pod"] = _named(pod)
        spec = {
            "audiences": spec.get("audiences") or [AUDIENCE],
            "expirationSeconds": seconds,
            "boundObjectRef": bound or None,
        }
        issued = int(time.time())
        claims = {
            "aud": spec["audiences"],
            "exp": issued + seconds,
            "iat": issued,
            "iss": AUDIENCE,
            "jti": str(uuid.uuid4()),
            "kubernetes.io": of,
            "nbf": issued,
            "sub": f"system:serviceaccount:{call.namespace}:{call.name}",
        }
        ends = datetime.fromtimestamp(claims["exp"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": call.name, "namespace": call.namespace, "creationTimestamp": now()},
            "spec": spec,
            "status": {"token": self._signed(claims), "expirationTimestamp": ends},
        }

    def user(self, token: str) -> User | None:
        """Whose token this is; None of one that is not ours, is over, or whose account or pod is gone."""
        until, user = self._known.get(token, (0.0, None))
        if user is not None and time.monotonic() < until:
            return user
        user = self._checked(token)
        if user is None:
            self._known.pop(token, None)
        else:
            self._known[token] = (time.monotonic() + self.kept, user)
        return user

    def _checked(self, token: str) -> User | None:
        head, _, signature = token.rpartition(".")
        if not head or not hmac.compare_digest(self._signature(head).encode(), signature.encode()):
            return None
        claims = json.loads(_decoded(head.partition(".")[2]))
        if claims["exp"] <= time.time() or AUDIENCE not in claims["aud"]:
            return None
        of = claims["kubernetes.io"]
        for kind, one in (("serviceaccounts", of["serviceaccount"]), ("pods", of.get("pod"))):
            if one is None:
                continue
            found = self._stored(kind, of["namespace"], one["name"])
            if found is None or found["metadata"]["uid"] != one["uid"]:
                return None
        extra = {"authentication.kubernetes.io/credential-id": [f"JTI={claims['jti']}"]}
        if pod := of.get("pod"):
            extra["authentication.kubernetes.io/pod-name"] = [pod["name"]]
            extra["authentication.kubernetes.io/pod-uid"] = [pod["uid"]]
        name = claims["sub"]
        return User(name, service_account_groups(name), of["serviceaccount"]["uid"], extra)

    def _stored(self, plural: str, namespace: str, name: str) -> Obj | None:
        kind = self._server.kinds.get("", "v1", plural)
        assert kind is not None, plural
        return self._server.store.get(kind.storage, (namespace, name))

    def _signed(self, claims: Obj) -> str:
        head = ".".join(
            _encoded(json.dumps(one).encode()) for one in ({"alg": "HS256", "typ": "JWT"}, claims)
        )
        return f"{head}.{self._signature(head)}"

    def _signature(self, head: str) -> str:
        return _encoded(hmac.digest(self._key, head.encode(), hashlib.sha256))


def _named(obj: Obj) -> Obj:
    return {"name": obj["metadata"]["name"], "uid": obj["metadata"]["uid"]}


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
