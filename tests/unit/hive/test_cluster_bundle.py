"""``hive cluster bundle``: its contents, without the cluster's secrets."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hive.redact import redacted, redacted_text
from tests.support.apiserver.exec import Command, Ended
from tests.unit.kubernetes.cluster import Body, Cluster, cluster, kubeconfig, pod

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[3]
KEY = "-----BEGIN RSA PRIVATE KEY-----\nhush01\n-----END RSA PRIVATE KEY-----"
JWT = "eyJhbGciOiJSUzI1NiIs.eyJzdWIiOiJodXNoMDIi.aHVzaDAz"
PLANTED: Body = {
    "env": [
        {"name": "DB", "value": "hush04"},
        {"name": "NODE", "valueFrom": {"secretKeyRef": {"name": "db"}}},
    ],
    "args": ["--password", "hush05", "--token=hush06", "--verbose"],
    "annotations": {
        "example.com/note": "hush07",
        "kubectl.kubernetes.io/last-applied-configuration": '{"password": "hush08"}',
        "cilium.io/info": "shown",
    },
    "data": {"kvstore-opt": '{"etcd.password": "hush09"}', "debug": "true", "tls-private-key": "hush10"},
    "headers": ["X-Token: hush11"],
    "headerMatches": [{"name": "X-Key", "value": "hush12", "secret": {"namespace": "default", "name": "s"}}],
    "note": f"refused: Authorization: Bearer hush13abc, {JWT}, https://user:hush14@example.com/ {KEY}",
    "clientSecret": {"inlineString": "hush15", "name": "shown"},
    "managedFields": [{"manager": "hush16"}],
    "secrets": ["hush17"],
}


def test_what_may_be_a_secret_goes_and_what_points_to_one_stays() -> None:
    found = redacted(PLANTED)
    text = json.dumps(found)
    assert "hush" not in text
    assert JWT not in text
    assert found["env"] == [{"name": "DB", "value": "(hidden)"}, PLANTED["env"][1]]
    assert found["args"] == ["--password", "(hidden)", "--token=(hidden)", "--verbose"]
    assert found["annotations"] == {"example.com/note": "(hidden)", "cilium.io/info": "shown"}
    assert found["data"]["debug"] == "true"
    assert found["headerMatches"][0]["secret"] == {"namespace": "default", "name": "s"}
    assert found["clientSecret"]["name"] == "shown"


@pytest.mark.parametrize(
    "line",
    [
        "identity 12345 of k8s:app=web has 3 endpoints",
        "secretRef of default/tls is followed, token: ",
        "10.0.0.1:8080 -> 10.0.0.2:53 dns=example.com password=false",
        "automountServiceAccountToken: false",
    ],
)
def test_ordinary_lines_stay_as_they_are(line: str) -> None:
    assert redacted_text(line) == line


def node_bundle() -> bytes:
    """As ``hive debug bundle`` of an older image writes it, which takes out less."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        files = {
            "agent/healthz.json": {"cilium": {"state": "Ok"}, "planted": PLANTED},
            "process/log.txt": f"password: hush20\n{KEY}\nready\n",
        }
        for name, content in files.items():
            raw = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            entry = tarfile.TarInfo(f"hive-debug-x/{name}")
            entry.size = len(raw)
            archive.addfile(entry, io.BytesIO(raw))
    return data.getvalue()


async def run(command: Command) -> Ended:
    if command.words[:2] == ["hive", "operator"]:
        return Ended(0, b'{"healthz": "ok"}', b"")
    assert command.words == ["hive", "debug", "bundle", "--file", "-"]
    if command.pod == "cilium-node2":
        return Ended(127, b"", b"hive: not found")
    return Ended(0, node_bundle(), b"")


