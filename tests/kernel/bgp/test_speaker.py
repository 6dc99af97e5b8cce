"""Routes and attributes that routers receive of a speaker; no session is reset without need."""

from __future__ import annotations

import os
import signal
from functools import partial
from ipaddress import ip_address, ip_network
from pathlib import Path

import msgspec

from cells.bgp import gobgp_messages as api
from cells.bgp.gobgp_facts import route
from cells.bgp.gobgpd import connected
from cells.bgp.speaker import BGPSpeakers
from cells.bgp.speaker_processes import end_speakers
from cells.bgp.speaker_state import (
    IPV4_UNICAST,
    IPV6_UNICAST,
    BGPPeer,
    ObservedPeer,
    PeerRestart,
    PeerState,
    RouteTable,
    SpeakerName,
)
from lifecycle import Secret
from lifecycle.testing import eventually
from tests.support.bgp import (
    BIRD,
    FRR,
    FRR6,
    INSTANCE,
    NODE,
    NODE6,
    PASSWORD,
    STRANGER,
    Routers,
    Wanted,
    agent,
    gobgpd_pids,
    peer,
    policy,
    routers,
)

PODS, PODS6, WEB, MAIL = "10.244.1.0/24", "fd00:10::/64", "10.96.0.10/32", "10.96.0.11/32"


ROWS = (
    peer(
        "tor",
        FRR,
        65101,
        password=Secret(PASSWORD),
        families=(IPV4_UNICAST,),
        graceful_restart=PeerRestart(enabled=True),
    ),
    peer("tor6", FRR6, 65101, families=(IPV6_UNICAST,)),
    peer("inner", BIRD, 65001, families=(IPV4_UNICAST,)),
    peer("stranger", STRANGER, 65102, password=Secret("wrong")),
    policy("tor-pods", FRR, PODS, communities=(65001 << 16 | 100,), large_communities=((65001, 1, 2),)),
    policy("tor-web", FRR, WEB),
    policy("tor6-pods", FRR6, PODS6),
    policy("inner-pods", BIRD, PODS, local_preference=150),
)


async def test_bgp_sessions_stay_established(in_node: None, tmp_path: Path) -> None:
    """One story of a node: its first dials take gobgpd 5 to 9 s, which the checks share."""
    wanted = Wanted()
    wanted.put(*ROWS)
    wanted.announce(PODS, WEB, PODS6)
    with routers(tmp_path) as far:
        try:
            async with agent(wanted, tmp_path) as speakers:
                await _first_routes(far, speakers)
                await _changes(far, speakers, wanted)
                await _interference(far, speakers, tmp_path)
                before = far.frr_updates()
            async with agent(wanted, tmp_path) as speakers:
                await eventually(lambda: speakers.reconciler.statistics.sweeps)
                assert far.frr_updates() == before, "a new agent sends nothing"
            pids = gobgpd_pids(tmp_path)
            wanted.withdraw(MAIL)
            wanted.announce(WEB)
            async with agent(wanted, tmp_path) as speakers:
                await eventually(lambda: set(far.frr_routes()) == {PODS, WEB})
                assert far.frr_sessions() == ("Established", 1)
                assert gobgpd_pids(tmp_path) == pids
                await _death(far, speakers, tmp_path)
                with wanted.peers.txn() as rows:
                    rows.delete((INSTANCE, ip_address(FRR)))
                await eventually(lambda: not far.frr_routes(), within=10)
                assert far.frr_routes("ipv6"), "the other session goes on"
                with wanted.instances.txn() as instances:
                    instances.delete(INSTANCE)
                await eventually(lambda: not gobgpd_pids(tmp_path))
                await eventually(lambda: not far.frr_routes("ipv6"), within=10)
                await eventually(lambda: not speakers.observed.all())
        finally:
            end_speakers(tmp_path)


