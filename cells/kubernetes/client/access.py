"""How to reach an API server and with which credentials: kubeconfig or service account.

Source: client-go/rest (InClusterConfig).
"""

from __future__ import annotations

import base64
import binascii
import os
import shutil
import ssl
from collections.abc import Iterable, Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import field

from cells.base.addresses import IPAddress
from cells.kubernetes.objects.kind import convert
from cells.kubernetes.settings import AccessError, checked_proxy, checked_url

__all__ = ["Access", "Exec", "from_kubeconfig", "in_cluster"]


SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Exec(msgspec.Struct, frozen=True):
    """A credential plugin (client.authentication.k8s.io)."""

    command: str
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    api_version: str = "client.authentication.k8s.io/v1"
    provide_cluster_info: bool = False
    cluster_config: Any = None
    """The cluster's extension for plugins in the kubeconfig; passed with ``provide_cluster_info``."""
    folder: str = ""
    """Folder that a relative command is resolved in."""

    @property
    def program(self) -> str:
        """The file to run, or a name to look up in ``PATH``."""
        relative = os.sep in self.command and not os.path.isabs(self.command)  # noqa: PTH117
        return os.path.join(self.folder, self.command) if relative else self.command  # noqa: PTH118


class EnvironmentProxies(msgspec.Struct, frozen=True):
    """Proxies of the environment variables, as URLs, and the servers that are reached directly.

    Source: golang.org/x/net/http/httpproxy; client-go uses it unless the kubeconfig has a proxy-url.
    """

    http: str = ""
    https: str = ""
    without: tuple[str, ...] = ()
    """``NO_PROXY`` in lower case: addresses, networks, domains, with an optional port; ``*``: all servers."""

    @classmethod
    def of(cls, env: Mapping[str, str]) -> EnvironmentProxies:
        """Read ``HTTP_PROXY``, ``HTTPS_PROXY`` and ``NO_PROXY``, or their lower-case names.

        Raises AccessError.
        """

        def value(name: str) -> str:
            return (env.get(name) or env.get(name.lower(), "")).strip()

        def url(name: str) -> str:
            text = value(name)
            return checked_proxy(text if not text or "://" in text else f"http://{text}", name)

        names = (one.strip().lower() for one in value("NO_PROXY").split(","))
        return cls(url("HTTP_PROXY"), url("HTTPS_PROXY"), tuple(filter(None, names)))

    def url_for(self, server: str) -> str:
        """Return the proxy for a server's URL; empty for a direct connection, such as to localhost."""
        parts = urlsplit(server)
        url = self.https if parts.scheme == "https" else self.http
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        ip = _ip(host)
        if not url or host == "localhost" or (ip is not None and ip.is_loopback):
            return ""
        return "" if any(_no_proxy_matches(one, host, ip, port) for one in self.without) else url


def _ip(text: str) -> IPAddress | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _no_proxy_matches(entry: str, host: str, ip: IPAddress | None, port: int) -> bool:
    """Whether an entry of ``NO_PROXY`` matches the server; a malformed network matches none."""
    if entry == "*":
        return True
    if "/" in entry:
        try:
            return ip is not None and ip in ip_network(entry, strict=False)
        except ValueError:
            return False
    name, _, number = entry.rpartition(":")
    if not number.isdecimal() or (":" in name and not name.startswith("[")):  # no port, or an IPv6 address
        name, number = entry, ""
    if number and int(number) != port:
        return False
    name = name[1:] if name.startswith("*.") else name.strip("[]")
    if (address := _ip(name)) is not None:
        return address == ip
    return host.endswith(name if name.startswith(".") else f".{name}") or host == name


class Access(msgspec.Struct, frozen=True):
    """Servers and their credentials. Bytes are PEM; a file is read again when it changes."""

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
    """The kubeconfig's proxy for all servers; it overrides the environment's."""
    proxies: EnvironmentProxies = EnvironmentProxies()
    impersonate_user: str = ""
    impersonate_uid: str = ""
    impersonate_groups: tuple[str, ...] = ()
    impersonate_extra: tuple[tuple[str, str], ...] = ()

    def proxy_for(self, server: str) -> str:
        """Return the URL of the proxy for a server; empty for a direct connection."""
        return self.proxy_url or self.proxies.url_for(server)