def system(name: str, node: str, container: str, **labels: str) -> Body:
    made = pod(name, node, **labels)
    made["metadata"] |= {"namespace": "kube-system", "annotations": PLANTED["annotations"]}
    containers: list[Any] = [
        {"name": container, "image": "hive", "env": PLANTED["env"], "args": PLANTED["args"]}
    ]
    made["spec"] |= {"containers": containers}
    made["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    return made


def plant(found: Cluster) -> None:
    found.server.executor = run
    found.server.logs = lambda asked: f"{asked.pod} is ready, token=hush21\n{KEY}\n".encode()
    for name in ("node1", "node2"):
        found.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {}})
        found.put(system(f"cilium-{name}", name, "cilium-agent", **{"k8s-app": "cilium"}))
    found.put(system("operator-a", "node1", "cilium-operator", **{"io.cilium/app": "operator"}))
    metadata = {"name": "cilium-config", "namespace": "kube-system"}
    found.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": PLANTED["data"]})
    found.put(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {**metadata, "name": "other"}}
        | {"data": {"x": "hush22"}}
    )
    policy = {"apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy"}
    rules = [{"toPorts": [{"rules": {"http": [{"headers": PLANTED["headers"]}]}}]}]
    spec = {"endpointSelector": {}, "ingress": rules}
    found.put(policy | {"metadata": {"name": "http", "namespace": "default"}, "spec": spec})
    event = {"apiVersion": "events.k8s.io/v1", "kind": "Event", "type": "Warning", "note": PLANTED["note"]}
    found.put(event | {"metadata": {"name": "e", "namespace": "default"}})


async def collected(folder: Path, *words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "hive", "cluster", "bundle", "--kubeconfig", str(folder / "kubeconfig")]
    process = await asyncio.create_subprocess_exec(
        *command,
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'cmd'}"},
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


def files(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            one.name.partition("/")[2]: file.read().decode()
            for one in archive
            if (file := archive.extractfile(one)) is not None
        }


async def test_it_has_nodes_objects_events_and_logs_and_no_secret(tmp_path: Path) -> None:
    target = tmp_path / "all.tar.gz"
    async with cluster("ciliumnetworkpolicies", "ciliumendpoints") as found:
        kubeconfig(tmp_path, found.url)
        plant(found)
        code, out, err = await collected(tmp_path, "-f", str(target))
        again = await collected(tmp_path, "-f", str(target))
        asked = {target for method, target in found.server.requests if method == "GET"}
    assert code == 0, err
    assert out.startswith(f"{target}: ")
    assert out.endswith(" parts, with the bundles of 1 node\n")
    assert "not collected: nodes/node2: hive debug bundle --file - ends with 127: hive: not found\n" in err
    assert (again[0], "choose another --file" in again[2]) == (1, True)
    assert target.stat().st_mode & 0o777 == 0o600
    inside = files(target)
    assert inside.keys() >= {
        *("cluster/version.json", "errors.txt", "objects/nodes.json", "objects/pods.json"),
        *("objects/events.json", "objects/configmaps/cilium-config.json", "objects/services.json"),
        *("objects/ciliumnetworkpolicies.json", "objects/ciliumendpoints.json"),
        *("nodes/node1/agent/healthz.json", "nodes/node1/process/log.txt"),
        *("nodes/node1/log-cilium-agent.txt", "nodes/node2/log-cilium-agent.txt"),
        *("operators/operator-a/status.json", "operators/operator-a/log-cilium-operator.txt"),
    }
    assert {name for name, text in inside.items() if "hush" in text or JWT in text} == set()
    assert not any("secrets" in one for one in asked), "Secrets are not even read"
    assert "ready" in inside["nodes/node1/process/log.txt"]
    assert json.loads(inside["objects/ciliumnetworkpolicies.json"])[0]["metadata"]["name"] == "http"


async def test_without_any_bundle_of_a_node_it_fails_and_nothing_stays_of_wrong_usage(tmp_path: Path) -> None:
    target = tmp_path / "all.tar.gz"
    async with cluster() as found:
        kubeconfig(tmp_path, found.url)
        code, _, err = await collected(tmp_path, "-f", str(target))
        assert (code, target.exists()) == (1, True)
        assert "no pods with k8s-app=cilium in namespace kube-system" in err
        target.unlink()
        code, _, err = await collected(tmp_path, "-f", str(target), "--node", "none")
        assert (code, target.exists()) == (2, False)
        assert "no agent runs there" in err
