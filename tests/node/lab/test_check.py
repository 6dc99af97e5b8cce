"""``hive lab check`` passes in a working lab, and names the faults of a broken one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hive.check.checks import NAMES
from hive.lab import agent_process
from hive.lab.check import LabSite
from hive.lab.cluster import Cluster
from hive.lab.kernel import lab_links
from hive.lab.node import ROOT, Lab, exclusive
from hive.main import cli
from tests.support.agents import environment
from tests.support.namespaces import need_root
from tests.support.waiting import eventually

pytestmark = pytest.mark.node

NAME = f"checked-{os.getpid()}"
SETTINGS = ("--enable-ipv6=true", "--kube-proxy-replacement=true")
POLICIES = tuple(name for name in NAMES if "policy" in name)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with a router between them, both families on, services without kube-proxy."""
    need_root()
    links = lab_links()
    found = Cluster(NAME)
    try:
        made = CliRunner().invoke(
            cli,
            ["lab", "up", "--name", f"{NAME}-1", "--nodes", "2", "--segments", "2", "--pods", "0", *SETTINGS],
        )
        assert made.exit_code == 0, made.output
        yield found
    finally:
        with exclusive():
            found.remove(found.nodes())
    assert not list(ROOT.glob(f"{NAME}*"))
    assert not lab_links() - links


def check(*words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and what is printed for programs; each check is its state."""
    result = CliRunner().invoke(cli, ["lab", "check", "--name", NAME, "--json", *words])
    assert result.stdout, result.output
    found = json.loads(result.stdout)
    return result.exit_code, found


def states(found: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["state"] for one in found["checks"]}


def without_policies() -> list[str]:
    """The checks that take no seconds where a fault is elsewhere."""
    return [word for name in POLICIES for word in ("--skip", name)] + ["--within", "2"]


def left(cluster: Cluster) -> list[Path]:
    return [file for lab in cluster.nodes() for file in lab.manifests.glob("check-*")]


def test_everything_passes_in_a_lab_that_works(cluster: Cluster) -> None:
    code, found = check()
    assert {name for name, state in states(found).items() if state != "passed"} == {"dns"}, found
    assert (code, found["ok"], found["routing"], found["families"]) == (0, True, "native", ["IPv4", "IPv6"])
    assert found["nodes"] == [lab.name for lab in cluster.nodes()]
    assert left(cluster) == []
    assert [lab.pods() for lab in cluster.nodes()] == [[], []]


def test_a_policy_that_denies_fails_only_what_it_denies(cluster: Cluster) -> None:
    deny: dict[str, Any] = {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumClusterwideNetworkPolicy",
        "metadata": {"name": "no-nodes"},
        "spec": {
            "endpointSelector": {},
            "enableDefaultDeny": {"egress": False},
            "egressDeny": [{"toEntities": ["host", "remote-node"]}],
        },
    }
    cluster.manifests.write("applied-deny", [deny])
    try:
        code, found = check(*without_policies())
    finally:
        cluster.manifests.remove("applied-deny")
    assert (code, failed(found)) == (1, ["host"])
    (host,) = (one for one in found["checks"] if one["name"] == "host")
    assert all("client-" in one and "node " in one and "no answer" in one for one in host["failures"])
    assert host["what_to_do"]
    assert host["see"].endswith("section host")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_check_that_is_ended_leaves_nothing_or_the_next_one_removes_it(
    cluster: Cluster, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "hive", "lab", "check", "--name", NAME, "--only", "policy-ingress"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        eventually((cluster.nodes()[0].manifests / "check-policies.yaml").exists)
        process.send_signal(number)
    assert process.returncode in {130, -signal.SIGKILL}
    if number == signal.SIGKILL:
        assert left(cluster)
        assert check("--only", "pods-same-node")[0] == 0
    assert left(cluster) == []
    assert [lab.pods() for lab in cluster.nodes()] == [[], []]


def test_two_checks_do_not_meet_in_a_lab(cluster: Cluster) -> None:
    with LabSite(cluster.manifests):
        result = CliRunner().invoke(cli, ["lab", "check", "--name", NAME])
    assert (result.exit_code, "another check is at work" in result.output) == (1, True)


def failed(found: dict[str, Any]) -> list[str]:
    return [name for name, state in states(found).items() if state == "failed"]


def test_a_link_that_carries_less_fails_the_largest_packets(cluster: Cluster) -> None:
    with link_mtu(cluster, 1300):
        code, found = check(*without_policies())
    assert (code, failed(found)) == (1, ["mtu"])
    (mtu,) = (one for one in found["checks"] if one["name"] == "mtu")
    assert any("packets of more than 1300 bytes are lost" in one for one in mtu["failures"]), mtu


def test_a_route_that_is_missing_fails_pods_of_the_other_node_alone(cluster: Cluster) -> None:
    second = cluster.nodes()[1]
    with cluster.network.open() as network:
        network.run(unroute, cluster.place(second).pod_cidrs[0])
    try:
        code, found = check(*without_policies())
    finally:
        cluster.network.route(cluster.place(second))
    assert (code, failed(found)) == (1, ["pods-other-node"])
    checks = {one["name"]: one for one in found["checks"]}
    assert all("10.244." in one for one in checks["pods-other-node"]["failures"])
    assert "which fails above" in checks["service"]["note"]


def test_a_node_without_an_agent_is_named_and_left_out(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    agent_process.crash(second)
    try:
        result = CliRunner().invoke(cli, ["lab", "check", "--name", NAME, *without_policies()])
    finally:
        restart(second)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert f"          node {second.name}: no agent runs (hive lab restart)" in lines
    assert [line.split()[1] for line in lines if line.startswith("failed")] == ["agents:"]
    assert any(line.startswith("passed    pods-same-node") for line in lines)
    assert left(cluster) == []
    assert first.pods() == []


def restart(lab: Lab) -> None:
    pid = agent_process.start(lab, *agent_process.last_settings(lab))
    agent_process.wait_ready(lab, pid)


@contextmanager
def link_mtu(cluster: Cluster, size: int) -> Iterator[None]:
    """The router's link to the second node carries packets of so many bytes."""
    with cluster.network.open() as network:
        network.run(set_mtu, "node-2", size)
        try:
            yield
        finally:
            network.run(set_mtu, "node-2", 1500)


def set_mtu(name: str, size: int) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        for one in (name, "segment-1"):
            ip.link("set", index=ip.link_lookup(ifname=one)[0], mtu=size)


def unroute(destination: str) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.route("del", dst=destination)
