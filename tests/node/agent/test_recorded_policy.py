"""A running agent's responses about policies and names, compared with recordings of Cilium's agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hive.client import ask
from hive.lab.agent_process import api_socket
from hive.lab.node import OUTSIDE_ADDRESS, Lab
from tests.support.fqdn_scenario import REFUSED, WEB, fqdn_scenario
from tests.support.requests import PORT, shop
from tests.support.waiting import eventually
from tests.unit.conformance.recordings import exchanges
from tests.unit.conformance.shape import differences

pytestmark = pytest.mark.node

NEVER_REPORTED = {f"{half}/cidr-policy" for half in ("spec", "realized")}
"""Cilium 1.17 has the field and leaves it empty: CIDRs are selectors."""


def recorded(name: str) -> Any:
    return exchanges(f"dbg/{name}")[0]["response"]["body"]


def reported_policy(pid: int, pod: str) -> Any:
    return ask(f"/v1/endpoint/pod-name:default:{pod}", api_socket(pid))["status"]["policy"]


def test_policies_and_fqdn_names_have_the_recorded_form(node: Lab, tmp_path: Path) -> None:
    with fqdn_scenario(node, tmp_path) as place:
        agent = api_socket(place.pid)
        assert place.look().addresses == (OUTSIDE_ADDRESS,)
        for operation, name in (
            ("policy", "policy_get"),
            ("policy/selectors", "policy_selectors"),
            ("fqdn/cache", "fqdn_cache_list"),
            ("fqdn/names", "fqdn_names"),
        ):
            answer = ask(f"/v1/{operation}", agent)
            assert answer, "there is something to compare"
            assert list(differences(recorded(name), answer, set())) == []
            if isinstance(answer, dict) and "policy" in answer:
                rules, (rule,) = json.loads(answer["policy"]), json.loads(recorded(name)["policy"])
                assert rules
                assert list(differences(rule["labels"], rules[0]["labels"], set())) == []
        assert ask("/v1/fqdn/names", agent)["FQDNPolicySelectors"]
        policy = reported_policy(place.pid, "client")
        assert list(differences(recorded("endpoint_get")["status"]["policy"], policy, NEVER_REPORTED)) == []
        assert policy["realized"] == policy["spec"]
        assert policy["realized"]["l4"]["egress"], "rules by port are told"
        for rule in policy["realized"]["l4"]["egress"]:
            assert json.loads(rule["rule"]).keys() >= {"port", "protocol", "l7-rules"}
            assert rule["derived-from-rules"]


def test_an_endpoint_shows_statistics_of_the_dns_proxy(node: Lab, tmp_path: Path) -> None:
    with fqdn_scenario(node, tmp_path) as place:

        def counted() -> dict[str, Any]:
            (one,) = reported_policy(place.pid, "client")["proxy-statistics"]
            assert (one["protocol"], one["location"], one["port"]) == ("dns", "egress", 53)
            assert one["allocated-proxy-port"] >= 1024
            return {way: dict(numbers) for way, numbers in one["statistics"].items()}

        before = counted()
        assert place.look(WEB).addresses == (OUTSIDE_ADDRESS,)
        assert place.look("other.example.com", tcp=True).code == REFUSED
        after = counted()

        def more(way: str, what: str) -> int:
            return int(after[way].get(what, 0)) - int(before[way].get(what, 0))

        assert more("requests", "received") == more("requests", "forwarded") + more("requests", "denied")
        assert more("requests", "forwarded") >= 1
        assert more("requests", "denied") == 1
        assert more("responses", "received") == more("responses", "forwarded") >= 1
        listed = ask("/v1/endpoint", api_socket(place.pid))
        (client,) = [one for one in listed if one["status"]["policy"].get("proxy-statistics")]
        assert client["status"]["policy"]["proxy-statistics"][0]["statistics"] == after


def test_an_endpoint_shows_statistics_of_envoy(node: Lab, tmp_path: Path) -> None:
    with shop(node, tmp_path) as place:

        def all_counted() -> bool:
            (one,) = reported_policy(place.pid, "server")["proxy-statistics"]
            assert (one["protocol"], one["location"], one["port"]) == ("http", "ingress", PORT)
            requests, responses = one["statistics"]["requests"], one["statistics"]["responses"]
            assert requests["received"] == requests.get("forwarded", 0) + requests.get("denied", 0)
            counts = requests.get("forwarded"), responses.get("received"), responses.get("forwarded")
            return counts == (2, 2, 2) and requests.get("denied", 0) >= 2

        for number in (1, 2):
            assert place.get(f"/public/{number}").status == 200
            assert place.get("/secret").status == 403
        eventually(all_counted)
