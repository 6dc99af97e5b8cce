"""Kubelets and controllers for pods of a lab's cluster: ``python -m tests.support.kubelets``, in its network.

Pods that are bound to a node get a network namespace by the CNI plugin and run their command in it; services
get EndpointSlices; a namespace that ends takes along what is in it. Agents' pods are not its own.
"""

from __future__ import annotations

import argparse
import json
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml

from hive.endpoint_slices import endpoint_slices
from hive.lab import pods
from hive.lab.cluster import Cluster
from hive.lab.node import Lab, LabError
from tests.support.apiserver import ADMIN_TOKEN

PAUSE: Final = 0.1
CONTENT: Final = {
    "pods": "api/v1",
    "events": "apis/events.k8s.io/v1",
    "services": "api/v1",
    "endpointslices": "apis/discovery.k8s.io/v1",
    "networkpolicies": "apis/networking.k8s.io/v1",
    "ciliumnetworkpolicies": "apis/cilium.io/v2",
    "ciliumendpoints": "apis/cilium.io/v2",
}
"""Kinds of objects in namespaces."""


def exec_script(folder: Path) -> Path:
    """Return a program for NAMESPACE POD CONTAINER COMMAND...: it runs in the place that where_file() has
    recorded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "exec"
    path = Path(sys.executable).parent
    script.write_text(
        f'#!/bin/sh\nread -r where < "{folder}/where-$2" || exit 126\nshift 3\n'
        f'exec nsenter $where env PATH="{path}:$PATH" "$@"\n'
    )
    script.chmod(0o755)
    return script


def where_file(folder: Path, pod: str, lab: Lab, *, own: bool) -> None:
    """Record where a pod's commands run: in a network namespace of its own, or in its node."""
    net = lab.directory / "pods" / pod if own else lab.directory / "net"
    (folder / f"where-{pod}").write_text(f"--net={net} --mount={lab.directory / 'mnt'}\n")


