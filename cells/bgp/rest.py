"""Show BGP in the REST API, in metrics, and in the status of this node's CiliumBGPNodeConfig.

Input:  desired tables of the controller; sessions and routes of speakers.
Why:    policies are shown as desired, with Cilium's names, because speakers have them in another form.
Source: Cilium 1.17, api/v1/openapi.yaml (/bgp), pkg/bgpv1/api, pkg/bgpv1/metrics.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cells.api.models import node as wire
from cells.api.operations import ApiPart, Route
from cells.api.wire import FrameworkError, answer, parse_int
from cells.base.addresses import IPAddress
from cells.base.metrics import Collector, MetricFamily, gauge
from cells.bgp.speaker_state import (
    AfiSafi,
    BGPInstance,
    BGPPeer,
    FamilyCounts,
    ListedRoute,
    ObservedPeer,
    PeerState,
    PolicyStatement,
    RouteListing,
    RoutePolicy,
    RouteTable,
    WantedSpeakers,
)
from cells.kubernetes.objects.cilium_bgp import (
    AFIS,
    SAFIS,
    BGPInstanceStatus,
    BGPNegotiatedTimers,
    BGPNodeConfigStatus,
    BGPPeerStatus,
    BGPRouteCount,
    CiliumBGPNodeConfig,
)
from lifecycle import HiveError, Member, ReadTable, module, provide, provide_private
from lifecycle.http import Request, Response

if TYPE_CHECKING:
    from cells.bgp.controller import InstancePlan

__all__ = ["BGPOperations", "BGPState", "cell", "node_status"]

DISABLED: Final = "BGP control plane is disabled"
LISTED: Final = frozenset({AfiSafi("ipv4", "unicast"), AfiSafi("ipv6", "unicast")})
"""Families in which speakers have routes."""


class BGPState(msgspec.Struct, frozen=True):
    """The tables and routes to show."""

    enabled: bool
    """Whether BGP is enabled."""
    wanted: WantedSpeakers
    observed: ReadTable[tuple[str, IPAddress], ObservedPeer]
    """Sessions by instance and address."""
    listing: RouteListing


class BGPQueryError(Exception):
    """A query with an unknown router, peer or family; the message is Cilium's."""


class RouteQuery(msgspec.Struct, frozen=True):
    """The parameters of GET /bgp/routes."""

    table: RouteTable
    afi: str
    safi: str
    router: int | None = None
    neighbor: str = ""


