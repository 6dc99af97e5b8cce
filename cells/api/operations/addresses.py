"""Operations on addresses: POST /ipam, POST and DELETE /ipam/{ip}, on the IPAM cell."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from cells.api import models
from cells.api.operations import ApiPart, Route, config_mapping
from cells.api.operations.status import NodeSummary
from cells.api.wire import FrameworkError, answer, empty, parse_bool
from cells.base.addresses import Family
from cells.endpoint import Endpoints
from cells.node.ipam import Ipam
from cells.node.ipam.allocator import Allocation
from cells.node.ipam.ranges import IpamError
from lifecycle import Member
from lifecycle.http import Request, Response

# Wire models.


def allocation_model(
    allocations: Iterable[Allocation], host_addressing: models.NodeAddressing
) -> models.IPAMResponse:
    """Return the response of POST /ipam. Only the object of a family has an expiration UUID."""
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


# The operations.


class AddressOperations:
    """Allocates and releases addresses for CNI plugins that use the REST API."""

    def __init__(self, endpoints: Endpoints, ipam: Ipam, facts: NodeSummary) -> None:
        self._endpoints = endpoints
        self._ipam = ipam
        self._facts = facts

    def routes(self) -> list[Route]:
        failed = frozenset({500})
        return [
            Route("POST", "/v1/ipam", self.post_ipam),
            Route("POST", "/v1/ipam/{ip}", self.post_ipam_address, texts=failed),
            Route("DELETE", "/v1/ipam/{ip}", self.delete_ipam_address, texts=failed),
        ]

    async def post_ipam(self, request: Request) -> Response:
        """POST /ipam: allocate an address of each family, or of the requested one; all or none.

        With ``expiration``, unused addresses are released after a timeout. Any failure is 502.
        """
        query = request.query
        family = query.get("family", "").lower()
        if family not in ("", *Family):
            raise FrameworkError(422, 606, "family in query should be one of [ipv4 ipv6]")
        addressing = config_mapping.host_addressing(self._facts.node())
        expires = parse_bool(request.headers.get("expiration"), default=False)
        allocate = self._ipam.allocate_next_expiring if expires else self._ipam.allocate_next
        try:
            got = allocate(query.get("owner", ""), query.get("pool", ""), Family(family) if family else None)
        except IpamError as error:
            return answer(502, error.text)
        return answer(201, allocation_model(got, addressing))

    async def post_ipam_address(self, request: Request) -> Response:
        """POST /ipam/{ip}: allocate this address; every error is 500, as in Cilium."""
        text = request.match_info["ip"]
        try:
            address = ip_address(text)
        except ValueError:
            return answer(500, f"invalid IP address: {text}")
        self._ipam.allocate(address, request.query.get("owner", ""), request.query.get("pool", ""))
        return empty(200)

    async def delete_ipam_address(self, request: Request) -> Response:
        """DELETE /ipam/{ip}: release an address that no endpoint or router uses."""
        try:
            address = ip_address(request.match_info["ip"])
        except ValueError:
            return empty(400)
        user = next((e for e in self._endpoints.all() if address in e.addresses), None)
        if user is not None:
            return answer(500, f"IP is in use by endpoint {user.id}")
        if address in self._facts.node().router_ips:
            return answer(500, "IP is in use by router")
        self._ipam.release(address, request.query.get("pool", ""))
        return empty(200)


def part(operations: AddressOperations) -> Member[ApiPart]:
    """Provide the operations."""
    return ApiPart("addresses", operations.routes())
