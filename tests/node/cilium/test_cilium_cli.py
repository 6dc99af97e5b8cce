"""What ``cilium`` (cilium-cli) runs in an agent's pod, and how it reads what that prints.

The command lines are those of its ``status``, ``connectivity test`` and ``sysdump``; a real agent answers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hive.lab import pods
from hive.lab.node import Lab
from tests.support.agents import environment, serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

RUNTIME_CONFIG = "/var/run/cilium/state/agent-runtime-config.json"
PROGRAMS = {"cilium": "hive.dbg.main", "cilium-dbg": "hive.dbg.main", "cilium-bugtool": "hive.dbg.bugtool"}
"""Commands of the image, and our modules behind them."""


def run_in_pod(node: Lab, *words: str) -> str:
    """What a command prints where the agent runs; it exits 0."""
    program, *arguments = words
    command = list(words)
    if program in PROGRAMS:
        command = [sys.executable, "-c", f"from {PROGRAMS[program]} import main; main()", *arguments]
    with node.open() as inside:
        process = inside.popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd=Path.cwd()
        )
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, f"{words}: {err.decode()}"
    return out.decode()


def json_of(node: Lab, *words: str) -> Any:
    return json.loads(run_in_pod(node, *words))


@pytest.fixture
def agent(node: Lab) -> Lab:
    """A node whose agent serves, with a pod."""
    serving(node, "--kube-proxy-replacement=true")
    pods.add(node, "client")
    return node


def test_features_are_detected(agent: Lab) -> None:
    status = json_of(agent, "cilium", "status", "-o", "json")
    assert ("proxy" in status) == (find_spec("envoy") is not None), "L7 proxy is detected by it"
    assert status["host-firewall"]["mode"] in {"Disabled", "Enabled"}
    assert status["encryption"]["mode"] == "Disabled"
    assert status["cni-chaining"]["mode"] == "none"
    replacement = status["kube-proxy-replacement"]
    assert replacement["mode"] == "True"
    features = ("externalIPs", "hostPort", "gracefulTermination", "nodePort", "sessionAffinity", "socketLB")
    assert {name for name in features if replacement["features"][name].get("enabled")} >= {"nodePort"}

    version = run_in_pod(agent, "cilium", "version", "-o", "jsonpath={$.Daemon.Version}")
    assert re.fullmatch(r"1\.17\.\d+\S*", version.strip())

    config = json.loads(run_in_pod(agent, "cat", RUNTIME_CONFIG))
    read = {
        "MonitorAggregation": "medium",
        "EnableICMPRules": True,
        "EnableHealthChecking": False,
        "EnableEndpointHealthChecking": True,
        "EncryptNode": False,
        "EnableK8sNetworkPolicy": True,
    }
    assert {name: config[name] for name in read} == read


def test_waiting_for_policies_services_and_identities(agent: Lab) -> None:
    def ready() -> bool:
        endpoints = json_of(agent, "cilium", "endpoint", "list", "-o", "json")
        return bool(endpoints) and all(one["status"]["state"] == "ready" for one in endpoints)

    eventually(ready)
    revision = int(run_in_pod(agent, "cilium", "policy", "get", "-o", "jsonpath='{.revision}'").strip("'\n"))
    assert run_in_pod(agent, "cilium", "policy", "wait", str(revision), "--max-wait-time", "30") == ""
    services = json_of(agent, "cilium", "service", "list", "--output=json")
    assert all(one["status"]["realized"]["frontend-address"]["ip"] for one in services)
    prefixes = json_of(agent, "cilium", "bpf", "ipcache", "list", "-o", "json")
    assert all(re.search(r"identity=\d+", text) for texts in prefixes.values() for text in texts)
    assert "0.0.0.0/0" in prefixes


def test_metrics_and_encryption_are_read(agent: Lab) -> None:
    metrics = json_of(agent, "cilium", "metrics", "list", "-o", "json")
    assert all({"name", "value"} <= one.keys() for one in metrics)
    assert "cilium_endpoint_state" in {one["name"] for one in metrics}
    assert json_of(agent, "cilium", "metrics", "list", "-ojson", "-pcilium_ipsec_xfrm_error") == []
    assert json_of(agent, "cilium", "encrypt", "status", "-o", "json")["mode"] == "Disabled"


def test_a_sysdump_gets_its_archive(agent: Lab) -> None:
    printed = run_in_pod(agent, "cilium-bugtool", "--archiveType=gz", "--archive-prefix", "cilium-x")
    match = re.search(r"GZIP at (.*)\n", printed)
    assert match is not None
    archive = Path(match[1])
    try:
        with tarfile.open(archive) as opened:
            assert any(name.endswith("agent/healthz.json") for name in opened.getnames())
    finally:
        archive.unlink()


LOOKS = (
    "status --verbose",
    "status --brief",
    "endpoint list",
    "identity list",
    "ip list",
    "node list",
    "service list",
    "map list",
    "config -a",
    "policy selectors",
    "fqdn cache list",
    "debuginfo",
    "bgp peers",
    "bpf endpoint list",
    "bpf lb list",
    "bpf ct list global",
    "bpf nat list",
    "bpf policy get --all",
    "bpf metrics list",
    "bpf egress list",
    "statedb devices",
    "statedb dump",
)
"""What people look at."""


def test_people_look_at_a_node(agent: Lab) -> None:
    for words in LOOKS:
        assert run_in_pod(agent, "cilium-dbg", *words.split()) or words == "bpf egress list"
