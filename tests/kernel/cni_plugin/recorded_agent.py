"""Runs our CNI server with the addresses, errors and health of a recorded agent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import structlog

from cells import netlink
from cells.base.addresses import Family, IPAddress
from cells.cni.attach import Attacher
from cells.cni.detach import Detacher, LinkTeardown
from cells.cni.server import Checker, CniServer
from cells.endpoint import DatapathConfiguration, Endpoint, EndpointError, EndpointRequest, NewEndpoint, State
from cells.netlink.links import HostLinks
from cells.netlink.messages import OffloadLimits
from cells.netlink.namespaces import PodLink
from cells.netlink.rows import mac_text
from cells.node.ipam.allocator import Allocation
from cells.node.ipam.ranges import IpamError
from lifecycle import HealthTree, Hive, Lifecycle, invoke
from tests.unit.cni_server.fakes import FakeNode

Json = Any
SOCKET = Path("/var/run/cilium/cni.sock")


UNASKED: Json = {
    "deviceMTU": 1500,
    "routeMTU": 1500,
    "addressing": {"ipv4": {"enabled": True, "ip": "10.0.1.5"}},
}
"""The configuration for recordings in which the plugin did not request it."""


class RecordedNode(FakeNode):
    """Answers as the recorded agent did; the links are real."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[Json] = []
        """Exchanges of the present command."""
        self.puts: list[Json] = []
        """Bodies of PUT /endpoint as our ADD would have sent them."""
        self.route_mtu_in_chains = False
        """The recorded node's setting."""
        self.hidden = False
        """Whether lookups find no endpoints."""

    def follow(self, step: Json) -> None:
        """Answer the requests of this command from now on."""
        self.exchanges = step["exchanges"]
        self.puts = []
        health = self._answer("GET", "/healthz")
        code, body = (health["status"], health.get("body")) if health else (200, {})
        broken = isinstance(body, dict) and body.get("overallHealth") == "Failure"
        self.shown = dict.fromkeys(self.book, State.DISCONNECTED) if broken else {}
        self.hidden = step["command"] == "CHECK" and code >= 400
        failing = step["command"] == "STATUS" and code >= 400
        self.policy_maps = 0 if failing else 100
        self.refuse = {"wait for a policy map"} if failing else set()
        deleted = self._answer("DELETE", "/v1/endpoint")
        if deleted and deleted.get("status", 200) >= 206:
            self.refuse.add("delete endpoint")

    def _answer(self, method: str, path: str) -> Json:
        for exchange in self.exchanges:
            request = exchange["request"]
            if request["method"] == method and path in request["path"]:
                return exchange["response"]
        return None

    @property
    def mtu(self) -> int:
        """Return ``deviceMTU`` of the recorded configuration."""
        return int(self._configuration()["deviceMTU"])

    @property
    def route_mtu(self) -> int:
        """Return ``routeMTU`` of the recorded configuration."""
        return int(self._configuration()["routeMTU"])

    @property
    def reserved_ports(self) -> str:
        """Return ``ipLocalReservedPorts`` of the recorded configuration."""
        return str(self._configuration().get("ipLocalReservedPorts", ""))

    @property
    def limits(self) -> OffloadLimits:
        """Return the recorded limits of GSO and GRO."""
        status = self._configuration()
        names = ("GROMaxSize", "GSOMaxSize", "GROIPv4MaxSize", "GSOIPv4MaxSize")
        return OffloadLimits(*(status.get(name, 0) for name in names))

    def _configuration(self) -> Json:
        answers = [e["response"] for e in self.exchanges if e["request"]["path"] == "/v1/config"]
        good = [answer["body"]["status"] for answer in answers if answer.get("status") == 200]
        return good[-1] if good else UNASKED

    def routers(self) -> tuple[IPAddress, ...]:
        """Return the router addresses of the recorded node."""
        addressing = self._configuration()["addressing"]
        found = [addressing[family] for family in ("ipv6", "ipv4") if family in addressing]
        return tuple(ip_address(each["ip"]) for each in found if each.get("enabled"))

    def allocate_next(
        self, owner: str, pool: str = "", family: Family | None = None
    ) -> tuple[Allocation, ...]:
        """Return the recorded addresses of the enabled families."""
        (request,) = [e["request"] for e in self.exchanges if e["request"]["method"] == "POST"]
        assert unquote(request["path"]) == f"/v1/ipam?owner={owner}"
        response = self._answer("POST", "/v1/ipam")
        if response["status"] != 201:
            raise IpamError(response["status"], response["body"])
        body = response["body"]
        given = [
            Allocation(ip_address(body["address"][name]), body["address"][f"{name}-pool-name"], owner)
            for name in ("ipv6", "ipv4")
            if name in body["address"] and body["host-addressing"][name].get("enabled")
        ]
        self.addresses.update(each.ip for each in given)
        return tuple(given)

    def begin(self, request: EndpointRequest) -> NewEndpoint:
        """Refuse as recorded, or create the endpoint."""
        self.puts.append(put_body(request))
        response = self._answer("PUT", "/v1/endpoint")
        if response["status"] != 201:
            raise EndpointError(response["status"], response.get("body", ""))
        return super().begin(request)

    def by_attachment(self, container_id: str, container_ifname: str) -> Endpoint | None:
        """Return the endpoint, or None if the recorded agent did not find it."""
        return None if self.hidden else super().by_attachment(container_id, container_ifname)


