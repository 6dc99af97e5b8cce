"""Where metrics are served, and which.

Needs: nothing.   Gives: MetricsSettings, Address.
Source: Cilium 1.17, prometheus-serve-addr and metrics.
"""

from __future__ import annotations

from typing import NamedTuple

from lifecycle import Settings


class Address(NamedTuple):
    """Where to listen; without a host at every address of the node."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """``host:port``, ``:port`` or ``[v6]:port``, as Go writes it. Raises ValueError("expected ...")."""
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            colon = ""
        if not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ValueError("expected host:port or :port, with a TCP port, 1 to 65535")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class MetricsSettings(Settings, frozen=True):
    """Settings of the metrics cell."""

    prometheus_serve_addr: str = ""
    """Address to serve metrics on, such as :9962; empty: not served."""

    metrics: tuple[str, ...] = ()
    """Metrics to add to the usual ones (+name) or to leave out (-name), by full name; the last one wins."""

    def validate(self) -> None:
        """Refuse what is no address; raises ValueError with one line."""
        if self.prometheus_serve_addr:
            try:
                Address.parse(self.prometheus_serve_addr)
            except ValueError as error:
                raise ValueError(f"prometheus-serve-addr={self.prometheus_serve_addr}: {error}") from None

    @property
    def address(self) -> Address | None:
        """Where to serve; None when metrics are not served."""
        return Address.parse(self.prometheus_serve_addr) if self.prometheus_serve_addr else None
