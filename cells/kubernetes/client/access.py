"""How to reach an API server and as whom, and what is mounted into every pod.

Needs: nothing.   Gives: Access, Exec, in_cluster.
Source: client-go/rest (InClusterConfig).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cells.kubernetes.urls import AccessError

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

    @property
    def program(self) -> str:
        """The file to run, or a name to look for in ``PATH``."""
        relative = os.sep in self.command and not os.path.isabs(self.command)  # noqa: PTH117
        return os.path.join(self.folder, self.command) if relative else self.command  # noqa: PTH118


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
