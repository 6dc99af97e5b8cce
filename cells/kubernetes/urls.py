"""The URL of an API server, checked.

Needs: nothing.   Gives: checked_url, AccessError.
"""

from __future__ import annotations

from urllib.parse import urlsplit


class AccessError(ValueError):
    """A kubeconfig, or what is mounted, that cannot be used: one line with the file and the key."""


def checked_url(url: str, where: str) -> str:
    """The URL of a server, https unless it says otherwise. Raises AccessError."""
    whole = url if "://" in url else f"https://{url}"
    parts = urlsplit(whole)
    try:
        port_fits = parts.port is None or parts.port > 0
    except ValueError:
        port_fits = False
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port_fits:
        raise AccessError(f"{where}={url}: expected a URL such as https://10.0.0.1:6443")
    return whole.rstrip("/")
