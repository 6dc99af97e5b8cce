"""``hive observe``: invalid arguments and missing flows yield one line with advice."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from hive.observe.drop_reason import reason_text
from tests.support.command_line import hive
from tests.unit.hive.stub_agent import stub_agent


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--last", "x"), "--last: 'x': expected a whole number of at least 0"),
        (("--since", "yesterday"), "--since: 'yesterday': expected how long ago, such as 5m"),
        (("--verdict", "WRONG"), "--verdict: 'WRONG': expected one of VERDICT_UNKNOWN, FORWARDED, DROPPED"),
        (("-t", "nonsense"), "--type: 'nonsense': expected drop, debug, capture, trace"),
        (("-o", "nonsense"), "--output: 'nonsense': expected one of compact"),
        (("--follow=perhaps",), "--follow: 'perhaps': expected true or false"),
        (("--why", "-o", "json"), "--why has no place in json output: leave out --output"),
        (("--bogus",), "unknown flag: --bogus"),
    ],
)
def test_a_wrong_value_names_what_was_expected(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = hive(capsys, "observe", *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"hive: {expected}")
    assert result.err.count("\n") == 1


def observed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, socket: Path) -> str:
    """What is printed where nothing listens at Hubble's socket."""
    server = f"unix://{socket.parent}/hubble.sock"
    monkeypatch.setattr("hive.observe.hubble.LOCAL", server)
    monkeypatch.setenv("CILIUM_SOCK", str(socket))
    result = hive(capsys, "observe", "--server", server)
    assert (result.code, result.out) == (1, "")
    return result.err


def test_without_flows_the_setting_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_agent(tmp_path, {"/v1/healthz": (200, {"hubble": {"state": "Disabled"}})}) as agent:
        assert "set enable-hubble=true" in observed(capsys, monkeypatch, agent.socket)


def test_flows_at_another_socket_are_pointed_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_agent(tmp_path, {"/v1/healthz": (200, {"hubble": {"state": "Ok"}})}) as agent:
        assert "flows are served elsewhere" in observed(capsys, monkeypatch, agent.socket)


def test_without_an_agent_the_command_fails_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no agent answers at" in observed(capsys, monkeypatch, tmp_path / "cilium.sock")


def dropped(destination: str, reason: str, protocol: Mapping[str, object], **more: object) -> str:
    """A line of ``hive observe -o jsonpb``: a drop at the ingress of a pod."""
    flow = {
        "time": "2026-11-28T08:00:00Z",
        "verdict": "DROPPED",
        "IP": {"source": "192.0.2.7", "destination": "10.0.1.5"},
        "l4": protocol,
        "destination": {"namespace": "shop", "pod_name": destination},
        "drop_reason_desc": reason,
        "traffic_direction": "INGRESS",
        "event_type": {"type": 1, "sub_type": 133},
    }
    return json.dumps({"flow": flow | more, "time": "2026-11-28T08:00:00Z"})


INGRESS = {
    "direction": "ingress",
    "of": "shop/cart",
    "verdict": "drop",
    "enforced": True,
    "audited": False,
    "rules": [],
    "requests": [],
    "near": [
        {"rule": "spec.ingress[0] of CiliumNetworkPolicy shop/cart", "missing": "it allows 80/TCP only"}
    ],
    "entry": "none matches",
}
EGRESS = INGRESS | {"direction": "egress", "of": "shop/other", "near": []}


def explained(*directions: dict[str, object], elsewhere: str = "") -> dict[str, object]:
    way = {"directions": directions, "elsewhere": [elsewhere] if elsewhere else [], "problem": "", "note": ""}
    return {"headline": "allowed", "ways": [way], "notes": []}


def test_why_shows_the_policy_that_decides_below_each_kind_of_drop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tcp = {"TCP": {"source_port": 4000, "destination_port": 81, "flags": {"SYN": True}}}
    ping = {"ICMPv4": {"type": 8}}
    lines = [
        dropped("cart", "POLICY_DENIED", tcp),
        dropped("cart", "POLICY_DENIED", tcp),
        dropped("cart", "POLICY_DENY", ping),
        dropped("gone", "POLICY_DENIED", ping),
        dropped("cart", "TTL_EXCEEDED", tcp),
        dropped("cart", "POLICY_DENIED", tcp, verdict="FORWARDED"),
    ]
    (tmp_path / "flows").write_text("\n".join(lines), encoding="utf-8")
    asked = "/hive/policy/explain?source=192.0.2.7&destination=pod%2Fshop%2F"
    answers = {
        f"{asked}cart&port=81&protocol=TCP": (200, explained(EGRESS, INGRESS)),
        f"{asked}cart&port=8&protocol=ICMP": (200, explained(INGRESS | {"verdict": "allow"})),
        f"{asked}gone&port=8&protocol=ICMP": (400, {"err": "there is no pod shop/gone"}),
    }
    with stub_agent(tmp_path, answers) as agent:
        monkeypatch.setenv("CILIUM_SOCK", str(agent.socket))
        result = hive(capsys, "observe", "--why", "--input-file", tmp_path / "flows", "--last", "9")
        assert len(agent.requests) == 3, "drops of one kind are asked of once"
    assert result.code == 0
    assert [line for line in result.out.splitlines() if line.startswith("    ")] == [
        "    ingress of shop/cart: drop",
        "      policies select it for this direction, and none allows this",
        "      near: spec.ingress[0] of CiliumNetworkPolicy shop/cart: it allows 80/TCP only",
        "      entry: none matches",
        "    allowed now (allowed): policies or labels have changed since",
        "    not explained: there is no pod shop/gone",
        f"    not caused by policy: {reason_text(196)}",
    ]


def test_why_needs_the_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flows").write_text(dropped("cart", "POLICY_DENIED", {}), encoding="utf-8")
    monkeypatch.setenv("CILIUM_SOCK", str(tmp_path / "cilium.sock"))
    result = hive(capsys, "observe", "--why", "--input-file", tmp_path / "flows")
    assert result.code == 1
    assert result.err.startswith("hive: --why asks the agent of this node: no agent answers at")
