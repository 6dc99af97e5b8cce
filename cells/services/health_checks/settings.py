"""Settings of the answers to load balancers.

Gives: HealthCheckSettings.
"""

from __future__ import annotations

from lifecycle import Settings


class HealthCheckSettings(Settings, frozen=True):
    """Health checks that this node answers."""

    enable_health_check_nodeport: bool = True
    """Answer on services' healthCheckNodePort whether this node has endpoints of theirs."""

    kube_proxy_replacement_healthz_bind_address: str = ""
    """Address and port that answers /healthz as kube-proxy does, such as 0.0.0.0:10256; unset: none."""

    @property
    def healthz(self) -> tuple[str, int] | None:
        """Host and port; None: not asked for. Raises ValueError with one line."""
        text = self.kube_proxy_replacement_healthz_bind_address
        if not text:
            return None
        host, separator, port = text.rpartition(":")
        if not separator or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"kube-proxy-replacement-healthz-bind-address={text}: expected an address and a port such as"
                " 0.0.0.0:10256 or [::]:10256"
            )
        return host.removeprefix("[").removesuffix("]"), int(port)

    def validate(self) -> None:
        """Refuse what is no address with a port; raises ValueError with one line."""
        _ = self.healthz
