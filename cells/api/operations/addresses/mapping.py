"""Allocated addresses to wire models.

Needs: the allocator's values.   Gives: allocation_model.
"""

from __future__ import annotations

from collections.abc import Iterable

from cells.api.models import v1 as models
from cells.ipam import Allocation, Family


def allocation_model(
    allocations: Iterable[Allocation], host_addressing: models.NodeAddressing
) -> models.IPAMResponse:
    """The answer to POST /ipam. The uuid of a timer is only in the object of its family."""
    got = {Family.of(each.ip): each for each in allocations}
    ipv4, ipv6 = got.get(Family.IPV4), got.get(Family.IPV6)
    return models.IPAMResponse(
        address=models.AddressPair(
            ipv4=str(ipv4.ip) if ipv4 else "",
            ipv4_pool_name=ipv4.pool if ipv4 else "",
            ipv6=str(ipv6.ip) if ipv6 else "",
            ipv6_pool_name=ipv6.pool if ipv6 else "",
        ),
        ipv4=_address(ipv4),
        ipv6=_address(ipv6),
        host_addressing=host_addressing,
    )


def _address(allocation: Allocation | None) -> models.IPAMAddressResponse | None:
    if allocation is None:
        return None
    return models.IPAMAddressResponse(ip=str(allocation.ip), expiration_uuid=allocation.expiration_uuid)
