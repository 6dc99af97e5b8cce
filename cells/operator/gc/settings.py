"""How often what nobody uses any more is looked for, and how fast it is deleted.

Needs: nothing.   Gives: GCSettings.
Source: Cilium 1.17, options of the operator.
"""

from __future__ import annotations

from collections.abc import Iterator

from lifecycle import Duration, Settings, minutes, refuse


class GCSettings(Settings, frozen=True):
    """Settings of garbage collection."""

    nodes_gc_interval: Duration = minutes(5)
    """How often CiliumNodes without a Node are looked for; one goes when it is found twice. 0 never looks."""

    cilium_endpoint_gc_interval: Duration = minutes(5)
    """How often CiliumEndpoints without a running pod are looked for."""

    identity_gc_interval: Duration = minutes(15)
    """How often identities that no endpoint has are looked for; 0 never looks."""

    identity_heartbeat_timeout: Duration = minutes(30)
    """How long an identity that no endpoint has is kept."""

    identity_gc_rate_interval: Duration = minutes(1)
    """The time that identity-gc-rate-limit is about."""

    identity_gc_rate_limit: int = 2500
    """How many identities are deleted in identity-gc-rate-interval at most."""

    def validate(self) -> None:
        """Refuse what cannot be; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        if self.cilium_endpoint_gc_interval <= 0:
            yield (
                f"cilium-endpoint-gc-interval={self.cilium_endpoint_gc_interval}: expected more than 0:"
                " identities are collected by what endpoints say"
            )
        for name in ("nodes_gc_interval", "identity_gc_interval"):
            if getattr(self, name) < 0:
                yield f"{name.replace('_', '-')}={getattr(self, name)}: expected 0 or more"
        for name in ("identity_heartbeat_timeout", "identity_gc_rate_interval", "identity_gc_rate_limit"):
            if getattr(self, name) <= 0:
                yield f"{name.replace('_', '-')}={getattr(self, name)}: expected more than 0"
