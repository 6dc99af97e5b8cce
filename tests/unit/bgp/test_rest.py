"""The REST API and metrics of BGP: parameters, answers and metrics, compared with recordings of Cilium."""

from __future__ import annotations

import json
import socket
from base64 import b64decode
from collections import Counter
from datetime import UTC, datetime
from functools import partial
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

import pytest

from cells.api.wire import FrameworkError, framework_response
from cells.base.addresses import IPAddress
from cells.bgp.rest import BGPOperations, BGPState, bgp_families
from cells.bgp.speaker_state import (
    AfiSafi,
    BGPInstance,
    BGPPeer,
    FamilyCounts,
    ListedRoute,
    ObservedPeer,
    PeerState,
    PolicyDirection,
    PolicyStatement,
    PrefixMatch,
    RoutePolicy,
    RouteTable,
    WantedSpeakers,
    instance_table,
    observed_peers,
    path_table,
    peer_table,
    policy_table,
)
from lifecycle import HiveError, Secret
from lifecycle.http import Request
from tests.support.counts import Count
from tests.support.recordings import recorded

pytestmark = pytest.mark.anyio
Json = Any
SINCE = datetime(2026, 1, 1, tzinfo=UTC)


def asked(url: str) -> Request:
    with socket.socket(socket.AF_UNIX) as peer:
        return Request("GET", url, {}, b"", peer)


class Speaker:
    """Lists the recorded routes."""

    def __init__(self) -> None:
        self.routes: dict[tuple[str, RouteTable, AfiSafi, IPAddress | None], list[ListedRoute]] = {}
        self.fault: HiveError | None = None

    async def listed_routes(
        self, instance: str, table: RouteTable, family: AfiSafi, peer: IPAddress | None = None
    ) -> list[ListedRoute]:
        if self.fault is not None:
            raise self.fault
        return self.routes.get((instance, table, family, peer), [])


class Node:
    """A node in the state of some recorded answers."""

    def __init__(self, enabled: bool = True) -> None:
        self.speaker = Speaker()
        self.instances, self.peers = instance_table(), peer_table()
        self.policies, self.observed = policy_table(), observed_peers()
        wanted = WantedSpeakers(self.instances, self.peers, self.policies, path_table())
        self.state = BGPState(enabled, wanted, self.observed, self.speaker)
        operations = BGPOperations(self.state)
        self._operations = {one.path: one.operation for one in operations.routes()}

    async def ask(self, url: str) -> tuple[int, Json]:
        try:
            response = await self._operations[urlsplit(url).path](asked(url))
        except FrameworkError as error:
            response = framework_response(error.status, error.code, error.message)
        assert isinstance(response.body, bytes)
        return response.status, json.loads(response.body)

    def show(self, answers: dict[str, Json]) -> None:
        """Set the state of these answers."""
        policies, peers = answers["/v1/bgp/route-policies"], answers["/v1/bgp/peers"]
        with (
            self.instances.txn() as instances,
            self.peers.txn() as wanted,
            self.policies.txn() as rows,
            self.observed.txn() as observed,
        ):
            for asn in {one["router-asn"] for one in policies}:
                instances.put(BGPInstance(f"as-{asn}", asn, IPv4Address("192.0.2.1")))
            for one in peers:
                wanted.put(a_peer(one))
                observed.put(an_observation(one))
            for one in policies:
                rows.put(a_policy(one))
        for url, body in answers.items():
            if url.startswith("/v1/bgp/routes"):
                self._list(url, body)

    def _list(self, url: str, body: Json) -> None:
        query = asked(url).query
        if query.keys() != {"table_type", "afi", "safi"} or not isinstance(body, list):
            return
        family = AfiSafi(query["afi"], query["safi"])
        for one in body:
            peer = ip_address(one["neighbor"]) if "neighbor" in one else None
            key = (f"as-{one['router-asn']}", RouteTable(query["table_type"]), family, peer)
            found = self.speaker.routes.setdefault(key, [])
            found += [a_route(one["prefix"], path) for path in one["paths"]]


def a_peer(one: Json) -> BGPPeer:
    families = tuple(AfiSafi(each["afi"], each["safi"]) for each in reversed(one["families"]))
    name, asn = one["peer-address"], one["local-asn"]
    return BGPPeer(f"as-{asn}", name, ip_address(name), one["peer-asn"], asn, families=families)


def an_observation(one: Json) -> ObservedPeer:
    return ObservedPeer(
        f"as-{one['local-asn']}",
        ip_address(one["peer-address"]),
        one["peer-asn"],
        one["local-asn"],
        one["peer-port"],
        PeerState(one["session-state"]),
        SINCE,
        one["applied-hold-time-seconds"],
        one["applied-keep-alive-time-seconds"],
        tuple(
            FamilyCounts(AfiSafi(each["afi"], each["safi"]), advertised=each.get("advertised", 0))
            for each in one["families"]
        ),
    )


