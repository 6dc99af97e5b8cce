"""Tables of ``cilium-dbg`` with values that are absent, unknown or not sorted."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conformance.replayed_agent import shown


def test_endpoints_without_a_status_are_unknown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = {"id": 5, "labels": ["reserved:init"]}
    endpoints = [
        {"id": 4, "status": {"identity": {"id": 9}, "networking": {"addressing": []}, "state": "ready"}},
        {"id": 3},
        {
            "id": 7,
            "status": {
                "identity": identity,
                "labels": {"security-relevant": ["k8s:b", "k8s:a"]},
                "networking": {"addressing": [{"ipv6": "fd00::7"}]},
                "policy": {"realized": {"policy-enabled": "none"}},
                "state": "regenerating",
            },
        },
    ]
    answers = {"GET endpoint": endpoints}
    _, lines, _ = shown("endpoint list --no-headers", answers, tmp_path, capfd, monkeypatch)
    unknown, no_labels = ["Unknown", "Unknown"], ["no", "labels"]
    assert lines == [
        ["3", *unknown, "<no", "label", "id>", *no_labels, *unknown, "Unknown"],
        ["4", *unknown, "9", *no_labels, "No", "address", "No", "address", "ready"],
        ["7", "Disabled", "Disabled", "5", "k8s:a", "fd00::7", "regenerating"],
        ["k8s:b"],
    ]


def test_labels_of_identities_are_sorted_and_have_one_prefix(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = ["reserved:world", "cidr:fd00--/8", "cidr:fd00-1--/32", "cidr:0--0/0"]
    identities = [{"id": 16777218, "labels": labels}, {"id": 3}, {"id": 1, "labels": ["reserved:host"]}]
    answers = {"GET identity": identities}
    _, lines, _ = shown("identity list", answers, tmp_path, capfd, monkeypatch)
    assert lines[1:] == [["1", "reserved:host"], ["16777218", "cidr:fd00:1::/32"], ["reserved:world"]]


def test_identities_of_endpoints_that_cannot_be_listed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"GET identity/endpoints": (404, None)}
    code, _, err = shown("identity list --endpoints", answers, tmp_path, capfd, monkeypatch)
    assert code == 1
    assert err == (
        "Error: Cannot get identities. err: [GET /identity/endpoints][404] getIdentityEndpointsNotFound \n"
    )


def test_services_have_the_type_of_their_specification(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    realized = {"id": 1, "frontend-address": {"ip": "fd00::1", "port": 80}, "flags": {"type": "NodePort"}}
    services = [{"spec": {"flags": {"type": "ClusterIP"}}, "status": {"realized": realized}}, {"spec": {}}]
    answers = {"GET service": services}
    _, lines, err = shown("service list", answers, tmp_path, capfd, monkeypatch)
    assert lines[1:] == [["1", "[fd00::1]:80", "ClusterIP"]]
    assert err == "error parsing svc: empty state"


@pytest.mark.parametrize(("answer", "deleted"), [("y\n", True), ("yes\n", False), ("", False)])
def test_names_are_shown_before_they_are_deleted(
    answer: str,
    deleted: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    lookup = {"endpoint-id": 7, "source": "lookup", "fqdn": "a.io.", "ttl": 3, "expiration-time": "t"}
    answers = {"GET fqdn/cache": [lookup | {"ips": ["10.0.0.1"]}], "DELETE fqdn/cache": {}}
    code, lines, _ = shown("fqdn cache clean", answers, tmp_path, capfd, monkeypatch)
    assert code == 0
    assert lines[0] == ["Following", "cache", "entries", "are", "going", "to", "be", "deleted:"]
    assert lines[2] == ["7", "lookup", "a.io.", "3", "t", "10.0.0.1"]
    assert (lines[-1] == ["FQDN", "proxy", "cache", "cleared"]) is deleted


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (
            {"ipv4-big-tcp": {"enabled": True, "maxGRO": 196608, "maxGSO": 196608}},
            "IPv4 BIG TCP: Enabled [196608]",
        ),
        (
            {"ipv6-big-tcp": {"enabled": True, "maxGRO": 196608, "maxGSO": 65536}},
            "IPv6 BIG TCP: Enabled [196608, 65536]",
        ),
        ({"datapath-mode": "ipvlan"}, "Device Mode: ?"),
        ({"datapath-mode": "netkit-l2"}, "Device Mode: netkit-l2"),
        (
            {"encryption": {"mode": "Wireguard", "wireguard": {"node-encryption": "Disabled"}}},
            "Encryption: Wireguard [NodeEncryption: Disabled, ]",
        ),
        (
            {"kube-proxy-replacement": {"mode": "True", "deviceList": [{"name": "eth0"}, {"name": "eth1"}]}},
            "KubeProxyReplacement: True [eth0 , eth1 , ]",
        ),
    ],
)
def test_parts_of_the_status_have_the_lines_of_cilium_s(
    part: dict[str, Any],
    line: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, lines, _ = shown("status", {"GET healthz": part}, tmp_path, capfd, monkeypatch)
    assert line.split() in lines


def test_a_state_that_is_neither_warning_nor_failure_is_ok_in_brief(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = {"kvstore": {"msg": "etcd"}, "kubernetes": {"state": "Bootstrap"}, "cilium": {"state": "Ok"}}
    code, lines, _ = shown("status --brief", {"GET healthz": status}, tmp_path, capfd, monkeypatch)
    assert (code, lines) == (0, [["OK"]])


def test_a_node_port_without_an_algorithm_has_no_lines_for_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    features = {"nodePort": {"enabled": True, "portMin": 1, "portMax": 2}}
    status = {"kubernetes": {"state": "Ok"}, "kube-proxy-replacement": {"mode": "True", "features": features}}
    _, lines, _ = shown("status --verbose", {"GET healthz": status}, tmp_path, capfd, monkeypatch)
    words = {line[0] for line in lines if line}
    assert "Status:" in words
    assert words.isdisjoint({"Mode:", "Backend", "XDP", "DSR"})
