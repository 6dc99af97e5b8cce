"""How endpoints are batched, and how fast slices are written.

Needs: nothing.   Gives: SliceSettings, WriteLimit.
Source: Cilium 1.17, options of the operator's CES controller.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from lifecycle import Settings, refuse

MODES: Final = ("identity", "fcfs")
OPTION: Final = "ces-rate-limits"


class WriteLimit(msgspec.Struct, frozen=True):
    """How fast slices are written in a cluster of so many nodes or more."""

    nodes: Annotated[int, msgspec.Meta(ge=0)]
    limit: Annotated[float, msgspec.Meta(gt=0)]
    """Writes a second."""
    burst: Annotated[int, msgspec.Meta(ge=1)]


class SliceSettings(Settings, frozen=True):
    """Settings of the endpoint-slices cell; they count with enable-cilium-endpoint-slice."""

    ces_max_ciliumendpoints_per_ces: int = 100
    """How many endpoints a CiliumEndpointSlice holds at most."""

    ces_slice_mode: str = "identity"
    """Which endpoints share a slice: identity, those of one identity; fcfs, any of a namespace, first come,
    first served."""

    ces_rate_limits: str = '[{"nodes":0,"limit":10,"burst":20}]'
    """How fast slices are written, as JSON: the entry with the most nodes that the cluster has counts; limit
    is in writes a second."""

    def validate(self) -> None:
        """Refuse what cannot be, all at once; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        if self.ces_slice_mode not in MODES:
            yield f"ces-slice-mode={self.ces_slice_mode}: Invalid slicing mode: expected identity or fcfs"
        if self.ces_max_ciliumendpoints_per_ces < 1:
            yield (
                f"ces-max-ciliumendpoints-per-ces={self.ces_max_ciliumendpoints_per_ces}: expected 1 or more"
            )
        try:
            self.limits()
        except ValueError as error:
            yield f"{OPTION}={self.ces_rate_limits}: {error}"

    def limits(self) -> list[WriteLimit]:
        """The limits, for the fewest nodes first; raises ValueError."""
        try:
            found = msgspec.json.decode(self.ces_rate_limits, type=list[WriteLimit])
        except msgspec.MsgspecError as error:
            raise ValueError(
                f'{error}: expected a list such as [{{"nodes":0,"limit":10,"burst":20}}]'
            ) from None
        if not found:
            raise ValueError('expected one limit at least, such as [{"nodes":0,"limit":10,"burst":20}]')
        return sorted(found, key=lambda one: one.nodes)

    def limit(self, nodes: int) -> WriteLimit:
        """The one that counts for so many nodes; below the first, the first."""
        limits = self.limits()
        found = [one for one in limits if one.nodes <= nodes] or limits[:1]
        return found[-1]
