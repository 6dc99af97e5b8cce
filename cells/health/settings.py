"""Settings of the probes between nodes, under Cilium's names.

Source: Cilium 1.17; connectivity-probe-frequency-ratio is of 1.18.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from lifecycle import Settings

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

    cluster_health_port: Annotated[int, Meta(ge=1, le=65535)] = 4240
    """TCP port that probes go to, and that answers them."""

    health_check_icmp_failure_threshold: Annotated[int, Meta(ge=1, le=100)] = 3
    """Echo requests of one probe; one answer is enough."""

    connectivity_probe_frequency_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """How rarely to probe: each address every 10 seconds at 0, every 110 seconds at 1."""

    @property
    def endpoints(self) -> bool:
        """Whether nodes have health endpoints."""
        return self.enable_health_checking and self.enable_endpoint_health_checking

    @property
    def interval(self) -> float:
        """Seconds from one probe of an address to the next."""
        return FASTEST + SLOWER_BY * self.connectivity_probe_frequency_ratio
