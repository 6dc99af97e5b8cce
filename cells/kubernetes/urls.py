"""The URLs of API servers and proxies, checked.

Needs: nothing.   Gives: checked_url, checked_proxy, AccessError.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


class AccessError(ValueError):
    """A kubeconfig, or what is mounted, that cannot be used: one line with the file and the key."""


PROXIES = frozenset({"http", "https", "socks5", "socks5h"})


def checked_proxy(url: str, where: str) -> str:
    """The URL of a proxy, empty for none. Raises AccessError."""
    if not url:
        return ""
    parts = urlsplit(url)
    if parts.scheme not in PROXIES or not parts.hostname or not _port_fits(parts):
        raise AccessError(f"{where}={url}: expected a URL such as http://10.0.0.1:3128, https or socks5")
    return url


def checked_url(url: str, where: str) -> str:
    """The URL of a server, https unless it says otherwise. Raises AccessError."""
    whole = url if "://" in url else f"https://{url}"
    parts = urlsplit(whole)
    if parts.scheme not in {"http", "https"} or not parts.hostname or not _port_fits(parts):
        raise AccessError(f"{where}={url}: expected a URL such as https://10.0.0.1:6443")
    return whole.rstrip("/")


def _port_fits(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False
