"""The operations on addresses: who has which, for plugins that ask for them by REST.

Needs: Ipam, Endpoints, NodeStatus.   Gives: AddressOperations.
"""

from __future__ import annotations

from ipaddress import ip_address

from cells.api.operations.addresses import mapping as ipam_mapping
from cells.api.operations.node import config_mapping
from cells.api.operations.node.node_status import NodeStatus
from cells.api.part import ApiPart, Route
from cells.api.wire import FrameworkError, answer, empty, parse_bool
from cells.endpoint import Endpoints
from cells.ipam import Family, Ipam, IpamError
from lifecycle import Member
from lifecycle.http import Request, Response


class AddressOperations:
    """The handlers."""

    def __init__(self, endpoints: Endpoints, ipam: Ipam, facts: NodeStatus) -> None:
        self._endpoints = endpoints
        self._ipam = ipam
        self._facts = facts

    def routes(self) -> list[Route]:
        """All of them."""
        failed = frozenset({500})
        return [
            Route("POST", "/v1/ipam", self.post_ipam),
            Route("POST", "/v1/ipam/{ip}", self.post_ipam_address, texts=failed),
            Route("DELETE", "/v1/ipam/{ip}", self.delete_ipam_address, texts=failed),
        ]

    async def post_ipam(self, request: Request) -> Response:
        """POST /ipam: the next free address of each family, or of the one asked for; all or none.

        With ``expiration`` they are free again unless they are used soon. Any failure is 502.
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
        return answer(201, ipam_mapping.allocation_model(got, addressing))

    async def post_ipam_address(self, request: Request) -> Response:
        """POST /ipam/{ip}: that very address; every error is 500, as upstream."""
        text = request.match_info["ip"]
        try:
            address = ip_address(text)
        except ValueError:
            return answer(500, f"invalid IP address: {text}")
        self._ipam.allocate(address, request.query.get("owner", ""), request.query.get("pool", ""))
        return empty(200)

    async def delete_ipam_address(self, request: Request) -> Response:
        """DELETE /ipam/{ip}: free it again, unless an endpoint or the router has it."""
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
    """As a part of the API."""
    return ApiPart("addresses", operations.routes())
