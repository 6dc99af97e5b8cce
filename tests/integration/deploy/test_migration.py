"""docs/operate/migrate-from-cilium.md: its commands print the shown output on Cilium's chart."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cells.operator.crds.definitions import definitions
from tests.integration.deploy.cluster import Here, here
from tests.integration.deploy.rendered import CONFIG, load
from tests.support.pages import ROOT, blocks, play, shell

__all__ = ["here"]
pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")
pytestmark = pytest.mark.timeout(300)

PAGE = ROOT / "docs" / "operate" / "migrate-from-cilium.md"
POLICY = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "closed", "namespace": "default"},
    "spec": {"podSelector": {}},
}


def cilium_chart(folder: Path) -> Path:
    """A chart that renders what Cilium's renders by default."""
    made: dict[str, Any] = load("default")["rendered"]
    made[CONFIG]["data"] = {key: value or "" for key, value in made[CONFIG]["data"].items()}
    (folder / "templates").mkdir(parents=True)
    (folder / "Chart.yaml").write_text("apiVersion: v2\nname: cilium\nversion: 1.17.0\n")
    for number, (name, body) in enumerate(made.items()):
        if not name.startswith(("Secret/", "ServiceMonitor/")) and "envoy" not in name:
            text = yaml.safe_dump(body).replace("{{", "{{`{{`}}")
            (folder / "templates" / f"{number}.yaml").write_text(text)
    return folder


def test_a_cluster_of_cilium_is_moved_as_the_page_shows(here: Here, tmp_path: Path) -> None:
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{app}-{end}", "namespace": "kube-system", "labels": {"k8s-app": app}},
            "spec": {"nodeName": "node-a", "containers": [{"name": app, "image": app}]},
        }
        for app, end in (("cilium", "4k2pv"), ("cilium-envoy", "w8t5n"))
    ]
    known = definitions(
        endpoints=False, endpoint_slices=False, local_redirects=False, egress_gateways=False, bgp=False
    )
    policies = [one.body for one in known if "networkpolic" in one.plural]
    for body in (*policies, POLICY):
        here.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    here.helm("install", "cilium", str(cilium_chart(tmp_path / "cilium")))
    for pod in pods:
        here.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    for body in policies:
        here.kubectl(
            "wait", "--for=condition=Established", f"crd/{body['metadata']['name']}", "--timeout=20s"
        )
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "bin").mkdir()
    helm = tmp_path / "bin" / "helm"
    helm.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.support.helm "$@"\n')
    helm.chmod(0o755)
    path = f"{helm.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with shell(tmp_path, {"PATH": path, "KUBECONFIG": str(here.kubeconfig)}) as process:
        for block in blocks(PAGE.read_text(encoding="utf-8")):
            if block.file:
                (tmp_path / block.file).write_text(block.text, encoding="utf-8")
            else:
                play(PAGE, block, process, columns=False)
    # The upgrade removed what only Cilium has and replaced objects of the same name.
    names = here.kubectl("-n", "kube-system", "get", "daemonset,deployment,configmap", "-o", "name").split()
    assert "daemonset.apps/cilium" in names
    assert not [name for name in names if "hubble" in name]
    image = "-o=jsonpath={.spec.template.spec.containers[0].image}"
    assert "hive-agent" in here.kubectl("-n", "kube-system", "get", "daemonset/cilium-envoy", image)
