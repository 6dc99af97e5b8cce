"""Ports that the kernel must not give to connections by itself, for services have them.

Source: kernel Documentation/networking/ip-sysctl.rst, ip_local_port_range and ip_local_reserved_ports.
Needs: nothing.   Gives: reserved_ports().
"""

from __future__ import annotations

from collections.abc import Sequence


def reserved_ports(local: str, reserved: str, services: Sequence[int]) -> str | None:
    """What ip_local_reserved_ports has to say, None if it is fine: the ranges are apart, or it says so.

    ``local`` and ``reserved`` are what the kernel says now.
    """
    first, last = services
    bounds = [int(word) for word in local.split()]
    if len(bounds) == 2 and (last < bounds[0] or first > bounds[1]):
        return None
    held = [_range(part) for part in reserved.split(",") if part]
    if any(low <= first and last <= high for low, high in held):
        return None
    return ",".join(_text(*each) for each in _merged([*held, (first, last)]))


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """As the kernel writes them: in order, and neighbours as one."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def _text(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"
