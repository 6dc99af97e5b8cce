"""``hive ui``: its page's requests, authorization, and aggregated flows."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from hive.observe.hubble_client import ConnectError
from hive.ui.flows import MOST_EDGES, FlowMap
from tests.support.command_line import hive
from tests.support.ui import ANSWERS, FakeHubble, flow, serving


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(tmp_path, monkeypatch) as found:
        yield found


def got(address: str, path: str = "", method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    connection.request(method, parts.path + path if path[:1] != "/" else path, headers=headers)
    answer = connection.getresponse()
    answer.body = answer.read().decode()  # type: ignore[attr-defined]  # read while it is open
    connection.close()
    return answer


def body(answer: http.client.HTTPResponse) -> Any:
    return answer.body  # type: ignore[attr-defined]  # of got()


def test_a_request_without_the_token_is_refused(address: str) -> None:
    assert got(address, "/").status == 403
    assert got(address, "/other/flows").status == 403
    rebound = got(address, Host="attacker.example")
    assert (rebound.status, "Host" in body(rebound)) == (403, True)
    assert got(address, method="POST").status == 405
    assert got(address, "nothing").status == 404


def test_the_page_loads_nothing_from_other_origins(address: str) -> None:
    answer = got(address)
    policy = answer.headers["Content-Security-Policy"]
    assert (answer.status, policy.startswith("default-src 'none'")) == (200, True)
    assert "unsafe" not in policy
    assert "http://" not in body(answer).replace("http://www.w3.org/2000/svg", "")
    assert "Access-Control-Allow-Origin" not in answer.headers
    nonces = {got(address).headers["Content-Security-Policy"] for _ in range(3)}
    assert len(nonces) == 3


def test_answers_of_the_agent_reach_the_page(address: str) -> None:
    assert len(json.loads(body(got(address, "policy")))["cells"]) == 3
    (node, view), *others = json.loads(body(got(address, "nodes")))["views"].items()
    assert (node, view["nodes"]["self"], view["health"], view["bgp"]) == ("one", "default/one", None, None)
    assert not others


def test_a_refusal_of_the_agent_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {**ANSWERS, "/hive/policy/matrix?from=nowhere": (400, {"err": "no pods of namespace nowhere"})}
    with serving(tmp_path, monkeypatch, refused) as address:
        answer = got(address, "policy?from=nowhere")
    assert (answer.status, json.loads(body(answer))) == (400, {"error": "no pods of namespace nowhere"})


def test_without_flows_the_setting_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise ConnectError("no socket")

    with serving(tmp_path, monkeypatch) as address:
        monkeypatch.setattr("hive.ui.flows.HubbleClient", absent)
        answer = got(address, "flows")
    assert (answer.status, "enable-hubble=true" in body(answer)) == (502, True)


def test_flows_are_summed_by_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hive.ui.flows.HubbleClient", FakeHubble)
    monkeypatch.setattr("hive.ui.flows.FRESH", 0.0)
    flows = FlowMap("unix:///nowhere", 5.0)
    first = [flow("shop/web", "shop/cart", at=20 - at) for at in range(3)]
    FakeHubble.flows = [
        *first,
        flow("shop/web", "shop/db", denied=True, at=10),
        flow("shop/cart", "shop/web", at=9, is_reply=True),
        flow("shop/web", "shop/cart", at=600),
    ]
    found = flows.summary()
    parties = [one["name"] for one in found["parties"]]
    edges = {(parties[one["from"]], parties[one["to"]]): one for one in found["edges"]}
    assert set(edges) == {("web", "cart"), ("web", "db")}, "replies say nothing new"
    assert sum(edges["web", "cart"]["allowed"]) == 3, "what is older than five minutes is not shown"
    assert edges["web", "db"]["reasons"] == [("POLICY_DENIED", 1)]
    assert found["edges"][0] is edges["web", "db"], "what is denied comes first"
    FakeHubble.flows = [*FakeHubble.flows, flow("shop/web", "shop/cart")]
    again = flows.summary()
    assert sum(sum(one["allowed"]) for one in again["edges"]) == 4, "what was read before counts once"


def test_flows_without_end_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hive.ui.flows.HubbleClient", FakeHubble)
    FakeHubble.flows = [flow("shop/web", f"shop/pod-{number}", at=1) for number in range(MOST_EDGES + 7)]
    found = FlowMap("unix:///nowhere", 5.0).summary()
    assert (found["missed"], len(found["edges"]) + found["more"]) == (7, MOST_EDGES)


def test_without_an_agent_hive_ui_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = hive(capsys, "ui", "--no-browser", "--socket", tmp_path / "cilium.sock")
    assert (answer.code, answer.out) == (1, "")
    assert "no agent answers at" in answer.err