def a_policy(one: Json) -> RoutePolicy:
    statements = tuple(
        PolicyStatement(
            tuple(ip_address(each.partition("/")[0]) for each in statement["match-neighbors"] or ()),
            tuple(
                PrefixMatch(ip_network(each["cidr"]), each["prefix-len-min"], each["prefix-len-max"])
                for each in statement["match-prefixes"]
            ),
            communities=tuple(
                (int(high) << 16) + int(low)
                for high, _, low in (each.partition(":") for each in statement["add-communities"] or ())
            ),
        )
        for statement in one["statements"]
    )
    return RoutePolicy(f"as-{one['router-asn']}", one["name"], PolicyDirection(one["type"]), statements)


def a_route(prefix: str, path: Json) -> ListedRoute:
    return ListedRoute(
        ip_network(prefix),
        b64decode(path["nlri"]["base64"]),
        tuple(b64decode(each["base64"]) for each in path["path-attributes"]),
        SINCE,
        path.get("best", False),
        path.get("stale", False),
    )


def timeless(body: Json) -> Json:
    """Replace ages and uptimes by the recorded ones."""
    if isinstance(body, dict):
        times = {"age-nanoseconds", "uptime-nanoseconds"}
        return {key: 0 if key in times else timeless(value) for key, value in body.items()}
    return [timeless(one) for one in body] if isinstance(body, list) else body


def unordered(body: Json) -> Json:
    """Sort lists that have a random order in recordings, as the recorded client used maps."""
    return sorted(body, key=partial(json.dumps, sort_keys=True)) if isinstance(body, list) else body


async def test_every_recorded_query_is_answered_as_recorded(count: Count) -> None:
    outcomes: Counter[str] = Counter()
    for scenario in json.loads(recorded("bgp-operator/api-s17").read_text()):
        node = Node()
        node.show({one["url"]: one["body"] for one in scenario["queries"]})
        for query in scenario["queries"]:
            status, body = await node.ask(query["url"])
            wanted = query["status"], unordered(query["body"])
            assert (status, unordered(timeless(body))) == wanted, f"{scenario['name']}: {query['url']}"
            outcomes["answered as recorded"] += 1
        found = {
            (family.name, *zip(family.labels, labels, strict=True)): value
            for family in bgp_families(node.peers.all(), node.observed)
            for labels, value in family.series.items()
        }
        samples = {
            (one["name"], *((key, one["labels"][key]) for key in ORDER if key in one["labels"])): one.get(
                "value", 0
            )
            for one in scenario["metrics"] or ()
        }
        assert found == samples, scenario["name"]
    count("queries of BGP", outcomes)


ORDER = ("vrouter", "neighbor", "afi", "safi")


async def test_bgp_queries_without_bgp_or_instances_return_errors() -> None:
    routes = "/v1/bgp/routes?table_type=loc-rib&afi=ipv4&safi=unicast"
    for url in ("/v1/bgp/peers", routes, "/v1/bgp/route-policies"):
        assert await Node(enabled=False).ask(url) == (501, "BGP control plane is disabled")
        assert await Node().ask(url) == (200, [])
    assert await Node().ask(f"{routes}&router_asn=64999") == (200, [])
    assert list(bgp_families((), Node().observed)[0].series) == []


async def test_a_peer_without_a_speaker_is_shown_as_it_is_wanted() -> None:
    node = Node()
    with node.peers.txn() as peers:
        password = Secret("of the peer")
        peers.put(BGPPeer("a", "tor", ip_address("fd00::1"), 65001, 65000, password=password, multihop_ttl=4))
    status, (found,) = await node.ask("/v1/bgp/peers")
    assert (status, found["session-state"], found["ebgp-multihop-ttl"]) == (200, "unknown", 4)
    assert found["tcp-password-enabled"] is True
    assert "of the peer" not in json.dumps(found)
    state, *_ = bgp_families(node.peers.all(), node.observed)
    assert state.series == {("65000", "[fd00::1]:179"): 0}


async def test_a_speaker_that_does_not_answer_is_an_error_that_names_it() -> None:
    node = Node()
    with node.instances.txn() as instances:
        instances.put(BGPInstance("a", 65000, IPv4Address("192.0.2.1")))
    node.speaker.fault = HiveError("gobgpd at /run/a.sock: ListPath: no answer")
    found = await node.ask("/v1/bgp/routes?table_type=loc-rib&afi=ipv4&safi=unicast")
    assert found == (500, "failed to get routes: gobgpd at /run/a.sock: ListPath: no answer")
