"""What the server says it serves.

Gives: Discovery.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from tests.support.apiserver.errors import Obj
from tests.support.apiserver.kinds import Kind

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer

ADDRESS = "192.0.2.10:6443"
AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
VERSION: Obj = {
    "major": "1",
    "minor": "36",
    "emulationMajor": "1",
    "emulationMinor": "36",
    "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "35",
    "gitVersion": "v1.36.2",
    "gitCommit": "0000000000000000000000000000000000000000",
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "goVersion": "go1.26.0",
    "compiler": "gc",
    "platform": "linux/amd64",
}
HEALTH = (
    "autoregister-completion",
    "etcd",
    "log",
    "loopback-serving-certificate",
    "ping",
)
EXTRA = [
    "/.well-known/openid-configuration",
    "/flagz",
    "/metrics",
    "/openapi/v2",
    "/openapi/v3",
    "/openid/v1/jwks",
    "/statusz",
    "/version",
]


class Discovery:
    """Makes the documents of discovery."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    def versions(self) -> Obj:
        """/api."""
        where = [{"clientCIDR": "0.0.0.0/0", "serverAddress": ADDRESS}]
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": where}

    def groups(self) -> Obj:
        """/apis."""
        found = [self._group(name) for name in self._server.kinds.groups]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}

    def group(self, name: str) -> Obj:
        """/apis/<group>."""
        return {"kind": "APIGroup", "apiVersion": "v1", **self._group(name)}

    def _group(self, name: str) -> Obj:
        versions = [
            {"groupVersion": f"{name}/{one}", "version": one} for one in self._server.kinds.groups[name]
        ]
        return {"name": name, "versions": versions, "preferredVersion": versions[0]}

    def resources(self, group: str, version: str) -> Obj:
        """/api/v1, /apis/<group>/<version>."""
        found = []
        for kind in self._server.kinds.of(group, version):
            one: Obj = {
                "name": kind.plural,
                "singularName": kind.singular,
                "namespaced": kind.namespaced,
                "kind": kind.kind,
                "verbs": list(kind.verbs),
            }
            if kind.short:
                one["shortNames"] = list(kind.short)
            if kind.categories:
                one["categories"] = list(kind.categories)
            if "watch" in kind.verbs:
                one["storageVersionHash"] = kind.hash or _hash(kind)
            found.append(one)
            found += list(kind.subresources.values())
        head: Obj = {"kind": "APIResourceList"}
        if group:
            head["apiVersion"] = "v1"
        return {**head, "groupVersion": f"{group}/{version}" if group else version, "resources": found}

    def aggregated(self, *, core: bool) -> Obj:
        """/api and /apis in one document."""
        groups = {"": ["v1"]} if core else self._server.kinds.groups
        items = []
        for name, versions in groups.items():
            metadata = {"name": name} if name else {}
            found = [
                {"version": one, "resources": self._aggregated(name, one), "freshness": "Current"}
                for one in versions
            ]
            items.append({"metadata": metadata, "versions": found})
        return {
            "kind": "APIGroupDiscoveryList",
            "apiVersion": "apidiscovery.k8s.io/v2",
            "metadata": {},
            "items": items,
        }

    def _aggregated(self, group: str, version: str) -> list[Obj]:
        found = []
        for kind in self._server.kinds.of(group, version):
            own = (
                {"group": group, "version": version}
                if kind.custom is not None
                else {"group": "", "version": ""}
            )
            one: Obj = {
                "resource": kind.plural,
                "responseKind": {**own, "kind": kind.kind},
                "scope": "Namespaced" if kind.namespaced else "Cluster",
                "singularResource": kind.singular,
                "verbs": list(kind.verbs),
            }
            if kind.short:
                one["shortNames"] = list(kind.short)
            if kind.categories:
                one["categories"] = list(kind.categories)
            subs = []
            for name, sub in kind.subresources.items():
                of = {"group": sub["group"], "version": sub["version"]} if "group" in sub else own
                subs.append(
                    {"subresource": name, "responseKind": {**of, "kind": sub["kind"]}, "verbs": sub["verbs"]}
                )
            if subs:
                one["subresources"] = subs
            found.append(one)
        return found

    def paths(self) -> Obj:
        """/."""
        found = {"/api", "/api/v1", "/apis", "/apis/", *EXTRA}
        for name, versions in self._server.kinds.groups.items():
            found.add(f"/apis/{name}")
            found |= {f"/apis/{name}/{one}" for one in versions}
        for check in ("healthz", "livez", "readyz"):
            found.add(f"/{check}")
            found |= {f"/{check}/{one}" for one in HEALTH if not (check == "readyz" and one == "etcd")}
        return {"paths": sorted(found)}

    def openapi_index(self) -> Obj:
        """/openapi/v3."""
        paths = ["api", "api/v1", "apis", "version"]
        for name, versions in self._server.kinds.groups.items():
            paths.append(f"apis/{name}")
            paths += [f"apis/{name}/{one}" for one in versions]
        paths += [".well-known/openid-configuration", "openid/v1/jwks"]
        index = {one: {"serverRelativeURL": f"/openapi/v3/{one}?hash={etag(one)}"} for one in sorted(paths)}
        return {"paths": index}


def etag(value: object) -> str:
    """A hash of a document."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest().upper()


def _hash(kind: Kind) -> str:
    import base64

    digest = hashlib.sha256(f"{kind.group}/{kind.version}/{kind.kind}".encode()).digest()
    return base64.b64encode(digest[:8]).decode()