def in_cluster(env: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Access | None:
    """Return the access of a pod's service account; None outside of a pod.

    Raises AccessError if a part is missing.
    """
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "")
    if not host:
        return None
    if not port:
        raise AccessError(
            f"KUBERNETES_SERVICE_HOST={host}: KUBERNETES_SERVICE_PORT is not set; expected both"
        )
    token = folder / "token"
    if not token.exists():
        raise AccessError(
            f"{token}: missing, though KUBERNETES_SERVICE_HOST is set; expected the pod's service account"
            " token (automountServiceAccountToken), or set k8s-kubeconfig-path"
        )
    ca = folder / "ca.crt"
    return Access(
        servers=(f"https://{_bracketed(host)}:{port}",),
        ca_file=ca if ca.exists() else None,
        token_file=token,
        proxies=EnvironmentProxies.of(env),
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


# Reads a kubeconfig.
#
# Source: k8s.io/client-go/tools/clientcmd/api/v1; validation: clientcmd/validation.go, rest/exec.go.

EXEC_EXTENSION: Final = "client.authentication.k8s.io/exec"
"""Name of the cluster's extension that credential plugins receive."""
CREDENTIAL_VERSIONS: Final = tuple(f"client.authentication.k8s.io/{one}" for one in ("v1", "v1beta1"))


class _KubeconfigPart(msgspec.Struct, frozen=True, rename="kebab"):
    """A part of a kubeconfig, with names in kebab case."""


class _NamedExtension(_KubeconfigPart, frozen=True):
    name: str
    extension: Any = None


class _Cluster(_KubeconfigPart, frozen=True):
    server: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    proxy_url: str = ""
    extensions: tuple[_NamedExtension, ...] = ()


class _Variable(_KubeconfigPart, frozen=True):
    name: str
    value: str = ""


class _Exec(_KubeconfigPart, frozen=True, rename="camel"):
    command: str = ""
    args: tuple[str, ...] = ()
    env: tuple[_Variable, ...] = ()
    api_version: str = CREDENTIAL_VERSIONS[0]
    install_hint: str = ""
    provide_cluster_info: bool = False
    interactive_mode: Literal["", "Never", "IfAvailable", "Always"] = ""


class _Provider(_KubeconfigPart, frozen=True):
    name: str = ""


class _User(_KubeconfigPart, frozen=True):
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    token: str = ""
    token_file: str = field(name="tokenFile", default="")
    username: str = ""
    password: str = ""
    as_user: str = field(name="as", default="")
    as_uid: str = ""
    as_groups: tuple[str, ...] = ()
    as_user_extra: dict[str, tuple[str, ...]] = {}
    exec: _Exec | None = None
    auth_provider: _Provider | None = None


class _Context(_KubeconfigPart, frozen=True):
    cluster: str = ""
    user: str = ""


class _NamedCluster(_KubeconfigPart, frozen=True):
    name: str
    cluster: _Cluster = _Cluster()


class _NamedUser(_KubeconfigPart, frozen=True):
    name: str
    user: _User = _User()


class _NamedContext(_KubeconfigPart, frozen=True):
    name: str
    context: _Context = _Context()


class _Config(_KubeconfigPart, frozen=True):
    current_context: str = ""
    clusters: tuple[_NamedCluster, ...] = ()
    users: tuple[_NamedUser, ...] = ()
    contexts: tuple[_NamedContext, ...] = ()


def from_kubeconfig(path: Path, context: str = "") -> Access:
    """Return the access of a kubeconfig's context, by default its current one. Raises AccessError.

    The files it names are checked at once, so an invalid one is reported before the first request.
    """
    config = _read(path)
    chosen = context or config.current_context
    if not chosen:
        raise AccessError(f"{path}: current-context is not set")
    where = f"{path}: context {chosen}"
    contexts = {one.name: one.context for one in config.contexts}
    found = contexts.get(chosen)
    if found is None:
        raise AccessError(f"{path}: contexts has no {chosen!r}; it has: {_names(contexts)}")
    if not found.cluster:
        raise AccessError(f"{where}: cluster is not set")
    clusters = {one.name: one.cluster for one in config.clusters}
    if found.cluster not in clusters:
        raise AccessError(f"{where}: clusters has no {found.cluster!r}; it has: {_names(clusters)}")
    users = {one.name: one.user for one in config.users}
    if found.user and found.user not in users:
        raise AccessError(f"{where}: users has no {found.user!r}; it has: {_names(users)}")
    cluster = clusters[found.cluster]
    user = users[found.user] if found.user else _User()
    access = _of_cluster(cluster, user, path, f"{path}: cluster {found.cluster}")
    access = _of_user(access, user, path, f"{path}: user {found.user}")
    if access.exec is not None:
        extensions = {one.name: one.extension for one in cluster.extensions}
        given = msgspec.structs.replace(access.exec, cluster_config=extensions.get(EXEC_EXTENSION))
        access = msgspec.structs.replace(access, exec=given)
    return access


def _read(path: Path) -> _Config:
    import yaml

    try:
        document = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    except OSError as error:
        raise AccessError(f"{path}: {error.strerror}; expected a kubeconfig") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise AccessError(f"{path}{where}: {problem}; expected a kubeconfig") from error
    if not isinstance(document, dict):
        raise AccessError(f"{path}: expected a kubeconfig, a mapping with clusters, users and contexts")
    try:
        return convert(document, _Config)
    except RecursionError as error:
        raise AccessError(f"{path}: a value contains itself, by an alias") from error
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at ")
        place = at.strip("`").removeprefix("$").lstrip(".")
        raise AccessError(f"{path}: {f'{place}: ' if place else ''}{what[:1].lower()}{what[1:]}") from error


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _of_cluster(cluster: _Cluster, user: _User, path: Path, where: str) -> Access:
    if not cluster.server:
        raise AccessError(f"{where}: server is not set")
    file = _file(path, cluster.certificate_authority)
    data = _data(cluster.certificate_authority_data, f"{where}: certificate-authority-data")
    if cluster.insecure_skip_tls_verify and (file or data):
        raise AccessError(
            f"{where}: insecure-skip-tls-verify and a certificate-authority; expected one of them"
        )
    _check_authority(file, data, where)
    certified = file or data or user.client_certificate or user.client_certificate_data
    scheme = "https" if certified or cluster.insecure_skip_tls_verify else "http"
    return Access(
        servers=(checked_url(cluster.server, f"{where}: server", scheme),),
        ca_file=None if data else file,
        ca_data=data,
        insecure=cluster.insecure_skip_tls_verify,
        tls_server_name=cluster.tls_server_name,
        proxy_url=checked_proxy(cluster.proxy_url, f"{where}: proxy-url"),
        proxies=EnvironmentProxies.of(os.environ),
    )


def _of_user(access: Access, user: _User, path: Path, where: str) -> Access:
    if user.auth_provider is not None:
        raise AccessError(
            f"{where}: auth-provider {user.auth_provider.name}: not known; expected exec, a token or a"
            " certificate"
        )
    if (user.as_uid or user.as_groups or user.as_user_extra) and not user.as_user:
        raise AccessError(f"{where}: as-uid, as-groups and as-user-extra need as, which is not set")
    for name, text in (("token", user.token), ("as", user.as_user), ("as-uid", user.as_uid)):
        if any(letter in text for letter in "\r\n\0"):
            raise AccessError(f"{where}: {name}: has a line break; expected one line")
    certificate = _file(path, user.client_certificate)
    certificate_data = _data(user.client_certificate_data, f"{where}: client-certificate-data")
    key, key_data = _file(path, user.client_key), _data(user.client_key_data, f"{where}: client-key-data")
    if (key or key_data) and not (certificate or certificate_data):
        raise AccessError(f"{where}: client-key without a client-certificate")
    _check_certificate(certificate_data or certificate, key_data or key, where)
    token_file = _file(path, user.token_file)
    if token_file is not None:
        _readable(token_file, f"{where}: tokenFile", "a token")
    return msgspec.structs.replace(
        access,
        token=user.token,
        token_file=token_file,
        username=user.username,
        password=user.password,
        certificate_file=None if certificate_data else certificate,
        certificate_data=certificate_data,
        key_file=None if key_data else key,
        key_data=key_data,
        exec=_program(user.exec, path, where) if user.exec is not None else None,
        impersonate_user=user.as_user,
        impersonate_uid=user.as_uid,
        impersonate_groups=user.as_groups,
        impersonate_extra=tuple((key, one) for key, many in user.as_user_extra.items() for one in many),
    )


def _program(given: _Exec, path: Path, where: str) -> Exec:
    if not given.command:
        raise AccessError(f"{where}: exec.command is not set")
    if given.api_version not in CREDENTIAL_VERSIONS:
        raise AccessError(
            f"{where}: exec.apiVersion={given.api_version}: expected {' or '.join(CREDENTIAL_VERSIONS)}"
        )
    if given.interactive_mode == "Always":
        raise AccessError(f"{where}: exec.interactiveMode=Always: the agent has no terminal; expected Never")
    plugin = Exec(
        command=given.command,
        args=given.args,
        env=tuple((one.name, one.value) for one in given.env),
        api_version=given.api_version,
        provide_cluster_info=given.provide_cluster_info,
        folder=str(path.parent),
    )
    if shutil.which(plugin.program) is None:
        hint = " ".join(given.install_hint.split())
        raise AccessError(
            f"{where}: exec.command={given.command}: no such program{f'; {hint}' if hint else ''}"
        )
    return plugin


def _file(path: Path, name: str) -> Path | None:
    """Resolve a file name of the kubeconfig, relative to the kubeconfig's folder."""
    return path.parent / os.path.expanduser(name) if name else None  # noqa: PTH111


def _data(text: str, where: str) -> bytes | None:
    if not text:
        return None
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise AccessError(f"{where}: {error}; expected base64") from error


def _readable(path: Path, where: str, expected: str) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise AccessError(f"{where}: {path}: {error.strerror}; expected {expected}") from error


def _check_authority(file: Path | None, data: bytes | None, where: str) -> None:
    """Raise AccessError for a CA that cannot be loaded. Inline data overrides the file."""
    key = "certificate-authority-data" if data else f"certificate-authority: {file}"
    if data is None and file is None:
        return
    if data is None and file is not None:
        _readable(file, f"{where}: certificate-authority", "a certificate in PEM")
    context: Any = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if data is not None:
            context.load_verify_locations(cadata=data.decode())
        else:
            context.load_verify_locations(cafile=file)
    except (OSError, ValueError) as error:
        raise AccessError(f"{where}: {key}: no certificate in PEM") from error


def _check_certificate(certificate: bytes | Path | None, key: bytes | Path | None, where: str) -> None:
    """Raise AccessError for a client certificate that cannot be loaded with its key."""
    if certificate is None:
        return
    for name, given in (("client-certificate", certificate), ("client-key", key)):
        if isinstance(given, Path):
            _readable(given, f"{where}: {name}", "PEM")
    from cells.kubernetes.client.credentials import load_certificate

    try:
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificate, key)
    except (OSError, ValueError) as error:
        files = ", ".join(str(one) for one in (certificate, key) if isinstance(one, Path))
        mismatch = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
        what = (
            "the key is not the certificate's"
            if mismatch
            else "expected a certificate, and its key without a password, in PEM"
        )
        raise AccessError(f"{where}: client-certificate{f': {files}' if files else ''}: {what}") from error
