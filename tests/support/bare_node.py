"""An unprepared node with a kubelet and an API server, on which the image is deployed."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hive import syscalls
from hive.lab.node import Lab
from tests.support import chart
from tests.support.apiserver import ADMIN_TOKEN
from tests.support.containerd import Containerd
from tests.support.kubelet import Kubelet
from tests.support.runtime_place import RuntimePlace
from tests.unit.kubernetes.cluster import pod

NODE = "node1"
VALUES = {
    "operator": {"replicas": 1},
    "hubble": {"enabled": True, "listenAddress": ""},
    "ipam": {"operator": {"clusterPoolIPv4PodCIDRList": ["10.77.0.0/16"]}},
    "k8sClientRateLimit": {"operator": {"qps": 100, "burst": 100}},
}


def make_bare() -> None:
    """Remove the node's preparation: no bpffs, an empty sysctl.d, and shared mounts."""
    syscalls.mount("tmpfs", "/etc/sysctl.d", "tmpfs")
    syscalls.unmount("/sys/fs/bpf", syscalls.MNT_DETACH)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SHARED)


@contextmanager
def api_server(lab: Lab, folder: Path) -> Iterator[dict[str, str]]:
    """Run a fake API server in the node; return the variables that point pods to it. Its CA is beside the
    token.
    """
    objects = folder / "objects.yaml"
    known = [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}},
        pod("first", NODE),
        pod("second", NODE),
        chart.objects(VALUES)["ConfigMap/cilium-config"],
    ]
    objects.write_text("---\n".join(json.dumps(one) + "\n" for one in known))
    command = [sys.executable, "-m", "tests.support.apiserver", "--objects", str(objects)]
    with lab.open() as node:
        process = node.popen(command, stdout=subprocess.PIPE, cwd=Path.cwd())
    try:
        assert process.stdout is not None
        url, _, ca = process.stdout.readline().decode().split()
        account = folder / "account"
        account.mkdir()
        (account / "token").write_text(ADMIN_TOKEN)
        (account / "ca.crt").write_text(Path(ca.partition("=")[2]).read_text())
        (account / "namespace").write_text("kube-system")
        yield {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": url.rpartition(":")[2]}
    finally:
        process.terminate()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def bare_node(node: Lab, tmp_path: Path, *images: Path) -> Iterator[Kubelet]:
    """Run the kubelet of an unprepared node; the API server's files are in the folder."""
    with node.open() as namespaces, RuntimePlace(node, "containerd") as place:
        namespaces.run(make_bare)
        first = namespaces.start(lambda stop: stop.wait(300))
        # The first process that containers see under /hostproc is the node's, not this machine's.
        hostproc, plugins = tmp_path / "hostproc", tmp_path / "opt-cni-bin"
        (hostproc / "1").mkdir(parents=True)
        plugins.mkdir()
        namespaces.run(syscalls.mount, f"/proc/{first.pid}", hostproc / "1", "", syscalls.MS_BIND)
        node.cni_conf.parent.mkdir(exist_ok=True)
        paths = {
            "/var/run/cilium": Path("/run/cilium"),
            "/var/run/cilium/envoy": Path("/run/cilium/envoy"),
            "/opt/cni/bin": plugins,
            "/etc/cni/net.d": node.cni_conf.parent,
            "/proc": hostproc,
        }
        try:
            with (
                api_server(node, tmp_path) as env,
                Containerd(place, images=images, snapshotter="overlayfs") as runtime,
            ):
                yield Kubelet(runtime, tmp_path, NODE, env, tmp_path / "account", paths)
        finally:
            first.kill()


def create(server: Mapping[str, str], ca: Path, path: str, made: Mapping[str, Any]) -> int:
    """Create an object at the API server and return the HTTP status."""
    request = urllib.request.Request(
        f"https://127.0.0.1:{server['KUBERNETES_SERVICE_PORT']}{path}",
        data=json.dumps(made).encode(),
        headers={"authorization": f"Bearer {ADMIN_TOKEN}", "content-type": "application/json"},
    )
    context = ssl.create_default_context(cafile=str(ca))
    with urllib.request.urlopen(request, context=context, timeout=10) as answer:  # noqa: S310 - https
        return int(answer.status)
