"""Plans of BGP instances, compared with recordings of Cilium, and for input in any order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.bgp.controller import InstancePlan
from cells.bgp.rest import node_status
from cells.bgp.speaker_state import (
    AfiSafi,
    BGPPeer,
    FamilyCounts,
    ObservedPeer,
    PeerState,
    PolicyStatement,
    RoutePolicy,
)
from tests.support.examples import scaled
from tests.unit.bgp.replay import Json, Played, community, played, received, scenarios, stepped

NO_DOWNGRADE: Final = "a peer with authSecretRef has no session without its password; in Cilium it has"
ALONE: Final = "a peer without a session has no policies; in Cilium it may keep older ones"
DIFFERENT: Final[dict[tuple[str, int], str]] = {
    ("auth-secret-appears-later", 0): NO_DOWNGRADE,
    ("auth-secret-deleted", 1): NO_DOWNGRADE,
    ("auth-secret-other-namespace-ignored", 0): NO_DOWNGRADE,
    ("auth-secret-without-password-key", 0): ALONE,
    ("auth-secrets-namespace-not-set", 0): ALONE,
    ("peer-without-asn", 0): "the other peer has its session; in Cilium it has none",
    (
        "podcidr-two-adverts-overlap-nondeterministic",
        0,
    ): "both are announced, as with services; Cilium announces the last one",
    ("random-32", 5): "the recorded peer keeps a route that no recorded policy allows",
}
"""Steps with results of neither version of Cilium, and the reason."""


def played_sessions(scenario: Json, plans: Mapping[str, InstancePlan]) -> list[Json]:
    """Sessions and received routes of each remote speaker."""
    found = []
    for remote in scenario["remotes"]:
        one: Json = {"addr": remote["addr"], "session": "down", "routes": []}
        for plan in plans.values():
            for peer in plan.peers:
                if agrees(remote, peer):
                    one |= {"session": "established", "routes": received(plan, peer)}
        found.append(one)
    return found


def agrees(remote: Json, peer: BGPPeer) -> bool:
    password = peer.password.reveal() if peer.password is not None else ""
    wanted = (remote["addr"], remote["asn"], remote["neighborASN"], remote.get("password", ""))
    given = (str(peer.address), peer.asn, peer.local_asn, password)
    local = peer.local_address is None or str(peer.local_address) == remote["neighbor"]
    return wanted == given and peer.remote_port == remote.get("port", 179) and local


def recorded_sessions(out: Json) -> list[Json]:
    found = []
    for one in out["receivedByPeers"] or ():
        routes = [
            {key: sorted(value) if isinstance(value, list) else value for key, value in route.items()}
            | {"nextHop": ""}
            for route in one["routes"] or ()
        ]
        for route in routes:
            del route["nextHop"]  # the speaker puts it there
        routes.sort(key=lambda route: str(route["prefix"]))
        found.append({"addr": one["addr"], "session": one["session"], "routes": routes})
    return found


def our_policies(plans: Mapping[str, InstancePlan]) -> list[Any]:
    return sorted((one.name, [_statement(each) for each in one.statements]) for one in _policies(plans))


def _policies(plans: Mapping[str, InstancePlan]) -> list[RoutePolicy]:
    return [one for plan in plans.values() for one in plan.policies]


def _statement(one: PolicyStatement) -> Any:
    return (
        [str(neighbor) for neighbor in one.neighbors],
        [(str(each.cidr), each.min_length, each.max_length) for each in one.prefixes],
        sorted(map(community, one.communities)),
        sorted(":".join(map(str, each)) for each in one.large_communities),
        -1 if one.local_preference is None else one.local_preference,
    )


def recorded_policies(out: Json) -> list[Any]:
    return sorted(
        (
            policy["name"],
            [
                (
                    [text.partition("/")[0] for text in one["match-neighbors"] or ()],
                    [
                        (each["cidr"], each["prefix-len-min"], each["prefix-len-max"])
                        for each in one["match-prefixes"]
                    ],
                    sorted(one["add-communities"] or ()),
                    sorted(one["add-large-communities"] or ()),
                    one["set-local-preference"],
                )
                for one in policy["statements"]
            ],
        )
        for policy in out["api"]["route-policies"] or ()
    )


def our_instances(plans: Mapping[str, InstancePlan]) -> list[Any]:
    """Format planned instances as gobgp lists its configuration."""
    found = []
    for plan in plans.values():
        if (one := plan.instance) is not None:
            peers = sorted((_peer(each) for each in plan.peers), key=str)
            found.append((one.name, one.local_asn, str(one.router_id), one.listen_port, peers))
    return sorted(found)


def _peer(peer: BGPPeer) -> Json:
    restart = peer.graceful_restart
    return {
        "peer": (str(peer.address), peer.asn, peer.local_asn),
        "password": peer.password.reveal() if peer.password is not None else "",
        "timers": (peer.timers.connect_retry, peer.timers.hold, peer.timers.keepalive),
        "port": peer.remote_port,
        "multihop": peer.multihop_ttl if peer.external and peer.multihop_ttl > 1 else 0,
        "restart": restart.restart_time if restart.enabled else 0,
        "families": [f"{one.afi} {one.safi}" for one in peer.families],
    }


_AFI: Final = {
    "AFI_IP": "ipv4",
    "AFI_IP6": "ipv6",
    "AFI_L2VPN": "l2vpn",
    "AFI_LS": "ls",
    "AFI_OPAQUE": "opaque",
}


def _family(recorded: Json) -> str:
    """Format a family of gobgp's API by the names of Cilium's resources."""
    safi = recorded["safi"].removeprefix("SAFI_").lower()
    return f"{_AFI[recorded['afi']]} {safi.replace('flow_spec', 'flowspec')}"


def recorded_instances(out: Json) -> list[Any]:
    found = []
    for one in out["instances"] or ():
        peers = []
        for peer in one["gobgpPeers"] or ():
            conf, timers = peer["conf"], peer["timers"]["config"]
            families = [each["config"]["family"] for each in peer["afiSafis"]]
            peers.append(
                {
                    "peer": (conf["neighborAddress"], conf["peerAsn"], conf["localAsn"]),
                    "password": conf.get("authPassword", ""),
                    "timers": tuple(
                        int(timers[key]) for key in ("connectRetry", "holdTime", "keepaliveInterval")
                    ),
                    "port": peer["transport"]["remotePort"],
                    "multihop": peer.get("ebgpMultihop", {}).get("multihopTtl", 0),
                    "restart": peer.get("gracefulRestart", {}).get("restartTime", 0),
                    "families": list(map(_family, families)),
                }
            )
        found.append((one["name"], one["asn"], one["routerID"], one["listenPort"], sorted(peers, key=str)))
    return sorted(found)


def compared(scenario: Json, out: Json, plans: Mapping[str, InstancePlan]) -> list[str]:
    """Describe the differences to a recorded result."""
    pairs = {
        "routes": (played_sessions(scenario, plans), recorded_sessions(out)),
        "policies": (our_policies(plans), recorded_policies(out)),
        "instances": (our_instances(plans), recorded_instances(out)),
    }
    return [
        f"{what}: {ours} where Cilium has {theirs}"
        for what, (ours, theirs) in pairs.items()
        if ours != theirs
    ]


def test_every_recorded_agent_has_the_same_sessions_policies_and_routes() -> None:
    """Each step has the result of 1.17, or of the later version where that fixes a fault of 1.17."""
    later = scenarios("s19")
    found: dict[tuple[str, int], list[str]] = {}
    for name, scenario in scenarios("s17").items():
        short = name.removeprefix("agent/")
        if short.startswith("v1-"):  # refused: see test_policies_of_the_first_version_are_refused
            continue
        for number, (step, plans) in enumerate(played(scenario)):
            differences = compared(scenario, step["out"], plans)
            if differences and compared(scenario, later[name]["steps"][number]["out"], plans):
                found[short, number] = differences
    assert {key: found[key] for key in found.keys() - DIFFERENT.keys()} == {}
    assert DIFFERENT.keys() <= found.keys(), "these are as Cilium's now"


def observed_in(out: Json, plans: Mapping[str, InstancePlan]) -> list[ObservedPeer]:
    """Convert recorded sessions to rows as speakers report them."""
    listed = {one["peer-address"]: one for one in out["api"]["peers"] or ()}
    return [
        ObservedPeer(
            peer.instance,
            peer.address,
            peer.asn,
            peer.local_asn,
            peer.remote_port,
            PeerState(one["session-state"]),
            datetime(2026, 11, 1, tzinfo=UTC) if one["session-state"] == "established" else None,
            one.get("applied-hold-time-seconds", 0),
            one.get("applied-keep-alive-time-seconds", 0),
            tuple(
                FamilyCounts(
                    AfiSafi(each["afi"], each["safi"]), each.get("received", 0), 0, each.get("advertised", 0)
                )
                for each in one["families"]
            ),
        )
        for plan in plans.values()
        for peer in plan.peers
        if (one := listed.get(str(peer.address))) is not None
    ]


STATUS_DIFFERENT: Final = {
    ("peer-added-removed", 2): "recorded before the status was written: it is that of the step before",
    ("podcidr-invalid-standard-community", 0): "the instance runs, and so it is reported",
}


def status_of(recorded: Json | None) -> Json:
    """Return a status without conditions of later versions, with families sorted."""
    found: Json = {key: value for key, value in (recorded or {}).items() if key != "conditions"}
    for instance in found.get("bgpInstances") or ():
        for peer in instance.get("peers") or ():
            peer.get("routeCount", []).sort(key=lambda one: str(one["afi"]))
    return found


def test_the_status_of_the_node_is_as_recorded() -> None:
    found: dict[tuple[str, int], Any] = {}
    for name, scenario in scenarios("s17").items():
        short = name.removeprefix("agent/")
        if short.startswith("v1-"):
            continue
        for number, (step, node) in enumerate(stepped(scenario)):
            plans, config = node.plans(), node.config()
            if (short, number) in DIFFERENT or config is None:
                continue
            status = node_status(config, plans.values(), observed_in(step["out"], plans))
            text = msgspec.json.encode(status).replace(b"2026-11-01T00:00:00Z", b"TIME")
            ours = status_of(json.loads(text))
            outcomes = step["out"], scenarios("s19")[name]["steps"][number]["out"]
            recorded = [status_of(each["nodeConfigStatus"]) for each in outcomes]
            if ours not in recorded:
                found[short, number] = (ours, recorded[0])
    assert {key: found[key] for key in found.keys() - STATUS_DIFFERENT.keys()} == {}
    assert STATUS_DIFFERENT.keys() <= found.keys(), "these are as Cilium's now"


def last_of(name: str) -> dict[str, InstancePlan]:
    """Return the plans after the last step of a recording."""
    *_, (_, plans) = played(scenarios("s17")[f"agent/{name}"])
    return plans


def faults_of(name: str) -> list[str]:
    return [f"{one.subject}: {one.error}" for plan in last_of(name).values() for one in plan.faults]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (
            "auth-secret-deleted",
            "peer peer-1: no session: authSecretRef=bgp-pw: Secret kube-system/bgp-pw is missing",
        ),
        (
            "auth-secret-without-password-key",
            "Secret kube-system/bgp-pw has no key password, or an empty one",
        ),
        ("auth-secrets-namespace-not-set", "expected bgp-secrets-namespace to be set"),
        ("peer-one-missing-config-other-works", "no session: CiliumBGPPeerConfig nope is missing"),
        (
            "peer-timers-partly-given",
            "keepAliveTimeSeconds=30, holdTimeSeconds=12: the session may end again",
        ),
        ("svc-no-service-options", "Service is not announced: service.addresses is missing"),
        ("instance-annotation-invalid", "router-id=foo: expected an IPv4 address"),
    ],
)
def test_an_invalid_bgp_resource_is_reported_separately(name: str, fault: str) -> None:
    (found,) = faults_of(name)
    assert fault in found


def test_a_peer_without_an_asn_and_an_invalid_community_leave_the_others_alone() -> None:
    plan = next(played(scenarios("s17")["agent/peer-without-asn"]))[1]["inst-65001"]
    assert [peer.name for peer in plan.peers] == ["peer-1"]
    (fault,) = plan.faults
    assert (fault.subject, fault.error) == (
        "peer noasn",
        "no session: peerASN is missing: expected 1 to 4294967295, or 0 for any",
    )
    first = next(played(scenarios("s17")["agent/podcidr-invalid-standard-community"]))[1]
    assert [peer.name for peer in first["inst-65001"].peers] == ["peer-1"]
    assert not first["inst-65001"].paths
    (fault,) = first[""].faults
    assert fault.subject == "CiliumBGPAdvertisement/adv"
    assert "community 70000:1: expected decimal numbers up to 65535" in fault.error


def test_a_peer_with_asn_0_may_have_any() -> None:
    node = Played({})
    peer = {"name": "p", "peerAddress": "192.0.2.1", "peerASN": 0}
    instance = {"name": "i", "localASN": 65001, "routerID": "192.0.2.9", "peers": [peer]}
    node.apply({"kind": "CiliumNode", "metadata": {"name": "node-1"}, "spec": {}})
    spec = {"bgpInstances": [instance]}
    node.apply({"kind": "CiliumBGPNodeConfig", "metadata": {"name": "node-1"}, "spec": spec})
    config, plans = node.config(), node.plans()
    assert [(one.asn, one.external) for one in plans["i"].peers] == [(0, True)]
    assert not plans["i"].faults
    assert config is not None
    (status,) = node_status(config, plans.values(), ()).bgp_instances or ()
    assert [one.peer_asn for one in status.peers or ()] == [0]


@pytest.mark.parametrize(("sort", "announced"), [("ClusterIP", True), ("ExternalName", False)])
def test_external_addresses_of_an_external_name_are_not_announced(sort: str, announced: bool) -> None:
    """As in later versions, because no node has frontends for them."""
    node = Played({})
    metadata = {"name": "s", "namespace": "default"}
    service = {"type": sort, "externalName": "example.org", "externalIPs": ["198.51.100.7"]}
    node.apply({"kind": "Service", "metadata": metadata, "spec": service})
    config = {"families": [{"afi": "ipv4", "safi": "unicast", "advertisements": {}}]}
    peer = {"name": "p", "peerAddress": "192.0.2.1", "peerASN": 65000, "peerConfigRef": {"name": "pc"}}
    instance = {"name": "i", "localASN": 65001, "routerID": "192.0.2.9", "peers": [peer]}
    external = {"advertisementType": "Service", "service": {"addresses": ["ExternalIP"]}, "selector": {}}
    for kind, name, spec in (
        ("CiliumNode", "node-1", {}),
        ("CiliumBGPNodeConfig", "node-1", {"bgpInstances": [instance]}),
        ("CiliumBGPPeerConfig", "pc", config),
        ("CiliumBGPAdvertisement", "a", {"advertisements": [external]}),
    ):
        node.apply({"kind": kind, "metadata": {"name": name}, "spec": spec})
    assert [str(one.prefix) for one in node.plans()["i"].paths] == ["198.51.100.7/32"] * announced


@pytest.mark.parametrize(
    "label", [{"service.kubernetes.io/service-proxy-name": "other"}, {"service.kubernetes.io/headless": ""}]
)
def test_services_of_another_proxy_are_not_announced(label: dict[str, str]) -> None:
    node = Played({})
    spec = {"clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9"]}
    for name, labels in (("ours", {}), ("theirs", label)):
        metadata = {"name": name, "namespace": "default", "labels": labels}
        node.apply({"kind": "Service", "metadata": metadata, "spec": spec})
    node.apply({"kind": "CiliumNode", "metadata": {"name": "node-1"}, "spec": {}})
    facts = node.facts()
    assert facts is not None
    assert [one.key for one in facts.services] == [("default", "ours")]


def test_policies_of_the_first_version_are_refused() -> None:
    refused = 0
    for name, scenario in scenarios("s17").items():
        if name.startswith("agent/v1-"):
            for step, plans in played(scenario):
                if step["out"]["mode"] == "bgpv1":
                    refused += 1
                    faults = plans[""].faults if "" in plans else ()
                    assert any("a CiliumBGPClusterConfig instead" in one.error for one in faults), name
    assert refused


RICH: Final = (
    "random-10",
    "random-36",
    "svc-many",
    "pool-dual-stack",
    "auth-secret-rotated",
    "peer-added-removed",
)


@settings(max_examples=scaled(60), deadline=None)
@given(st.data())
def test_any_order_of_objects_gives_the_same(data: st.DataObject) -> None:
    """Objects in any order, with earlier versions, foreign objects and deletions in between."""
    scenario = scenarios("s17")[f"agent/{data.draw(st.sampled_from(RICH))}"]
    versions: dict[tuple[str, str, str], list[Json]] = {}
    for step in scenario["steps"]:
        for body in step["in"].get("apply") or ():
            metadata = body["metadata"]
            versions.setdefault((body["kind"], metadata.get("namespace", ""), metadata["name"]), []).append(
                body
            )
    events = [(body, False) for bodies in versions.values() for body in bodies[:-1]]
    events += [(bodies[-1], True) for bodies in versions.values()]
    vanished = {
        key
        for key in versions
        if key[0] in {"Service", "CiliumBGPAdvertisement"} and data.draw(st.booleans())
    }
    expected, found = Played(scenario["options"]), Played(scenario["options"])
    for key, bodies in versions.items():
        if key not in vanished:
            expected.apply(bodies[-1])
    last: set[tuple[str, str, str]] = set()
    for body, final in data.draw(st.permutations(events)):
        key = (body["kind"], body["metadata"].get("namespace", ""), body["metadata"]["name"])
        if key not in last:
            found.apply(body)
            found.plans()
        if final:
            last.add(key)
            if key in vanished:
                found.delete(key[0], key[2], key[1])
    assert found.plans() == expected.plans()


WORDS: Final = st.sampled_from(
    ["", "1", "65000:1", "9" * 5000, "-1", "::1", "192.0.2.1", "fe80::1%eth0", "no-export"]
)
NUMBERS: Final = st.sampled_from([-1, 0, 1, 3, 179, 65535, 65536, 2**31, 2**32 - 1, 2**32, 2**63])


@settings(max_examples=scaled(200), deadline=None)
@given(st.data())
def test_nonsense_is_a_fault_and_nothing_worse(data: st.DataObject) -> None:
    """Objects from files, or of an older schema, have values that were never validated."""

    def word() -> str:
        return data.draw(WORDS)

    def number() -> int:
        return data.draw(NUMBERS)

    node = Played({})
    peer = {"name": "p", "peerAddress": word(), "peerASN": number(), "localAddress": word()}
    peer["peerConfigRef"] = {"name": "pc"}
    instance = {"name": "i", "localASN": number(), "localPort": number(), "routerID": word(), "peers": [peer]}
    annotation = {f"cilium.io/bgp-virtual-router.{word()}": f"local-port={word()},router-id={word()}"}
    family = {"afi": data.draw(st.sampled_from(["ipv4", word()])), "safi": "unicast", "advertisements": {}}
    timers = {f"{key}TimeSeconds": number() for key in ("hold", "keepAlive", "connectRetry")}
    config = {
        "timers": timers,
        "transport": {"localPort": number(), "peerPort": number()},
        "ebgpMultihop": number(),
        "gracefulRestart": {"enabled": True, "restartTimeSeconds": number()},
        "families": [family],
    }
    communities = {"standard": [word()], "large": [word()], "wellKnown": [word()]}
    attributes = {"communities": communities, "localPreference": number()}
    advertisement = {"advertisementType": "PodCIDR", "attributes": attributes}
    addresses = [{"type": "InternalIP", "ip": "192.0.2.9"}]
    spec = {"addresses": addresses, "ipam": {"podCIDRs": ["10.1.0.0/24"]}}
    for kind, name, each in (
        ("CiliumNode", "node-1", spec),
        ("CiliumBGPNodeConfig", "node-1", {"bgpInstances": [instance]}),
        ("CiliumBGPPeerConfig", "pc", config),
        ("CiliumBGPAdvertisement", "a", {"advertisements": [advertisement]}),
    ):
        node.apply({"kind": kind, "metadata": {"name": name, "annotations": annotation}, "spec": each})
    found = node.plans()
    assert found["i"].faults or found["i"].peers
    for plan in found.values():
        for one in plan.peers:
            assert 0 <= one.asn < 2**32
            assert 3 <= one.timers.hold <= 65535
        for policy in plan.policies:
            for statement in policy.statements:
                assert all(0 <= value < 2**32 for value in statement.communities)
                assert statement.local_preference is None or 0 < statement.local_preference < 2**32
