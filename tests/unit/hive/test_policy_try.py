"""``hive policy try``: tried flows, printed verdicts, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Result, hive
from tests.unit.hive.stub_agent import stub_agent

POLICY = """
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: cart, namespace: shop}
spec:
  endpointSelector: {}
  egressDeny:
  - toCIDR: [192.0.2.0/24]
"""
CART = {"ID": 7, "identity": 4711, "namespace": "shop", "pod_name": "cart-1", "labels": ["k8s:app=cart"]}
DB = {"ID": 8, "identity": 4712, "namespace": "shop", "pod_name": "db-1", "labels": ["k8s:app=db"]}
FAR = {"identity": 4713, "namespace": "shop", "pod_name": "far-1", "labels": ["k8s:app=far"]}
WEB = {"identity": 2, "labels": ["reserved:world"]}
RULE = {
    "text": "spec.egressDeny[0] of CiliumNetworkPolicy shop/cart",
    "source": "CiliumNetworkPolicy shop/cart",
    "path": "spec.egressDeny[0]",
}
PASSES = {"fate": "passes", "verdict": "allow", "why": "", "rules": [], "near": []}
CUT = {"fate": "cut", "verdict": "deny", "why": "", "rules": [RULE], "near": []}
UNKNOWN = {"fate": "unknown", "verdict": "", "why": "nobody knows", "rules": [], "near": []}


def flow(source: Any, destination: Any, address: str, **more: Any) -> dict[str, Any]:
    made = {
        "time": "2026-11-28T08:00:00.5Z",
        "verdict": "FORWARDED",
        "Type": "L3_L4",
        "node_name": "node-1",
        "IP": {"source": "10.0.0.7", "destination": address, "ipVersion": "IPv4"},
        "l4": {"TCP": {"source_port": 40000, "destination_port": 443}},
        "source": source,
        "destination": destination,
        "event_type": {"type": 4, "sub_type": 3},
        "trace_observation_point": "TO_STACK",
        "trace_reason": "NEW",
        "is_reply": False,
        **more,
    }
    return {"flow": made, "time": made["time"], "node_name": "node-1"}


ELSEWHERE = (
    "note: 1 of the flows that pass have a pod of another node on the other side, where that node's policies"
    " decide: try it there, too"
)
DELIVERED = {"trace_observation_point": "TO_ENDPOINT", "event_type": {"type": 4}}
VERDICT = {"event_type": {"type": 5, "sub_type": 0}, "traffic_direction": "EGRESS", "trace_reason": None}
FLOWS = [
    flow(CART, WEB, "192.0.2.1"),
    flow(CART, WEB, "192.0.2.1", **VERDICT),
    flow(CART, WEB, "192.0.2.9", trace_reason="ESTABLISHED"),
    flow(CART, DB, "10.0.0.8", **DELIVERED),  # of both ends
    flow(CART, FAR, "10.9.0.1"),
    flow(CART, WEB, "192.0.2.1", is_reply=True, trace_reason="REPLY"),
    flow(CART, WEB, "192.0.2.1", trace_observation_point="FROM_ENDPOINT"),
    flow(CART, CART, "10.0.0.7", **DELIVERED),
    flow(WEB, WEB, "192.0.2.1"),
    flow(CART, WEB, "192.0.2.1", verdict="DROPPED", event_type={"type": 1, "sub_type": 133}),
    flow(CART, WEB, "192.0.2.1", l4=None),
]


def attempt(
    capsys: pytest.CaptureFixture[str], folder: Path, fates: list[Any], of: list[int], *words: str
) -> tuple[Result, Any]:
    (folder / "cart.yaml").write_text(POLICY)
    (folder / "flows.json").write_text("\n".join(map(json.dumps, FLOWS)))
    (folder / "cilium.sock").unlink(missing_ok=True)
    answers = {"/hive/policy/trial": (200, {"audited": False, "fates": fates, "of": of})}
    with stub_agent(folder, answers) as agent:
        files = (str(folder / "cart.yaml"), "--input-file", str(folder / "flows.json"))
        result = hive(capsys, "policy", "try", *files, "--socket", agent.socket, *words)
    return result, agent.changes[0][1] if agent.changes else None


def test_flows_that_are_cut_are_named_with_their_rule(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result, asked = attempt(capsys, tmp_path, [CUT, PASSES, UNKNOWN], [0, 0, 1, 2, 1])
    assert [(one["direction"], one["endpoint"], one["address"], one["peer"]) for one in asked["flows"]] == [
        ("egress", 7, "192.0.2.1", 2),
        ("egress", 7, "192.0.2.9", 2),
        ("egress", 7, "10.0.0.8", 4712),
        ("ingress", 8, "10.0.0.7", 4711),
        ("egress", 7, "10.9.0.1", 4713),
    ]
    assert asked["objects"][0]["metadata"]["name"] == "cart"
    assert result.code == 1
    assert result.out.splitlines() == [
        "shop/cart-1 -> 192.0.2.1, 192.0.2.9, 443/TCP: would be cut by egress of shop/cart-1",
        "  3 flows, the last at 2026-11-28T08:00:00.5Z",
        f"  by {tmp_path}/cart.yaml:8: spec.egressDeny[0] of CiliumNetworkPolicy shop/cart",
        "shop/cart-1 -> shop/db-1, 443/TCP: not known for ingress of shop/db-1",
        "  1 flow, the last at 2026-11-28T08:00:00.5Z",
        "  nobody knows",
        "3 of 6 flows would be cut; 2 pass; 1 are not known",
        "note: 1 flows without ports, such as fragments, are not tried",
        ELSEWHERE,
    ]


def test_programs_get_json_and_codes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result, _ = attempt(capsys, tmp_path, [PASSES], [0] * 5, "-o", "json")
    assert result.code == 0
    assert json.loads(result.out)["flows"] == {"passes": 6, "cut": 0, "denied": 0, "unknown": 0}
    result, _ = attempt(capsys, tmp_path, [PASSES, UNKNOWN], [1, 0, 0, 0, 0])
    assert result.code == 3
    result, _ = attempt(capsys, tmp_path, [], [], "--since", "yesterday")
    assert result.code == 2
    assert "--since: 'yesterday': expected how long ago" in result.err


def test_an_invalid_trial_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pod = tmp_path / "pod.yaml"
    pod.write_text("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n")
    result = hive(capsys, "policy", "try", str(pod))
    assert result.code == 2
    assert f"no policy in {pod}: expected NetworkPolicy" in result.err
    policy = tmp_path / "cart.yaml"
    policy.write_text(POLICY)
    result = hive(capsys, "policy", "try", str(policy), "--hubble-socket", str(tmp_path / "none"))
    assert result.code == 2
    assert "does the agent run with enable-hubble?" in result.err
