"""More simultaneous pods than prepared policy maps: each gets its own, and all are removed."""

from __future__ import annotations

import pytest

from hive.lab import pods
from hive.lab.node import Lab
from tests.support.account import agreed
from tests.support.agents import call_environment, ended, serving, start_plugin

pytestmark = pytest.mark.node

PODS = [f"pod-{number}" for number in range(30)]


def test_a_burst_of_pods_comes_and_goes(node: Lab) -> None:
    serving(node, "--policy-map-pool=1")
    for pod in PODS:
        node.hold_pod(pod)
    addresses = {result["ips"][0]["address"].partition("/")[0] for result in at_once(node, "ADD")}
    assert {ip for ip, _, _ in agreed(node).listed.values()} == addresses
    assert len(addresses) == len(PODS)
    at_once(node, "DEL")
    assert agreed(node).listed == {}


def at_once(node: Lab, command: str) -> list[dict[str, list[dict[str, str]]]]:
    """Call the plugin for every pod; what it printed."""
    calls = [start_plugin(node, call_environment(node, pod, command), plugin=pods.PLUGIN) for pod in PODS]
    done = [ended(call) for call in calls]
    assert [one.code for one in done] == [0] * len(PODS)
    return [one.json if one.stdout else {} for one in done]
