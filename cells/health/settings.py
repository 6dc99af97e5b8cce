"""Settings of the probes between nodes, under Cilium's names.

Source: Cilium 1.17; connectivity-probe-frequency-ratio is of 1.18.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lifecycle import Settings, refuse

__all__ = ["NodeHealthSettings"]

FASTEST: Final = 10.0
SLOWER_BY: Final = 100.0
"""Seconds between two probes of an address at the ratio 0, and how many more at the ratio 1."""


class NodeHealthSettings(Settings, frozen=True):
    """Probes between the nodes of the cluster."""

    enable_health_checking: bool = False
    """Probe all nodes by ICMP and HTTP, answer probes of others, and serve health.sock."""

    enable_endpoint_health_checking: bool = True
    """With enable-health-checking, give this node an endpoint of identity health that answers probes as a pod
    would, and probe those of all nodes."""

    cluster_health_port: int = 4240
    """TCP port that probes go to, and that answers them."""

    health_check_icmp_failure_threshold: int = 3
    """Echo requests of one probe; one answer is enough."""

    connectivity_probe_frequency_ratio: float = 0.5
    """How rarely to probe: each address every 10 seconds at 0, every 110 seconds at 1."""

    @property
    def endpoints(self) -> bool:
        """Whether nodes have health endpoints."""
        return self.enable_health_checking and self.enable_endpoint_health_checking

    @property
    def interval(self) -> float:
        """Seconds from one probe of an address to the next."""
        return FASTEST + SLOWER_BY * self.connectivity_probe_frequency_ratio

    def validate(self) -> None:
        """Refuse numbers out of range; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        if not 0 < self.cluster_health_port < 1 << 16:
            yield f"cluster-health-port={self.cluster_health_port}: expected a port, 1 to 65535"
        if not 0 < self.health_check_icmp_failure_threshold <= 100:
            value = self.health_check_icmp_failure_threshold
            yield f"health-check-icmp-failure-threshold={value}: expected 1 to 100 requests"
        if not 0 <= self.connectivity_probe_frequency_ratio <= 1:
            ratio = self.connectivity_probe_frequency_ratio
            yield f"connectivity-probe-frequency-ratio={ratio}: expected 0 to 1"