class Kubelets:
    """All kubelets and controllers of a cluster in one."""

    def __init__(self, kubeconfig: Path, labs: dict[str, Lab], folder: Path) -> None:
        (cluster,) = yaml.safe_load(kubeconfig.read_text())["clusters"]
        self._server = cluster["cluster"]["server"]
        self._tls = ssl.create_default_context(cafile=cluster["cluster"]["certificate-authority"])
        self._labs = labs
        self._folder = folder
        self._script = exec_script(folder)
        self._running: dict[tuple[str, str], subprocess.Popen[bytes]] = {}

    def step(self) -> None:
        """Compare objects with processes once, and act on the differences."""
        ended = {
            one["metadata"]["name"]
            for one in self._list("/api/v1/namespaces")
            if one["status"]["phase"] == "Terminating"
        }
        for pod in self._list("/api/v1/pods"):
            if "hive-check" in (pod["metadata"].get("labels") or {}):
                self._pod(pod)
        known = self._list("/api/v1/pods")
        for service in self._list("/api/v1/services"):
            for slice_ in endpoint_slices(service, known, "kubelets"):
                self._slice(slice_)
        for name in ended:
            self._end(name)

    def close(self) -> None:
        """End all processes."""
        for process in self._running.values():
            process.kill()
            process.wait()

    def _pod(self, pod: dict[str, Any]) -> None:
        metadata, spec = pod["metadata"], pod["spec"]
        key = metadata["namespace"], metadata["name"]
        lab = self._labs[spec["nodeName"]]
        if metadata.get("deletionTimestamp"):
            self._stop(key, lab, own=not spec.get("hostNetwork"))
            self._ask("DELETE", f"{_path(key)}?gracePeriodSeconds=0")
            return
        if key in self._running or pod["status"]["phase"] != "Pending":
            return
        own = not spec.get("hostNetwork")
        try:
            attached = pods.add(lab, key[1], key[0]) if own else None
        except LabError as error:
            self._waiting(pod, str(error))
            return
        addresses = [attached.ipv4, attached.ipv6] if attached else []
        where_file(self._folder, key[1], lab, own=own)
        (container,) = spec["containers"]
        self._running[key] = subprocess.Popen([self._script, *key, "probe", *container["command"]])
        pod["status"] = {
            "phase": "Running",
            "podIPs": [{"ip": ip} for ip in addresses if ip],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        if addresses:
            pod["status"]["podIP"] = pod["status"]["podIPs"][0]["ip"]
        self._ask("PUT", f"{_path(key)}/status", pod)

    def _waiting(self, pod: dict[str, Any], why: str) -> None:
        """Set the status of a pod with a sandbox that cannot be created."""
        metadata = pod["metadata"]
        event = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.sandbox", "namespace": metadata["namespace"]},
            "regarding": {"kind": "Pod", "name": metadata["name"], "namespace": metadata["namespace"]},
            "type": "Warning",
            "reason": "FailedCreatePodSandBox",
            "note": why[:1024],
            "eventTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "action": "Binding",
            "reportingController": "kubelet",
            "reportingInstance": "kubelet",
        }
        self._ask("POST", f"/apis/events.k8s.io/v1/namespaces/{metadata['namespace']}/events", event)

    def _stop(self, key: tuple[str, str], lab: Lab, *, own: bool) -> None:
        if (process := self._running.pop(key, None)) is not None:
            process.kill()
            process.wait()
        if own and key[1] in lab.pods():
            pods.delete(lab, key[1], key[0])

    def _slice(self, wanted: dict[str, Any]) -> None:
        metadata = wanted["metadata"]
        path = f"/apis/discovery.k8s.io/v1/namespaces/{metadata['namespace']}/endpointslices"
        found = self._ask("GET", f"{path}/{metadata['name']}")
        if found is None:
            self._ask("POST", path, wanted)
        elif found["endpoints"] != wanted["endpoints"] or found.get("ports") != wanted.get("ports"):
            self._ask("PUT", f"{path}/{metadata['name']}", found | {
                "endpoints": wanted["endpoints"], "ports": wanted.get("ports"),
            })  # fmt: skip

    def _end(self, namespace: str) -> None:
        """Delete the content of a terminating namespace; remove the namespace once it is empty."""
        left = 0
        for plural, group in CONTENT.items():
            for one in self._list(f"/{group}/namespaces/{namespace}/{plural}"):
                left += 1
                if not one["metadata"].get("deletionTimestamp"):
                    self._ask("DELETE", f"/{group}/namespaces/{namespace}/{plural}/{one['metadata']['name']}")
        if not left:
            found = self._ask("GET", f"/api/v1/namespaces/{namespace}")
            if found is not None:
                found["spec"] = {"finalizers": []}
                self._ask("PUT", f"/api/v1/namespaces/{namespace}/finalize", found)

    def _list(self, path: str) -> list[dict[str, Any]]:
        found = self._ask("GET", path)
        items: list[dict[str, Any]] = (found or {}).get("items") or []
        return items

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the API server's answer; None on not found, a conflict, or a terminating namespace."""
        request = urllib.request.Request(  # noqa: S310  # the address is ours
            self._server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._tls) as answer:  # noqa: S310
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code in {403, 404, 409}:
                return None
            raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()}") from error


def _path(key: tuple[str, str]) -> str:
    return f"/api/v1/namespaces/{key[0]}/pods/{key[1]}"


def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.kubelets", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="of the exec script")
    parser.add_argument("--cluster", required=True, help="of the lab")
    parser.add_argument("nodes", nargs="+", help="names of its nodes, in order")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    labs = dict(zip(given.nodes, Cluster(given.cluster).nodes(), strict=True))
    kubelets = Kubelets(given.kubeconfig, labs, given.folder)
    try:
        while True:
            kubelets.step()
            time.sleep(PAUSE)  # it stands for watches
    finally:
        kubelets.close()


if __name__ == "__main__":
    main()
