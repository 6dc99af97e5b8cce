"""The URLs of API servers and proxies, checked.

Needs: nothing.   Gives: checked_url, checked_proxy, AccessError.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

from lifecycle import UsageError


class AccessError(UsageError, ValueError):
    """A kubeconfig, or what is mounted, that cannot be used: one line with the file and the key."""


_PLAIN: Final = re.compile(r"[!-~]+")
"""What a URL is made of."""


PROXIES = frozenset({"http", "https", "socks5", "socks5h"})


def checked_proxy(url: str, where: str) -> str:
    """The URL of a proxy, empty for none. Raises AccessError."""
    if not url:
        return ""
    parts = _split(url)
    if parts is None or parts.scheme not in PROXIES:
        raise AccessError(f"{where}={url}: expected a URL such as http://10.0.0.1:3128, https or socks5")
    return url


def checked_url(url: str, where: str) -> str:
    """The URL of a server, https unless it says otherwise. Raises AccessError."""
    whole = url if "://" in url else f"https://{url}"
    parts = _split(whole)
    if parts is None or parts.scheme not in {"http", "https"}:
        raise AccessError(f"{where}={url}: expected a URL such as https://10.0.0.1:6443")
    return whole.rstrip("/")


def _split(url: str) -> SplitResult | None:
    """The parts of a URL with a host; None for what is none."""
    try:
        parts = urlsplit(url)
        fits = _PLAIN.fullmatch(url) and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        return None
    return parts if fits else None
