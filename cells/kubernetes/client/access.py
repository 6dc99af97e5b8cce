"""How to reach an API server and as whom: settings, kubeconfig, or what is mounted into every pod.

Needs: nothing.   Gives: Access, Exec, in_cluster, from_kubeconfig, AccessError.
Source: k8s.io/client-go/tools/clientcmd/api/v1, client-go/rest (InClusterConfig).
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cells.kubernetes.urls import AccessError, checked_proxy, checked_url

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Exec(msgspec.Struct, frozen=True):
    """A program that gives credentials (client.authentication.k8s.io)."""

    command: str
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    api_version: str = "client.authentication.k8s.io/v1"
    provide_cluster_info: bool = False
    folder: str = ""
    """Where a relative command begins."""


class Access(msgspec.Struct, frozen=True):
    """Servers, and credentials for them. Bytes are PEM; a file is read again when it changes."""

    servers: tuple[str, ...]
    """URLs, the preferred one first."""
    ca_file: Path | None = None
    ca_data: bytes | None = None
    insecure: bool = False
    tls_server_name: str = ""
    token: str = ""
    token_file: Path | None = None
    username: str = ""
    password: str = ""
    certificate_file: Path | None = None
    certificate_data: bytes | None = None
    key_file: Path | None = None
    key_data: bytes | None = None
    exec: Exec | None = None
    proxy_url: str = ""
    impersonate_user: str = ""
    impersonate_uid: str = ""
    impersonate_groups: tuple[str, ...] = ()
    impersonate_extra: tuple[tuple[str, str], ...] = ()
    namespace: str = "default"


def in_cluster(env: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Access | None:
    """What a pod is given; None outside of one. Raises AccessError when it is half there."""
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        return None
    token = folder / "token"
    if not token.exists():
        raise AccessError(
            f"{token}: missing, though KUBERNETES_SERVICE_HOST is set; expected the pod's service account"
            " token (automountServiceAccountToken), or set k8s-kubeconfig-path"
        )
    ca = folder / "ca.crt"
    namespace = folder / "namespace"
    return Access(
        servers=(f"https://{_bracketed(host)}:{port}",),
        ca_file=ca if ca.exists() else None,
        token_file=token,
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def from_kubeconfig(path: Path, context: str = "") -> Access:
    """Of a kubeconfig's current context, or another one. Raises AccessError."""
    import yaml

    try:
        document = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    except OSError as error:
        raise AccessError(f"{path}: {error.strerror}; expected a kubeconfig") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "no YAML"
        raise AccessError(f"{path}{where}: {problem}; expected a kubeconfig") from error
    if not isinstance(document, dict):
        raise AccessError(f"{path}: expected a kubeconfig, a mapping with clusters, users and contexts")
    reader = _Reader(path, document)
    chosen = context or str(document.get("current-context") or "")
    if not chosen:
        raise AccessError(f"{path}: current-context is not set")
    found = reader.named("contexts", chosen, "context")
    return reader.access(found)


class _Reader:
    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self._path = path
        self._document = document

    def named(self, group: str, name: str, part: str) -> dict[str, Any]:
        entries = self._document.get(group) or []
        for one in entries if isinstance(entries, list) else []:
            if isinstance(one, dict) and one.get("name") == name and isinstance(one.get(part), dict):
                found: dict[str, Any] = one[part]
                return found
        known = ", ".join(str(one.get("name")) for one in entries if isinstance(one, dict)) or "none"
        raise AccessError(f"{self._path}: {group} has no {name!r}; it has: {known}")

    def access(self, context: dict[str, Any]) -> Access:
        cluster_name, user_name = str(context.get("cluster", "")), str(context.get("user", ""))
        cluster = self.named("clusters", cluster_name, "cluster")
        user = self.named("users", user_name, "user") if user_name else {}
        where = f"{self._path}: cluster {cluster_name}"
        server = str(cluster.get("server") or "")
        if not server:
            raise AccessError(f"{where}: server is not set")
        extra = user.get("as-user-extra") or {}
        return Access(
            servers=(checked_url(server, f"{where}: server"),),
            ca_file=self._file(cluster, "certificate-authority"),
            ca_data=self._data(cluster, "certificate-authority-data", where),
            insecure=bool(cluster.get("insecure-skip-tls-verify")),
            tls_server_name=str(cluster.get("tls-server-name") or ""),
            proxy_url=checked_proxy(str(cluster.get("proxy-url") or ""), f"{where}: proxy-url"),
            token=str(user.get("token") or ""),
            token_file=self._file(user, "tokenFile"),
            username=str(user.get("username") or ""),
            password=str(user.get("password") or ""),
            certificate_file=self._file(user, "client-certificate"),
            certificate_data=self._data(user, "client-certificate-data", f"{self._path}: user {user_name}"),
            key_file=self._file(user, "client-key"),
            key_data=self._data(user, "client-key-data", f"{self._path}: user {user_name}"),
            exec=self._exec(user.get("exec"), user_name),
            impersonate_user=str(user.get("as") or ""),
            impersonate_uid=str(user.get("as-uid") or ""),
            impersonate_groups=tuple(str(one) for one in user.get("as-groups") or ()),
            impersonate_extra=tuple(
                (str(key), str(one)) for key, many in extra.items() for one in many or ()
            ),
            namespace=str(context.get("namespace") or "default"),
        )

    def _file(self, part: dict[str, Any], key: str) -> Path | None:
        name = part.get(key)
        return self._path.parent / os.path.expanduser(str(name)) if name else None  # noqa: PTH111

    def _data(self, part: dict[str, Any], key: str, where: str) -> bytes | None:
        text = part.get(key)
        if not text:
            return None
        try:
            return base64.b64decode(str(text), validate=True)
        except binascii.Error as error:
            raise AccessError(f"{where}: {key}: {error}; expected base64") from error

    def _exec(self, given: Any, user: str) -> Exec | None:
        if not given:
            return None
        if not isinstance(given, dict) or not given.get("command"):
            raise AccessError(f"{self._path}: user {user}: exec.command is not set")
        return Exec(
            command=str(given["command"]),
            args=tuple(str(one) for one in given.get("args") or ()),
            env=tuple((str(one["name"]), str(one["value"])) for one in given.get("env") or ()),
            api_version=str(given.get("apiVersion") or "client.authentication.k8s.io/v1"),
            provide_cluster_info=bool(given.get("provideClusterInfo")),
            folder=str(self._path.parent),
        )
