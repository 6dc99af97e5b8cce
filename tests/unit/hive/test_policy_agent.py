"""``hive policy`` with a running agent: objects, rules, selectors, waiting for a revision."""

import json
from pathlib import Path

import pytest

from tests.support.command_line import hive
from tests.unit.hive.stub_agent import stub_agent

REFUSED = {
    "kind": "CiliumNetworkPolicy",
    "namespace": "shop",
    "name": "cart",
    "valid": False,
    "message": "no such port",
    "path": "spec.ingress[0]",
    "revision": 3,
}
GOOD = {**REFUSED, "kind": "NetworkPolicy", "name": "web", "valid": True, "message": "ok", "path": ""}
CLOSED = {**GOOD, "name": "zoo", "unenforced": "there is no Envoy"}
LABELS = [
    {"key": "io.cilium.k8s.policy.name", "value": "cart", "source": "k8s"},
    {"key": "io.cilium.k8s.policy.namespace", "value": "shop", "source": "k8s"},
]
SELECTORS = [{"selector": "sel", "labels": LABELS, "identities": [256, 300], "users": 2}]


def endpoint(number: int, revision: int, state: str = "ready") -> dict[str, object]:
    return {
        "id": number,
        "status": {"state": state, "policy": {"realized": {"policy-revision": revision}}},
    }


ANSWERS = {
    "/statedb/dump/policies": (
        200,
        {"policies": [{"rev": 1, "obj": one} for one in (GOOD, CLOSED, REFUSED)]},
    ),
    "/v1/policy": (200, {"policy": "[]", "revision": 4}),
    "/v1/policy/selectors": (200, SELECTORS),
    "/v1/endpoint": (200, [endpoint(1, 4), endpoint(2, 5)]),
}


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            "list",
            [
                "KIND NAMESPACE NAME VALID REVISION MESSAGE",
                "CiliumNetworkPolicy shop cart no 3 spec.ingress[0]: no such port",
                "NetworkPolicy shop web yes 3",
                "NetworkPolicy shop zoo yes 3 there is no Envoy",
            ],
        ),
        (
            "list --refused",
            [
                "KIND NAMESPACE NAME VALID REVISION MESSAGE",
                "CiliumNetworkPolicy shop cart no 3 spec.ingress[0]: no such port",
            ],
        ),
        ("get", ["[]", "Revision: 4"]),
        ("selectors", ["POLICY USERS IDENTITIES SELECTOR", "shop/cart 2 256, 300 sel"]),
        ("wait 4", []),
    ],
)
def test_policy_list_shows_policies_and_their_state(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: str, lines: list[str]
) -> None:
    with stub_agent(tmp_path, ANSWERS) as agent:
        result = hive(capsys, "policy", *arguments.split(), "--socket", agent.socket)
    assert result.code == 0
    assert [" ".join(line.split()) for line in result.out.splitlines()] == lines


def test_labels_are_sent_as_the_body_and_nothing_found_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with stub_agent(tmp_path, {"/v1/policy": (404, "")}) as agent:
        result = hive(capsys, "policy", "get", "k8s:a=b", "--socket", agent.socket)
        assert agent.requests[0][1]["Content-Length"] == str(len(json.dumps(["k8s:a=b"])))
    assert (result.code, result.err) == (1, "hive: no rule has the labels k8s:a=b\n")


def test_an_expired_policy_wait_names_late_endpoints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answers = {"/v1/endpoint": (200, [endpoint(1, 5), endpoint(7, 5, "regenerating")])}
    with stub_agent(tmp_path, answers) as agent:
        fast = ("--fail-wait-time", "0", "--socket", agent.socket)
        result = hive(capsys, "policy", "wait", "5", *fast)
    assert result.code == 1
    assert "endpoints without revision 5" in result.err
    assert result.err.rstrip().endswith(": 7")


DIRECTION = {
    "direction": "ingress",
    "of": "shop/cart",
    "verdict": "drop",
    "allowed": False,
    "enforced": True,
    "entry": "none matches",
    "rules": [],
    "near": [
        {"rule": "spec.ingress[0] of CiliumNetworkPolicy shop/cart", "missing": "it is closed"},
    ],
    "requests": [],
    "audited": False,
}
WAY = {
    "destination": "shop/cart",
    "port": "53/UDP",
    "via": "",
    "verdict": "denied",
    "directions": [DIRECTION],
    "elsewhere": ["egress decided on node-2"],
    "problem": "",
    "note": "",
}
EXPLAINED = {
    "source": "10.0.2.9",
    "destination": "shop/cart",
    "verdict": "denied",
    "allowed": False,
    "headline": "denied",
    "ways": [WAY],
    "notes": [],
}


def test_the_agent_explains_a_connection(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = "/hive/policy/explain?source=10.0.2.9&destination=shop%2Fcart&port=53&protocol=UDP"
    with stub_agent(tmp_path, {path: (200, EXPLAINED)}) as agent:
        result = hive(capsys, "policy", "explain", "10.0.2.9", "shop/cart:53/udp", "--socket", agent.socket)
    assert result.code == 1
    assert result.out.splitlines() == [
        "10.0.2.9 -> shop/cart:53/UDP: denied",
        "  ingress of shop/cart: drop",
        "    policies select it for this direction, and none allows this",
        "    near: spec.ingress[0] of CiliumNetworkPolicy shop/cart: it is closed",
        "    entry: none matches",
        "  egress decided on node-2",
    ]


@pytest.mark.parametrize(("verdict", "code"), [("allowed", 0), ("denied", 1), ("elsewhere", 3), ("mixed", 4)])
def test_the_exit_code_is_the_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verdict: str, code: int
) -> None:
    path = "/hive/policy/explain?source=shop%2Fa&destination=shop%2Fcart"
    with stub_agent(tmp_path, {path: (200, EXPLAINED | {"verdict": verdict})}) as agent:
        assert hive(capsys, "policy", "explain", "shop/a", "shop/cart", "-H", agent.socket).code == code


def test_what_the_agent_cannot_answer_is_a_mistake_in_the_question(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = "/hive/policy/explain?source=shop%2Fa&destination=shop%2Fcart"
    with stub_agent(tmp_path, {path: (400, {"err": "there is no pod shop/a"})}) as agent:
        answer = hive(capsys, "policy", "explain", "shop/a", "shop/cart", "-H", agent.socket)
    assert answer.code == 2
    assert answer.err.splitlines()[-1].endswith("there is no pod shop/a")


def test_policy_reachability_is_answered_by_the_agent(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    row = {"from": "shop/a", "to": "shop/b", "port": "80/TCP", "verdict": "denied", "headline": "denied"}
    rows = [row | {"denied": "egress"}]
    path = "/hive/policy/reachability?namespace=shop&port=80"
    with stub_agent(tmp_path, {path: (200, rows)}) as agent:
        result = hive(capsys, "policy", "explain", "--all", "shop", "--port", "80", "--socket", agent.socket)
    assert [" ".join(line.split()) for line in result.out.splitlines()] == [
        "FROM TO PORT",
        "shop/a shop/b 80/TCP denied by egress",
    ]
