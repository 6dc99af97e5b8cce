"""docs/operate/install.md: every command runs on a cluster of two lab nodes and prints what is shown."""

from __future__ import annotations

import json
import os
import signal
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import pytest

from hive.lab import pods
from hive.lab.cluster import Cluster
from hive.lab.node import Lab
from hive.lab.traffic.probe import ping
from tests.support.agents import environment
from tests.support.apiserver import ADMIN_TOKEN
from tests.support.namespaces import need_root
from tests.support.pages import ROOT, Block, blocks, commands, matches, run, shell, squeezed
from tests.support.rollout import Rollout
from tests.support.waiting import eventually

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")
pytestmark = pytest.mark.node

PAGE = ROOT / "docs" / "operate" / "install.md"
SETTINGS = "/api/v1/namespaces/kube-system/configmaps/cilium-config"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
BUILDS = ("make install", ".venv/bin/python configs/image/build.py")
"""What the soak runs, and what this test could not run without."""


def test_an_installation_goes_as_the_page_shows(tmp_path: Path) -> None:
    need_root()
    for name in ("configs", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    rollout = Rollout(Cluster(f"install-{os.getpid()}"), tmp_path / "cluster")
    rollout.folder.mkdir()
    with rollout.up():
        path = f"{rollout.commands()}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
        with shell(tmp_path, {"PATH": path, "KUBECONFIG": str(rollout.kubeconfig)}) as process:
            for block in blocks(PAGE.read_text(encoding="utf-8")):
                if block.file:
                    (tmp_path / block.file).write_text(block.text, encoding="utf-8")
                else:
                    assert block.language == "console", block.line
                    walk(block, process, rollout)


def walk(block: Block, process: object, rollout: Rollout) -> None:
    """Run a block's commands; what a cluster does by itself afterwards is done."""
    for command, shown in commands(block.text):
        if command.startswith(BUILDS):
            continue
        with rollout.kubelets() if command.startswith("hive check") else nullcontext():
            printed = run(process, command)  # type: ignore[arg-type]
        assert matches(squeezed(shown), squeezed(printed)), (
            f"install.md:{block.line}: $ {command}\n{printed}\ninstead of\n{shown}"
        )
        if command.startswith("hive cluster bundle"):
            ask_agents_of_both_nodes(rollout)
            assert_no_secrets(rollout.folder.parent / "incident.tar.gz")
        if command.startswith(("helm install", "helm upgrade")):
            rollout.roll_out()
        if command.startswith("helm uninstall"):
            rollout.take_down()


def ask_agents_of_both_nodes(rollout: Rollout) -> None:
    """The page over all nodes, and one explanation of both ends, by way of the kubeconfig and exec."""
    settings = rollout.ask("GET", SETTINGS)
    rollout.ask("PUT", SETTINGS, settings | {"data": settings["data"] | {"enable-hubble": "true"}})
    rollout.roll_out()
    created = [(f"of-{name}", name, lab) for name, lab in rollout.nodes.items()]
    for short, name, lab in created:
        add_pod(rollout, short, name, lab)
    (source, _, here), (destination, *_) = created
    explain = ("policy", "explain", f"default/{source}", f"default/{destination}:80")
    headline = f"default/{source} -> default/{destination}:80/TCP"
    with started(rollout, *explain) as process:
        text = process.communicate(timeout=60)[0].decode()
    assert (process.returncode, text.splitlines()[0]) == (0, f"{headline}: allowed"), text
    assert f"egress of default/{source}" in text
    assert f"ingress of default/{destination}" in text

    with (
        started(rollout, "cluster", "ui", "--no-browser") as process,
        rollout.cluster.network.open() as network,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().decode().split()[-1]

        def found(what: str) -> Any:
            answer = json.loads(network.run(got, f"{address}{what}"))
            assert answer["problems"] == {}
            return answer

        def verdicts() -> set[str]:
            return {cell["verdict"] for cell in found("policy?from=default&to=default")["cells"]}

        with here.open_pod(source) as inside:
            assert inside.run(ping, address_of(rollout, destination), 3) != []
        eventually(lambda: edges_of(found("flows"), source, destination))
        assert found("nodes")["views"].keys() == rollout.nodes.keys()
        assert verdicts() == {"allowed"}
        assert network.run(got, f"{address}inside?node=node-b").startswith(b"<!doctype html>")
        rollout.ask("POST", POLICIES, closed(destination))
        eventually(lambda: "denied" in verdicts())
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    with started(rollout, *explain) as process:
        text = process.communicate(timeout=60)[0].decode()
    assert (process.returncode, text.splitlines()[0]) == (1, f"{headline}: denied"), text
    rollout.ask("DELETE", f"{POLICIES}/closed")
    for short, _, lab in created:
        pods.delete(lab, short)
        rollout.ask("DELETE", f"/api/v1/namespaces/default/pods/{short}?gracePeriodSeconds=0")
    rollout.ask("PUT", SETTINGS, rollout.ask("GET", SETTINGS) | {"data": settings["data"]})


@contextmanager
def started(rollout: Rollout, *words: str) -> Iterator[Popen[bytes]]:
    """``hive`` where the API server can be reached, until the block ends."""
    given = environment({"KUBECONFIG": str(rollout.kubeconfig)})
    command = (sys.executable, "-m", "hive", *words)
    with (
        rollout.cluster.network.open() as network,
        network.popen(command, stdout=PIPE, stderr=STDOUT, env=given, cwd=ROOT) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def add_pod(rollout: Rollout, short: str, node: str, lab: Lab) -> None:
    """As a kubelet makes a pod."""
    metadata = {"name": short, "namespace": "default", "labels": {"app": short}}
    spec = {"nodeName": node, "containers": [{"name": "c", "image": "i"}]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    made = rollout.ask("POST", "/api/v1/namespaces/default/pods", body)
    attached = pods.add(lab, short)
    made["status"] = {"phase": "Running", "podIP": attached.ipv4, "podIPs": [{"ip": attached.ipv4}]}
    assert rollout.ask("PUT", f"/api/v1/namespaces/default/pods/{short}/status", made)


def address_of(rollout: Rollout, short: str) -> str:
    return str(rollout.ask("GET", f"/api/v1/namespaces/default/pods/{short}")["status"]["podIP"])


def closed(short: str) -> dict[str, Any]:
    """A policy that lets nothing in."""
    spec = {"podSelector": {"matchLabels": {"app": short}}, "policyTypes": ["Ingress"]}
    kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    return {**kind, "metadata": {"name": "closed", "namespace": "default"}, "spec": spec}


def edges_of(flows: Any, source: str, destination: str) -> list[Any]:
    """The edges between two pods that both nodes have seen."""
    names = [one["name"] for one in flows["parties"]]
    return [
        edge
        for edge in flows["edges"]
        if (names[edge["from"]], names[edge["to"]]) == (source, destination) and len(edge["nodes"]) > 1
    ]


def got(url: str) -> bytes:
    """What is at an address in this namespace."""
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310  # one of ours
        content: bytes = answer.read()
        return content


def assert_no_secrets(path: Path) -> None:
    """The archive of a whole cluster has no token and no key of it."""
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            content = file.read() if file is not None else b""
            assert ADMIN_TOKEN.encode() not in content, member.name
            assert b"PRIVATE KEY" not in content, member.name
