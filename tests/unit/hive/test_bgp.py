"""``hive bgp``: output for recorded responses, on a terminal of 80 columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import hive
from tests.support.recordings import recorded
from tests.unit.hive.stub_agent import stub_agent

PEER = {
    "local-asn": 65001,
    "peer-asn": 65101,
    "peer-address": "10.99.0.101",
    "peer-port": 179,
    "session-state": "established",
    "uptime-nanoseconds": 3_725_000_000_000,
    "families": [{"afi": "ipv4", "safi": "unicast", "advertised": 2}],
}
OTHER = {**PEER, "peer-address": "fd00::1", "session-state": "active", "uptime-nanoseconds": 0}
OTHER["session-error"] = "sent NOTIFICATION: as number mismatch"
OTHER |= {"isolated-since": "2026-11-29T12:01:05Z", "speaker-crashes": 3}
ROUTES = "/v1/bgp/routes?"


def answers() -> dict[str, tuple[int, Any]]:
    """Those of a node with two routers; options are in the order in which the command gives them."""
    scenario, *_ = json.loads(recorded("bgp-operator/api-s17").read_text())
    found = {one["url"]: (one["status"], one["body"]) for one in scenario["queries"]}
    for table in ("loc-rib", "adj-rib-out", "adj-rib-in"):
        for afi in ("ipv4", "ipv6"):
            key = f"{ROUTES}afi={afi}&safi=unicast&table_type={table}"
            found[f"{ROUTES}table_type={table}&safi=unicast&afi={afi}"] = found.get(key, (200, []))
    return found


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hive.output.terminal_width", lambda: 80)


def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str, **more: Any) -> list[str]:
    place = tmp_path / str(len(list(tmp_path.iterdir())))
    place.mkdir()
    with stub_agent(place, answers() | {"/v1/bgp/peers": (200, [PEER, OTHER])} | more) as agent:
        result = hive(capsys, "bgp", *words, "-H", agent.socket)
    assert (result.code, result.err) == (0, "")
    return [" ".join(line.split()) for line in result.out.splitlines()]


def test_peers_lists_sessions_with_their_routes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(tmp_path, capsys, "peers") == [
        "ROUTER PEER PEER AS SESSION SINCE",
        "65001 10.99.0.101:179 65101 established 1h2m5s",
        "ipv4/unicast: 2 sent, 0 received",
        "65001 [fd00::1]:179 65101 active",
        "sent NOTIFICATION: as number mismatch",
        "its own gobgpd since 2026-11-29T12:01:05Z, crashed 3 times",
    ]


def test_routes_of_both_families_and_what_each_peer_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = shown(tmp_path, capsys, "routes")
    assert known[:3] == [
        "ROUTER PREFIX NEXT HOP SINCE",
        "65001 10.244.1.0/24 0.0.0.0 0s",
        "{Origin: i} {Nexthop: 0.0.0.0}",
    ]
    assert [line.split()[1] for line in known if line.startswith("6500")] == 2 * ["10.244.1.0/24"] + 2 * [
        "fd00:10:244:1::/64"
    ]
    sent = shown(tmp_path, capsys, "routes", "sent", "--family", "ipv4")
    assert sent[:3] == [
        "ROUTER PEER PREFIX NEXT HOP SINCE",
        "65001 10.99.0.101 10.244.1.0/24 10.99.0.1 0s",
        "{Origin: i} {AsPath: 65001} {Nexthop: 10.99.0.1} {Communities: 1:1}",
    ]


def test_route_policies_list_prefixes_and_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(tmp_path, capsys, "route-policies", "--router", "65001")
    assert found == [
        "ROUTER POLICY TYPE",
        "65001 allow-local import",
        "its own routes",
        "65001 peer-1-ipv4-PodCIDR export",
        "10.244.1.0/24 to 10.99.0.101; AddCommunities: [1:1]",
        "65001 peer-1-ipv6-PodCIDR export",
        "fd00:10:244:1::/64 to 10.99.0.101; AddCommunities: [1:1]",
    ]


@pytest.mark.parametrize(
    ("words", "answer", "code", "line"),
    [
        ("peers", (501, "BGP control plane is disabled"), 1, "BGP is off: expected enable-bgp-control-plane"),
        ("peers", (200, []), 0, "No sessions: no CiliumBGPNodeConfig of this node has peers."),
        ("routes --peer 10.0.0.1", (200, []), 2, "--peer: expected with sent or received"),
        ("routes sent --peer tor", (200, []), 2, "'tor': expected an IP address"),
        (
            "route-policies --router 7",
            (500, "failed to get route policies: virtual router with ASN 7 does not exist"),
            2,
            "hive: virtual router with ASN 7 does not exist: expected --router as in hive bgp peers (see: ",
        ),
        ("route-policies", (500, "failed to get route policies: no answer"), 1, "no answer"),
    ],
)
def test_a_missing_router_or_peer_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: str,
    answer: tuple[int, Any],
    code: int,
    line: str,
) -> None:
    policies = "/v1/bgp/route-policies"
    given = {"/v1/bgp/peers": answer, policies: answer, f"{policies}?router_asn=7": answer}
    with stub_agent(tmp_path, given) as agent:
        result = hive(capsys, "bgp", *words.split(), "-H", agent.socket)
    assert result.code == code
    assert line in result.err
    assert result.out == ""