def put_body(request: EndpointRequest) -> Json:
    """Return what Cilium's plugin would have sent, apart from timers, state and synchronous build."""
    datapath = request.datapath
    body: dict[str, object] = {
        "addressing": {},
        "container-id": request.container_id,
        "container-interface-name": request.container_ifname,
        "datapath-configuration": {
            "external-ipam": datapath.external_ipam,
            "require-arp-passthrough": datapath.require_arp_passthrough,
            "require-egress-prog": datapath.require_egress_prog,
            "require-routing": datapath.require_routing,
        }
        if datapath != DatapathConfiguration()
        else {},
        "host-mac": mac_text(request.host_mac),
        "interface-index": request.ifindex,
        "interface-name": request.ifname,
        "k8s-namespace": request.pod_namespace,
        "k8s-pod-name": request.pod_name,
        "k8s-uid": request.pod_uid,
        "mac": mac_text(request.pod_mac),
        "netns-cookie": str(request.netns_cookie or ""),
    }
    addressing: dict[str, str] = {}
    for family, ip, pool in (("ipv4", request.ipv4, request.pool), ("ipv6", request.ipv6, request.ipv6_pool)):
        if ip is not None:
            addressing |= {family: str(ip)} | ({f"{family}-pool-name": pool} if pool else {})
    body["addressing"] = addressing
    return {key: value for key, value in body.items() if value or key == "datapath-configuration"}


def _root(_links: HostLinks) -> None:
    """List the dependencies of the tests."""


@asynccontextmanager
async def serving(node: RecordedNode) -> AsyncIterator[None]:
    """Serve cni.sock over real links with this node's answers."""
    async with Hive(netlink.cell, invoke(_root)).started() as hive:
        links, lifecycle, log = hive.get(HostLinks), Lifecycle("test"), structlog.get_logger()
        health = HealthTree().reporter("cni")
        teardown = LinkTeardown(links, node, node, lifecycle=lifecycle, health=health, log=log)
        attacher = Attacher(
            links,
            node,
            node,
            teardown,
            gateways=node.routers,
            mtu=lambda: node.mtu,
            route_mtu=lambda: node.route_mtu,
            reserved_ports=lambda: node.reserved_ports,
            limits=lambda: node.limits,
            state=SOCKET.parent,
            log=log,
            route_mtu_in_chains=node.route_mtu_in_chains,
        )
        detacher = Detacher(node, teardown, log)
        server = CniServer(
            SOCKET, attacher, detacher, Checker(node), node, PodLink, lifecycle=lifecycle, log=log
        )
        async with teardown.running(), server.serving():
            yield
