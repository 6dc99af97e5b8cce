"""How our plugin works with others.

Gives: ChainingMode.
Source: Cilium 1.17, cni-chaining-mode.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChainingMode:
    """How the network configuration that is written has our plugin work with others."""

    name: str

    @property
    def own_links(self) -> bool:
        """Whether pods' links are ours: no other plugin has made them."""
        return self.name in ("none", "portmap")
