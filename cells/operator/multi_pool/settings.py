"""Pools that the operator creates at its start unless pools of these names exist.

Needs: nothing.   Gives: MultiPoolSettings.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_network
from typing import Any

from msgspec import field

from lifecycle import Settings, refuse

OPTION = "auto-create-cilium-pod-ip-pools"


class MultiPoolSettings(Settings, frozen=True):
    """Settings of the multi-pool cell; they count in IPAM mode multi-pool."""

    auto_create_cilium_pod_ip_pools: dict[str, str] = field(default_factory=dict)
    """CiliumPodIPPools that are made at start if there is none of that name:
    NAME=ipv4-cidrs:CIDR,CIDR;ipv4-mask-size:N;ipv6-cidrs:CIDR;ipv6-mask-size:N, a comma between pools."""

    def validate(self) -> None:
        """Refuse pools that cannot be read, in Cilium's words; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        for name, text in self.auto_create_cilium_pod_ip_pools.items():
            try:
                pool_spec(text)
            except ValueError as error:
                yield f"{OPTION}: {name}={text}: {error}"


def pool_spec(text: str) -> dict[str, Any]:
    """``spec`` of a CiliumPodIPPool; raises ValueError. The API server says what is missing in it."""
    spec: dict[str, Any] = {}
    for part in filter(None, text.replace(" ", "").split(";")):
        key, colon, value = part.partition(":")
        if not colon:
            raise ValueError(f"{part}: expected KEY:VALUE, as in ipv4-mask-size:24")
        family, _, what = key.partition("-")
        if family not in {"ipv4", "ipv6"} or what not in {"cidrs", "mask-size"}:
            raise ValueError(
                f"{key}: expected ipv4-cidrs, ipv4-mask-size, ipv6-cidrs or ipv6-mask-size before the colon"
            )
        found: Any = _mask(key, value) if what == "mask-size" else _cidrs(key, int(family[-1]), value)
        spec.setdefault(family, {})["maskSize" if what == "mask-size" else "cidrs"] = found
    return spec


def _mask(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f'invalid value for key "{key}": {value}: expected a prefix length') from None


def _cidrs(key: str, version: int, value: str) -> list[str]:
    cidrs = value.split(",")
    for one in cidrs:
        try:
            right = "/" in one and ip_network(one, strict=False).version == version
        except ValueError:
            right = False
        if not right:
            raise ValueError(f'invalid value for key "{key}": {one}: expected an IPv{version} network')
    return cidrs
