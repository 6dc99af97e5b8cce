"""``hive cluster status`` against an API server: counts, detected faults, exit codes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hive.main import cli
from lifecycle.testing import eventually
from tests.unit.kubernetes.cluster import Body, Cluster, cluster, kubeconfig, pod

pytestmark = pytest.mark.anyio
IMAGE = "registry.example/hive:0.1.0"


@pytest.fixture
async def well(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two nodes with an agent each, an operator, a managed pod, and one in its node's network."""
    async with cluster("ciliumendpoints") as found:
        kubeconfig(tmp_path, found.url)
        for name in ("node1", "node2"):
            found.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {}})
            found.put(system(f"cilium-{name}", name, {"k8s-app": "cilium"}))
        found.put(system("operator-a", "node1", {"io.cilium/app": "operator"}))
        found.put(running(pod("web")))
        found.put(endpoint("web"))
        yield found


def running(one: Body, *, ready: bool = True, waiting: str = "") -> Body:
    state: Body = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]}
    if waiting:
        state["containerStatuses"] = [{"restartCount": 4, "state": {"waiting": {"reason": waiting}}}]
    return one | {"status": state}


def system(name: str, node: str, labels: dict[str, str], *, ready: bool = True, waiting: str = "") -> Body:
    """A pod of the agents' namespace."""
    made = running(pod(name, node, **labels), ready=ready, waiting=waiting)
    made["metadata"]["namespace"] = "kube-system"
    made["spec"] |= {"hostNetwork": True, "containers": [{"name": "c", "image": IMAGE}]}
    return made


def endpoint(name: str) -> Body:
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "cilium.io/v2", "kind": "CiliumEndpoint", "metadata": metadata}


async def ask(folder: Path, *words: str) -> Result:
    """Run it beside the server, in a thread that knows nothing of this event loop."""
    arguments = ["cluster", "status", "--kubeconfig", str(folder / "kubeconfig"), *words]
    run = partial(CliRunner().invoke, cli, arguments)
    return await asyncio.get_running_loop().run_in_executor(None, run)


async def errors(folder: Path) -> list[str]:
    result = await ask(folder, "-o", "json")
    found: list[str] = json.loads(result.stdout)["errors"]
    assert result.exit_code == bool(found)
    return found


async def test_a_healthy_cluster_exits_0(well: Cluster, tmp_path: Path) -> None:
    result = await ask(tmp_path)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert lines[0].startswith(f"Cluster: {well.url} v1.")
    assert lines[1:] == [
        "Agents: 2 of 2 nodes have a ready one",
        "Operator: 1 of 1 ready",
        "Pods: 1 of 1 managed",
        f"Images: agents: {IMAGE} (2 pods)",
        f"Images: operators: {IMAGE} (1 pod)",
        "Errors: none",
    ]


async def test_each_fault_is_an_error_of_one_line(well: Cluster, tmp_path: Path) -> None:
    broken = system("cilium-node2", "node2", {"k8s-app": "cilium"}, ready=False, waiting="CrashLoopBackOff")
    well.put(broken)
    agent = "agent kube-system/cilium-node2 on node2: CrashLoopBackOff, restarted 4 times"
    assert await errors(tmp_path) == [agent]
    well.delete("Pod", "cilium-node2", "kube-system")
    assert await errors(tmp_path) == ["node node2: no agent runs there"]
    well.put(system("cilium-node2", "node2", {"k8s-app": "cilium"}))

    taint = {"key": "node.cilium.io/agent-not-ready", "effect": "NoExecute"}
    well.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node1"}, "spec": {"taints": [taint]}})
    assert await errors(tmp_path) == ["node node1: still has the taint node.cilium.io/agent-not-ready"]
    well.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node1"}, "spec": {}})

    well.delete("CiliumEndpoint", "web", "default")
    assert await errors(tmp_path) == ["pod default/web: not managed: it has no CiliumEndpoint"]
    well.put(endpoint("web"))

    well.put(system("operator-a", "node1", {"io.cilium/app": "operator"}, ready=False))
    (operator,) = await errors(tmp_path)
    assert operator.startswith("operator kube-system/operator-a: not ready")
    well.delete("Pod", "operator-a", "kube-system")
    (operator,) = await errors(tmp_path)
    assert operator.startswith("no pods with io.cilium/app=operator in namespace kube-system")


async def test_a_namespace_without_agents_is_an_error(well: Cluster, tmp_path: Path) -> None:
    result = await ask(tmp_path, "--namespace", "elsewhere")
    assert result.exit_code == 1
    assert "no pods with k8s-app=cilium in namespace elsewhere: is it installed" in " ".join(
        result.output.split()
    )


async def test_without_ciliumendpoints_pods_are_counted_alone(tmp_path: Path) -> None:
    async with cluster() as found:
        kubeconfig(tmp_path, found.url)
        result = await ask(tmp_path, "-o", "json")
        assert json.loads(result.stdout)["pods"] == {"managed": None, "all": 0}


async def test_every_page_of_a_long_list_counts(well: Cluster, tmp_path: Path) -> None:
    for number in range(600):
        well.put(running(pod(f"web-{number}")))
        well.put(endpoint(f"web-{number}"))
    result = await ask(tmp_path, "-o", "json")
    assert json.loads(result.stdout)["pods"] == {"managed": 601, "all": 601}


async def test_wait_ends_when_the_cluster_is_healthy(well: Cluster, tmp_path: Path) -> None:
    well.delete("CiliumEndpoint", "web", "default")
    before = len(well.server.requests)
    waiting = asyncio.ensure_future(ask(tmp_path, "--wait", "--timeout", "60"))
    await eventually(lambda: any("/pods" in path for _, path in well.server.requests[before:]))
    well.put(endpoint("web"))
    result = await waiting
    assert result.exit_code == 0, result.output


async def test_an_expired_wait_shows_the_errors(well: Cluster, tmp_path: Path) -> None:
    well.delete("CiliumEndpoint", "web", "default")
    result = await ask(tmp_path, "--wait", "--timeout", "1")
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "  pod default/web: not managed: it has no CiliumEndpoint"


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--kubeconfig", "nowhere"], "nowhere: No such file or directory; expected a kubeconfig"),
        (["--kubeconfig", "a:b"], "names several files"),
        (["--context", "other"], "contexts has no 'other'; it has: c"),
    ],
)
async def test_a_wrong_kubeconfig_is_one_line_and_exit_code_2(
    tmp_path: Path, words: list[str], wrong: str
) -> None:
    kubeconfig(tmp_path, "http://127.0.0.1:1")
    result = await ask(tmp_path, *words)
    assert result.exit_code == 2
    assert wrong in result.output


async def test_a_server_that_does_not_answer_is_exit_code_1(tmp_path: Path) -> None:
    kubeconfig(tmp_path, "http://127.0.0.1:1")
    result = await ask(tmp_path, "--timeout", "2")
    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.output