async def _first_routes(far: Routers, speakers: BGPSpeakers) -> None:
    await eventually(lambda: set(far.frr_routes()) == {PODS, WEB})
    pods, web = far.frr_routes()[PODS], far.frr_routes()[WEB]
    assert (pods["aspath"]["string"], pods["origin"], pods["nexthops"][0]["ip"]) == ("65001", "IGP", NODE)
    assert pods["community"]["string"] == "65001:100"
    assert pods["largeCommunity"]["string"] == "65001:1:2"
    assert "community" not in web
    await eventually(lambda: set(far.frr_routes("ipv6")) == {PODS6})
    assert far.frr_routes("ipv6")[PODS6]["nexthops"][0]["ip"] == NODE6
    await eventually(lambda: PODS in far.bird_routes())
    assert WEB not in far.bird_routes(), "its policy has the pods alone"
    assert "BGP.local_pref: 150" in far.bird_routes()

    def seen(address: str) -> ObservedPeer:
        found = speakers.observed.get((INSTANCE, ip_address(address)))
        assert found is not None
        return found

    for address in (FRR, FRR6, BIRD):
        await eventually(partial(lambda one: seen(one).state is PeerState.ESTABLISHED, address))
    tor = seen(FRR)
    assert (tor.state, tor.hold_time, tor.keepalive, tor.sessions) == (PeerState.ESTABLISHED, 9, 3, 1)
    assert (tor.asn, tor.local_asn, tor.router_id, tor.remote_port) == (65101, 65001, FRR, 179)
    assert tor.established_at is not None
    assert {"graceful-restart", "4-octet-as", "multiprotocol"} <= set(tor.capabilities)
    await eventually(lambda: seen(FRR).families[0].accepted == 1, within=10)
    (sent,) = [
        one
        for one in await speakers.listed_routes(
            INSTANCE, RouteTable.ADJ_RIB_OUT, IPV4_UNICAST, ip_address(FRR)
        )
        if str(one.prefix) == PODS
    ]
    assert sent.nlri == b"\x18\x0a\xf4\x01"
    assert b"\xc0\x08\x04" + bytes((0xFD, 0xE9, 0, 100)) in sent.attributes, "with what policies add"
    assert seen(STRANGER).state is not PeerState.ESTABLISHED, "it has another password"
    assert seen(STRANGER).established_at is None


async def _changes(far: Routers, speakers: BGPSpeakers, wanted: Wanted) -> None:
    """Routes, policies and what does not concern a session change, and the session stays."""
    wanted.put(policy("tor-mail", FRR, MAIL))
    wanted.announce(MAIL)
    await eventually(lambda: set(far.frr_routes()) == {PODS, WEB, MAIL})
    wanted.put(policy("tor-pods", FRR, PODS, communities=(65001 << 16 | 200,)))
    await eventually(lambda: far.frr_routes()[PODS]["community"]["string"] == "65001:200")
    assert "largeCommunity" not in far.frr_routes()[PODS]
    wanted.withdraw(WEB)
    with wanted.policies.txn() as rows:
        rows.delete((INSTANCE, "inner-pods"))
    tor = ROWS[0]
    assert isinstance(tor, BGPPeer)
    wanted.put(msgspec.structs.replace(tor, timers=msgspec.structs.replace(tor.timers, connect_retry=2)))
    await eventually(lambda: set(far.frr_routes()) == {PODS, MAIL})
    await eventually(lambda: PODS not in far.bird_routes())
    await speakers.reconciler.wait_realised(SpeakerName(INSTANCE))
    assert far.frr_sessions() == ("Established", 1)
    assert far.frr_sessions(NODE6) == ("Established", 1)


async def _interference(far: Routers, speakers: BGPSpeakers, folder: Path) -> None:
    """What others do to gobgpd heals at the next sweep, and a peer that they remove at once."""
    socket = next((folder / "bgp").glob("*.sock"))
    async with connected(socket) as gobgp:
        await gobgp.assign(api.AssignmentDirection.EXPORT, [])
        await gobgp.put_routes([route(ip_network(MAIL), withdrawn=True), route(ip_network("203.0.113.0/24"))])
        await gobgp.add_policy(api.ApiPolicy(name="foreign"))
    await eventually(lambda: MAIL not in far.frr_routes())
    speakers.reconciler.trigger()
    await eventually(lambda: set(far.frr_routes()) == {PODS, MAIL})
    async with connected(socket) as gobgp:
        assert {one.prefix for one in await gobgp.routes(api.TableType.GLOBAL, 1)} == {PODS, MAIL}
        assert "foreign" not in {one.name for one in await gobgp.policies()}
        await gobgp.delete_peer(BIRD)
    assert far.frr_sessions() == ("Established", 1)

    await eventually(lambda: speakers.observed.get((INSTANCE, ip_address(BIRD))) is None)
    await eventually(lambda: speakers.observed.get((INSTANCE, ip_address(BIRD))) is not None)


async def _death(far: Routers, speakers: BGPSpeakers, folder: Path) -> None:
    """kill -9: the router keeps all routes until gobgpd is back with them."""
    before = gobgpd_pids(folder)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    stale, lost = False, set[str]()

    def back() -> bool:
        nonlocal stale
        routes = far.frr_routes()
        lost.update({PODS, WEB} - routes.keys())
        stale = stale or any(one.get("stale") for one in routes.values())
        return far.frr_sessions() == ("Established", 2) and not any(
            one.get("stale") for one in routes.values()
        )

    await eventually(back)
    await eventually(lambda: PODS6 in far.frr_routes("ipv6"))
    assert not lost, "nothing is withdrawn"
    assert stale, "it was without a session in between"
    assert gobgpd_pids(folder) != before
    assert speakers.reconciler.failing == 0