class BGPOperations:
    """The handlers of the API."""

    def __init__(self, state: BGPState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        """Return the HTTP routes of the handlers."""
        return [
            Route("GET", "/v1/bgp/peers", self.get_peers),
            Route("GET", "/v1/bgp/routes", self.get_routes),
            Route("GET", "/v1/bgp/route-policies", self.get_route_policies),
        ]

    async def get_peers(self, request: Request) -> Response:
        """GET /bgp/peers: desired peers by router and address, with their sessions if established."""
        del request

        async def found() -> list[wire.BgpPeer]:
            now, wanted = datetime.now(UTC), self._state.wanted
            peers = sorted(wanted.peers.all(), key=_peer_order)
            return [_peer(one, self._state.observed.get(one.key), now) for one in peers]

        return await self._answer("peers", found)

    async def get_routes(self, request: Request) -> Response:
        """GET /bgp/routes: the routes of a table, of all routers and peers unless given."""
        query = _route_query(request)
        return await self._answer("routes", lambda: self._found_routes(query))

    async def get_route_policies(self, request: Request) -> Response:
        """GET /bgp/route-policies: policies by router and name."""
        router = _router(request)

        async def found() -> list[wire.BgpRoutePolicy]:
            instances = self._instances(router)
            asns = {one.name: one.local_asn for one in instances}
            policies = [one for one in self._state.wanted.policies.all() if one.instance in asns]
            policies.sort(key=lambda one: (asns[one.instance], one.instance, one.name))
            return [_policy(one, asns[one.instance]) for one in policies]

        return await self._answer("route policies", found)

    async def _answer(self, what: str, found: Callable[[], Awaitable[list[Any]]]) -> Response:
        if not self._state.enabled:
            return answer(501, DISABLED)
        try:
            return answer(200, await found())
        except (BGPQueryError, HiveError) as error:
            return answer(500, f"failed to get {what}: {error}")

    def _instances(self, router: int | None) -> list[BGPInstance]:
        """Return the instances with an ASN, or all of them. Raises BGPQueryError for an unknown ASN."""
        instances = sorted(self._state.wanted.instances.all(), key=lambda one: (one.local_asn, one.name))
        if router is None or not instances:
            return instances
        found = [one for one in instances if one.local_asn == router]
        if not found:
            raise BGPQueryError(f"virtual router with ASN {router} does not exist")
        return found

    async def _found_routes(self, query: RouteQuery) -> list[wire.BgpRoute]:
        """List the routes of a query. Raises BGPQueryError, HiveError."""
        instances = self._instances(query.router)
        if query.neighbor and query.router is None and len(instances) > 1:
            raise BGPQueryError("multiple virtual routers configured, router ASN must be specified")
        found: list[wire.BgpRoute] = []
        for instance in instances:
            for peer in self._tables(instance, query):
                family = AfiSafi(query.afi, query.safi)
                if family not in LISTED:
                    continue
                listed = await self._state.listing.listed_routes(instance.name, query.table, family, peer)
                found += _routes(instance.local_asn, peer, family, listed)
        return found

    def _tables(self, instance: BGPInstance, query: RouteQuery) -> list[IPAddress | None]:
        """Return the peers to query; None for the Loc-RIB. Raises BGPQueryError."""
        if query.afi not in AFIS:
            raise BGPQueryError(f"unknown AFI {query.afi}")
        if query.safi not in SAFIS:
            raise BGPQueryError(f"unknown SAFI {query.safi}")
        if query.table is RouteTable.LOC_RIB:
            if query.neighbor:
                raise BGPQueryError("neighbor is unnecessary for loc-rib table type")
            return [None]
        peers = [one.address for one in self._state.wanted.peers.all() if one.instance == instance.name]
        if not query.neighbor:
            return [*sorted(peers, key=_address_order)]
        try:
            neighbor = ip_address(query.neighbor)
        except ValueError:
            text = f'ParseAddr("{query.neighbor}"): unable to parse IP'
            raise BGPQueryError(f"invalid neighbor address: {text}") from None
        if neighbor not in peers:
            raise BGPQueryError(f"neighbor that has {neighbor} doesn't exist")
        return [neighbor]


# Parameters, in the order in which they are checked.


def _required(request: Request, name: str) -> str:
    """Return a required parameter. Raises FrameworkError."""
    value = request.query.get(name, "")
    if not value:
        raise FrameworkError(422, 602, f"{name} in query is required")
    return value


def _router(request: Request) -> int | None:
    """Parse the parameter router_asn. Raises FrameworkError."""
    text = request.query.get("router_asn", "")
    return parse_int(text, "router_asn in query") if text else None


def _route_query(request: Request) -> RouteQuery:
    """Parse the parameters of GET /bgp/routes. Raises FrameworkError."""
    afi = _required(request, "afi")
    router = _router(request)
    safi = _required(request, "safi")
    table = _required(request, "table_type")
    if table not in set(RouteTable):
        words = " ".join(RouteTable)
        raise FrameworkError(422, 606, f"table_type in query should be one of [{words}]")
    return RouteQuery(RouteTable(table), afi, safi, router, request.query.get("neighbor", ""))


# From rows to models.


def _address_order(address: IPAddress) -> tuple[int, bytes]:
    return address.version, address.packed


def _peer_order(peer: BGPPeer) -> tuple[int, int, bytes]:
    return peer.local_asn, *_address_order(peer.address)


def _peer(peer: BGPPeer, observed: ObservedPeer | None, now: datetime) -> wire.BgpPeer:
    counts = {one.family: one for one in observed.families} if observed is not None else {}
    families = [counts.get(one, FamilyCounts(one)) for one in sorted(peer.families)]
    restart = peer.graceful_restart
    since = observed.established_at if observed is not None else None
    return wire.BgpPeer(
        local_asn=peer.local_asn,
        peer_asn=peer.asn,
        peer_address=str(peer.address),
        peer_port=peer.remote_port,
        session_state=observed.state if observed is not None else PeerState.UNKNOWN,
        uptime_nanoseconds=_nanoseconds(since, now),
        families=[
            wire.BgpPeerFamily(
                afi=one.family.afi,
                safi=one.family.safi,
                received=one.received,
                accepted=one.accepted,
                advertised=one.advertised,
            )
            for one in families
        ],
        tcp_password_enabled=peer.password is not None,
        ebgp_multihop_ttl=peer.multihop_ttl if peer.external else 1,
        connect_retry_time_seconds=peer.timers.connect_retry,
        configured_hold_time_seconds=peer.timers.hold,
        configured_keep_alive_time_seconds=peer.timers.keepalive,
        applied_hold_time_seconds=observed.hold_time if observed is not None else 0,
        applied_keep_alive_time_seconds=observed.keepalive if observed is not None else 0,
        graceful_restart=wire.BgpGracefulRestart(
            enabled=restart.enabled, restart_time_seconds=restart.restart_time if restart.enabled else 0
        ),
        session_error=observed.error if observed is not None and not observed.established else "",
        isolated_since=_time(observed.isolated_at) if observed is not None else "",
        speaker_crashes=observed.crashes if observed is not None else 0,
    )


def _time(at: datetime | None) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if at is not None else ""


def _nanoseconds(since: datetime | None, now: datetime) -> int:
    return max(0, int((now - since).total_seconds() * 1e9)) if since is not None else 0


def _routes(
    asn: int, peer: IPAddress | None, family: AfiSafi, listed: Iterable[ListedRoute]
) -> Iterator[wire.BgpRoute]:
    """Group routes by prefix and convert them to models."""
    now = datetime.now(UTC)
    grouped: dict[tuple[bytes, int], list[ListedRoute]] = {}
    for one in listed:
        grouped.setdefault((one.prefix.network_address.packed, one.prefix.prefixlen), []).append(one)
    for _, routes in sorted(grouped.items()):
        yield wire.BgpRoute(
            router_asn=asn,
            neighbor=str(peer) if peer is not None else "",
            prefix=str(routes[0].prefix),
            paths=[
                wire.BgpPath(
                    family=wire.BgpFamily(afi=family.afi, safi=family.safi),
                    nlri=_on_wire(one.nlri),
                    path_attributes=[_on_wire(each) for each in one.attributes],
                    age_nanoseconds=_nanoseconds(one.since, now),
                    best=one.best,
                    stale=one.stale,
                )
                for one in routes
            ],
        )


def _on_wire(data: bytes) -> wire.BgpWire:
    return wire.BgpWire(base64=b64encode(data).decode())


def _policy(policy: RoutePolicy, asn: int) -> wire.BgpRoutePolicy:
    return wire.BgpRoutePolicy(
        router_asn=asn,
        name=policy.name,
        type=policy.direction,
        statements=[_statement(one) for one in policy.statements],
    )


def _statement(statement: PolicyStatement) -> wire.BgpStatement:
    return wire.BgpStatement(
        match_neighbors=[f"{one}/{one.max_prefixlen}" for one in statement.neighbors] or None,
        match_prefixes=[
            wire.BgpPrefixMatch(
                cidr=str(one.cidr), prefix_len_min=one.min_length, prefix_len_max=one.max_length
            )
            for one in statement.prefixes
        ],
        route_action="accept",
        add_communities=[f"{one >> 16}:{one & 0xFFFF}" for one in statement.communities] or None,
        add_large_communities=[":".join(map(str, one)) for one in statement.large_communities] or None,
        set_local_preference=-1 if statement.local_preference is None else statement.local_preference,
    )


def bgp_part(operations: BGPOperations) -> Member[ApiPart]:
    """Contribute the handlers to the API."""
    return ApiPart("bgp", operations.routes())


# The status of this node's CiliumBGPNodeConfig.


def node_status(
    config: CiliumBGPNodeConfig, plans: Iterable[InstancePlan], observed: Iterable[ObservedPeer]
) -> BGPNodeConfigStatus:
    """Compute the status of the planned instances, in the order of the spec."""
    running = {plan.name: {peer.name: peer.key for peer in plan.peers} for plan in plans if plan.instance}
    sessions = {row.key: row for row in observed}
    found: list[BGPInstanceStatus] = []
    for instance in config.spec.bgp_instances:
        if instance.name in running:
            keys = running[instance.name]
            peers = tuple(
                _peer_status(
                    peer.name,
                    peer.peer_address,
                    peer.peer_asn,
                    sessions.get(keys[peer.name]) if peer.name in keys else None,
                )
                for peer in instance.peers or ()
                if peer.peer_address and peer.peer_asn is not None
            )
            found.append(BGPInstanceStatus(instance.name, instance.local_asn, peers or None))
    return BGPNodeConfigStatus(tuple(found) or None)


def _peer_status(name: str, address: str, asn: int, session: ObservedPeer | None) -> BGPPeerStatus:
    if session is None:
        return BGPPeerStatus(name, address, asn)
    return BGPPeerStatus(
        name,
        address,
        asn,
        session.state.value,
        BGPNegotiatedTimers(session.hold_time, session.keepalive),
        _time(session.established_at) or None,
        tuple(
            BGPRouteCount(one.family.afi, one.family.safi, one.received, one.advertised)
            for one in session.families
        )
        or None,
    )


# Metrics of all configured sessions, also without a speaker.

_PREFIX: Final = "cilium_bgp_control_plane"


def bgp_families(
    peers: Iterable[BGPPeer], observed: ReadTable[tuple[str, IPAddress], ObservedPeer]
) -> list[MetricFamily]:
    """Compute metrics of sessions and routes by ASN of the router and address and port of the peer."""
    states: dict[tuple[str, str], float] = {}
    received: dict[tuple[str, ...], float] = {}
    advertised: dict[tuple[str, ...], float] = {}
    crashes: dict[tuple[str, str], float] = {}
    for peer in peers:
        found = observed.get(peer.key)
        address = f"[{peer.address}]" if peer.address.version == 6 else str(peer.address)
        key = (str(peer.local_asn), f"{address}:{peer.remote_port}")
        states[key] = found is not None and found.state is PeerState.ESTABLISHED
        if found is not None and found.isolated_at is not None:
            crashes[key] = found.crashes
        for one in found.families if found is not None else ():
            received[*key, one.family.afi, one.family.safi] = one.received
            advertised[*key, one.family.afi, one.family.safi] = one.advertised
    labels, of_families = "vrouter neighbor", "vrouter neighbor afi safi"
    return [
        gauge(f"{_PREFIX}_session_state", "1: the session is established; 0: it is not.", states, labels),
        gauge(f"{_PREFIX}_advertised_routes", "Routes that a peer is sent.", advertised, of_families),
        gauge(f"{_PREFIX}_received_routes", "Routes that a peer sends.", received, of_families),
        gauge(
            "hive_bgp_isolated_peer_crashes",
            "Of peers with a gobgpd of their own: how often it has crashed lately.",
            crashes,
            labels,
        ),
    ]


def bgp_metrics(state: BGPState) -> Member[Collector]:
    """Collect the metrics of sessions."""

    async def collect() -> Iterable[MetricFamily]:
        return bgp_families(state.wanted.peers.all(), state.observed) if state.enabled else ()

    return Collector("bgp", collect)


cell = module(
    "bgp-presentation",
    "BGP in the API and in metrics",
    provide(bgp_part, bgp_metrics),
    provide_private(BGPOperations),
)
