"""Requests to the agents of all nodes through the API server: one explanation, one page."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cells.policy.explain import ExplainedConnection
from hive.agents import COMMAND, _packed
from hive.policy.all_nodes import merged
from hive.ui.cluster import merged_matrix
from hive.ui.flows import STEPS, merged_flows
from lifecycle.testing import eventually
from tests.support.apiserver.exec import Command, Ended
from tests.unit.kubernetes.cluster import Cluster, cluster, kubeconfig, pod

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[3]


def direction(name: str, *, allowed: bool = True) -> dict[str, Any]:
    verdict = "allow" if allowed else "deny"
    return {
        "direction": name, "of": "x", "verdict": verdict, "allowed": allowed, "enforced": True, "entry": "",
        "rules": [f"rule of {name}"], "near": [], "requests": [], "audited": False,
    }  # fmt: skip


def way(port: str, name: str, *, allowed: bool = True, destination: str = "default/db") -> dict[str, Any]:
    """A way as the agent of one end has it."""
    other = "ingress decided on node2" if name == "egress" else "egress decided on node1"
    return {
        "destination": destination, "port": port, "via": "", "problem": "", "note": "", "elsewhere": [other],
        "verdict": "elsewhere" if allowed else "denied", "directions": [direction(name, allowed=allowed)],
    }  # fmt: skip


def explanation(*ways: dict[str, Any]) -> dict[str, Any]:
    return {
        "source": "default/web", "destination": "default/db", "verdict": "elsewhere", "allowed": False,
        "headline": "", "ways": list(ways), "notes": [],
    }  # fmt: skip


class Nodes:
    """Two nodes with an agent and a pod each; what their agents answer, by pod and question."""

    def __init__(self, found: Cluster) -> None:
        self.answers: dict[tuple[str, str], tuple[int, Any]] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.open = 0
        found.server.conversation = self.converse
        found.server.executor = self.refuse
        for name, short in (("node1", "web"), ("node2", "db")):
            found.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {}})
            agent = pod(f"cilium-{name}", name, **{"k8s-app": "cilium"})
            agent["metadata"]["namespace"] = "kube-system"
            found.put(agent | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
            found.put(pod(short, name))

    async def refuse(self, command: Command) -> Ended:
        raise AssertionError(command)

    async def converse(
        self, command: Command, spoken: asyncio.Queue[bytes | None], say: Callable[[bytes], Awaitable[None]]
    ) -> Ended:
        assert command.words == list(COMMAND)
        self.open += 1
        held = b""
        while (data := await spoken.get()) is not None:
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                asked = json.loads(line)
                self.asked.append((command.pod, asked["ask"], asked["query"]))
                answer = self.answers.get((command.pod, asked["ask"]))
                if answer is None:
                    self.open -= 1
                    return Ended(2, b"", b"Error: No such option: --stdio")
                await say(_packed(answer) + b"\n")
        self.open -= 1
        return Ended(0, b"", b"")


async def hive(folder: Path, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "hive", *words, "--kubeconfig", str(folder / "kubeconfig")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'cmd'}"},
    )


async def explained(folder: Path, destination: str) -> tuple[int, str]:
    process = await hive(folder, "policy", "explain", "default/web", destination)
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode or 0, (out or err).decode()


async def test_both_ends_agents_explain_a_connection(tmp_path: Path) -> None:
    async with cluster() as found:
        kubeconfig(tmp_path, found.url)
        nodes = Nodes(found)
        here, there = ("cilium-node1", "explain"), ("cilium-node2", "explain")
        nodes.answers = {
            here: (200, explanation(way("80/TCP", "egress"))),
            there: (200, explanation(way("80/TCP", "ingress"))),
        }
        code, text = await explained(tmp_path, "default/db:80")
        assert (code, text.splitlines()[0]) == (0, "default/web -> default/db:80/TCP: allowed")
        assert text.index("by rule of egress") < text.index("by rule of ingress")
        question = {"source": "default/web", "destination": "default/db", "port": "80", "protocol": ""}
        assert nodes.asked == [(*here, question), (*there, question)]

        nodes.answers[there] = 200, explanation(way("80/TCP", "ingress", allowed=False))
        code, text = await explained(tmp_path, "default/db:80")
        assert (code, text.splitlines()[0]) == (1, "default/web -> default/db:80/TCP: denied")

        del nodes.answers[there]
        code, text = await explained(tmp_path, "default/db:80")
        why = "node2: agent cilium-node2: Error: No such option: --stdio"
        words = f"egress allowed on node1, ingress is not known ({why})"
        assert (code, text.splitlines()[0]) == (3, f"default/web -> default/db:80/TCP: {words}")
        nodes.answers[here] = 400, {"error": "there is no port http"}
        nodes.answers[there] = 400, {"error": "there is no port http"}
        assert await explained(tmp_path, "default/db:http") == (2, "hive: there is no port http\n")


async def test_the_page_over_all_nodes_names_one_that_fails_and_ends_with_ctrl_c(
    tmp_path: Path,
) -> None:
    async with cluster() as found:
        kubeconfig(tmp_path, found.url)
        nodes = Nodes(found)
        nodes.answers["cilium-node1", "flows"] = 200, summary(("web", "db", 3, 3))
        process = await hive(tmp_path, "cluster", "ui", "--no-browser")
        assert process.stdout is not None
        async with asyncio.timeout(60):
            address = (await process.stdout.readline()).decode().split()[-1]
            answer = json.loads(await asyncio.to_thread(got, f"{address}flows"))
            assert 'data-scope="cluster"' in await asyncio.to_thread(got, address)
            assert [one["nodes"] for one in answer["edges"]] == [["node1"]]
            assert answer["problems"] == {"node2": "agent cilium-node2: Error: No such option: --stdio"}
            assert nodes.open == 1, "the command stays for the next question"
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
        assert (process.returncode, out, err) == (0, b"", b"")
        await eventually(lambda: not nodes.open)


def got(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:  # noqa: S310  # of loopback
        text: str = answer.read().decode()
        return text


def summary(*edges: tuple[str, str, int, int], now: int = 1_000_000) -> dict[str, Any]:
    """As a node sums up flows: between which ends, how many of the last step, and how many of them left."""
    names = sorted({name for one in edges for name in one[:2]})
    empty = [0] * (STEPS - 1)
    return {
        "now": now, "step": 10, "missed": 0, "more": 0,
        "parties": [{"group": "default", "name": name} for name in names],
        "edges": [
            {
                "from": names.index(source), "to": names.index(target), "allowed": [*empty, count],
                "denied": [*empty, 0], "leaving": [*empty, leaving], "ports": [["80/TCP", count]],
                "morePorts": 0, "reasons": [], "ask": None, "last": now,
            }
            for source, target, count, leaving in edges
        ],
    }  # fmt: skip


def test_a_flow_that_two_nodes_see_counts_once() -> None:
    found = merged_flows(
        {
            "node1": summary(("web", "db", 5, 5)),
            "node2": summary(("web", "db", 7, 0), ("db", "outside", 2, 2), now=1_010_000),
        }
    )
    names = [one["name"] for one in found["parties"]]
    edges = {(names[one["from"]], names[one["to"]]): one for one in found["edges"]}
    assert sum(edges["web", "db"]["allowed"]) == 5 + 7, "of two steps: node1 answered ten seconds earlier"
    assert edges["web", "db"]["allowed"][-2:] == [5, 7]
    assert edges["web", "db"]["nodes"] == ["node1", "node2"]
    assert sum(edges["db", "outside"]["allowed"]) == 2
    same = merged_flows({"node1": summary(("web", "db", 5, 5)), "node2": summary(("web", "db", 7, 0))})
    assert [sum(one["allowed"]) for one in same["edges"]] == [7]


def ends(*names: str, here: str) -> list[dict[str, Any]]:
    return [
        {
            "ask": name, "identity": 1000 + at, "namespace": "shop", "labels": [name], "pods": [],
            "here": name == here,
        }
        for at, name in enumerate(names)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("egress", "ingress", "verdict"),
    [
        ("elsewhere", "elsewhere", "allowed"),
        ("denied", "elsewhere", "denied"),
        ("elsewhere", "denied", "denied"),
        ("elsewhere", "mixed", "mixed"),
        ("elsewhere", None, "elsewhere"),
    ],
)
def test_a_cell_of_the_matrix_is_what_both_nodes_decide(
    egress: str, ingress: str | None, verdict: str
) -> None:
    def matrix(here: str, spoken: str) -> dict[str, Any]:
        both = ends("web", "db", here=here)
        cells = [{"from": 0, "to": 1, "verdict": spoken, "headline": spoken}]
        return {
            "sources": both, "destinations": both, "more-sources": 0, "more-destinations": 0,
            "namespaces": ["shop"], "cells": cells,
        }  # fmt: skip

    answers = {"node1": matrix("web", egress)} | ({"node2": matrix("db", ingress)} if ingress else {})
    assert [one["verdict"] for one in merged_matrix(answers)["cells"]] == [verdict]


def test_ports_of_both_ends_are_put_together() -> None:
    """Every packet passes if both ends let it; ports that fare alike are one way."""

    def side(name: str, **ports: bool) -> list[ExplainedConnection]:
        texts = {"other": "any other port", "any": "any port"}
        return [
            msgspec.convert(
                way(texts.get(port, port[1:].replace("_", "-") + "/TCP"), name, allowed=ok),
                ExplainedConnection,
            )
            for port, ok in ports.items()
        ]

    def shown(*sides: list[ExplainedConnection]) -> dict[str, str]:
        return {one.port: one.verdict for one in merged(*sides)}

    assert shown(side("egress", any=True), side("ingress", any=False)) == {"any port": "denied"}
    assert shown(side("egress", p80=True, other=False), side("ingress", any=True)) == {
        "80/TCP": "allowed",
        "any other port": "denied",
    }
    found = shown(
        side("egress", p1_100=True, other=False), side("ingress", p80=True, p90_200=True, other=False)
    )
    assert {port for port, verdict in found.items() if verdict == "allowed"} == {"80/TCP", "90-100/TCP"}
    assert shown(side("egress", p80=True), side("ingress", p80=True)) == {"80/TCP": "allowed"}
