"""Networks that nodes hold: none overlaps another.

Needs: nothing.   Gives: HeldNetworks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from cells.operator.pod_cidrs import Network

Span = tuple[int, int]
"""The first and the last address."""


def span(network: Network) -> Span:
    """The first and the last address of a network, as numbers."""
    return int(network.network_address), int(network.broadcast_address)


class HeldNetworks:
    """A set of networks of both families, asked what overlaps with it."""

    def __init__(self) -> None:
        self._spans: dict[int, list[Span]] = {4: [], 6: []}

    def overlapping(self, version: int, wanted: Span) -> Span | None:
        """The last held network that has an address of the span; None when it is free."""
        spans = self._spans[version]
        at = bisect_right(spans, wanted[1], key=lambda one: one[0])
        found = spans[at - 1] if at else None
        return found if found is not None and found[1] >= wanted[0] else None

    def add(self, network: Network) -> bool:
        """Hold it; False if an address of it is held already."""
        wanted = span(network)
        if self.overlapping(network.version, wanted) is not None:
            return False
        insort(self._spans[network.version], wanted)
        return True

    def remove(self, network: Network) -> None:
        """Hold it no more; it must be held."""
        spans = self._spans[network.version]
        del spans[bisect_left(spans, span(network))]
