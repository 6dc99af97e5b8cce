"""Settings of the source of Kubernetes objects."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import PurePosixPath
from typing import Annotated, Final
from urllib.parse import SplitResult, urlsplit

from msgspec import Meta

from lifecycle import Duration, Settings, UsageError, seconds

__all__ = ["AccessError", "KubernetesSettings", "ObjectSource", "checked_url"]


# Validates the URLs of API servers and proxies.


class AccessError(UsageError, ValueError):
    """An invalid kubeconfig or service account: one line with the file and the key."""


_PLAIN: Final = re.compile(r"[!-~]+")
"""The characters of a URL."""


PROXIES = frozenset({"http", "https", "socks5", "socks5h"})


def checked_proxy(url: str, where: str) -> str:
    """Validate a proxy's URL; empty for no proxy. Raises AccessError."""
    if not url:
        return ""
    parts = _split(url)
    if parts is None or parts.scheme not in PROXIES:
        raise AccessError(f"{where}={url}: expected a URL such as http://10.0.0.1:3128, https or socks5")
    return url


def checked_url(url: str, where: str, scheme: str = "http") -> str:
    """Validate a server's URL and add the scheme if it has none, as client-go does. Raises AccessError."""
    whole = url if "://" in url else f"{scheme}://{url}"
    parts = _split(whole)
    if parts is None or parts.scheme not in {"http", "https"}:
        raise AccessError(f"{where}={url}: expected a URL such as https://10.0.0.1:6443")
    return whole.rstrip("/")


def _split(url: str) -> SplitResult | None:
    """Return the parts of a URL with a host; None if it is invalid."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # raises for an empty or too long label
        fits = _PLAIN.fullmatch(url) and host and (parts.port is None or parts.port > 0)
    except ValueError:
        return None
    return parts if fits else None


class ObjectSource(Enum):
    """The source of objects."""

    NOWHERE = "nowhere"
    MANIFESTS = "manifests"
    """A folder; all its files are read."""
    API_SERVER = "api-server"


class KubernetesSettings(Settings, frozen=True):
    """Where the objects of Kubernetes come from: API servers, or a folder of manifests, or nowhere."""

    manifests_dir: str = ""
    """Folder of manifests (YAML, JSON) to take objects from instead of an API server; it is watched."""

    k8s_api_server: str = ""
    """URL of the API server, with http unless it has a scheme; empty: the kubeconfig's, or that of the
    cluster this pod belongs to."""

    k8s_api_server_urls: tuple[str, ...] = ()
    """URLs of several API servers, tried in turn when one does not answer."""

    k8s_kubeconfig_path: str = ""
    """Path of a kubeconfig; its current context is used."""

    k8s_client_qps: Annotated[float, Meta(ge=0)] = 10.0
    """Requests per second on average; 0: no limit."""

    k8s_client_burst: Annotated[int, Meta(ge=1)] = 20
    """Requests in a burst above that rate."""

    k8s_client_connection_timeout: Annotated[Duration, Meta(ge=0)] = seconds(30)
    """Time limit for connecting, and for an answer; 0: 30s."""

    k8s_client_connection_keep_alive: Annotated[Duration, Meta(ge=0)] = seconds(30)
    """How long an idle connection stays open, and the interval of TCP keepalive probes; 0: 30s."""

    k8s_heartbeat_timeout: Annotated[Duration, Meta(ge=0)] = seconds(30)
    """How long the API server may be silent before it is probed; without an answer the connections are
    replaced. 0: never."""

    @property
    def asks_api_server(self) -> bool:
        """Whether objects are read from API servers."""
        named = self.k8s_api_server or self.k8s_api_server_urls or self.k8s_kubeconfig_path
        return bool(not self.manifests_dir and (named or os.environ.get("KUBERNETES_SERVICE_HOST")))

    @property
    def source(self) -> ObjectSource:
        """The configured source of objects."""
        if self.manifests_dir:
            return ObjectSource.MANIFESTS
        return ObjectSource.API_SERVER if self.asks_api_server else ObjectSource.NOWHERE

    def faults(self) -> Iterator[str]:
        for name in ("manifests_dir", "k8s_kubeconfig_path"):
            value: str = getattr(self, name)
            if value and not PurePosixPath(value).is_absolute():
                yield f"{name.replace('_', '-')}={value}: expected an absolute path, or nothing"
        asked = [
            one for one in (self.k8s_api_server, *self.k8s_api_server_urls, self.k8s_kubeconfig_path) if one
        ]
        if self.manifests_dir and asked:
            yield (
                f"manifests-dir={self.manifests_dir}: objects come from one place; leave it out, or"
                f" k8s-api-server, k8s-api-server-urls and k8s-kubeconfig-path ({asked[0]})"
            )
        for url in (self.k8s_api_server, *self.k8s_api_server_urls):
            try:
                if url:
                    checked_url(url, "k8s-api-server")
            except AccessError as error:
                yield str(error)
