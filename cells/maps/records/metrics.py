"""Rows of cilium_metrics: how many packets were forwarded or dropped, why, and where in the C.

For:    the datapath's metrics. Needs: nothing. Gives: MetricsKey, MetricsValue.
Source: Cilium 1.16/1.17 map ABI. Little endian. struct.error on data of another size.
"""

from typing import ClassVar, Final, Self

import msgspec

from cells.maps.records.abi import Layout

METRIC_INGRESS: Final = 1
METRIC_EGRESS: Final = 2
METRIC_SERVICE: Final = 3

_metrics_key = Layout("metrics_key", reason="B", direction="B", line="H", file="B", reserved="3x")
_metrics_value = Layout("metrics_value", count="Q", bytes="Q")


class MetricsKey(msgspec.Struct, frozen=True):
    """Key of cilium_metrics, 8 bytes: why, which way, and which source line of the datapath."""

    SIZE: ClassVar = _metrics_key.size

    reason: int
    direction: int
    line: int = 0
    file: int = 0

    def pack(self) -> bytes:
        return _metrics_key.pack(self.reason, self.direction, self.line, self.file)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        reason, direction, line, file = _metrics_key.unpack(data)
        return cls(reason, direction & 3, line, file)


class MetricsValue(msgspec.Struct, frozen=True):
    """Value of cilium_metrics: 16 bytes for each possible CPU."""

    SIZE: ClassVar = _metrics_value.size

    packets: int
    octets: int

    def pack(self) -> bytes:
        """One CPU's value."""
        return _metrics_value.pack(self.packets, self.octets)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """The sum of all CPUs' values."""
        values = list(_metrics_value.iter_unpack(data))
        return cls(sum(packets for packets, _ in values), sum(total for _, total in values))
