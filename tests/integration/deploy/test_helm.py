"""The chart at an API server: installed, upgraded, removed by Helm's own engine; the manifests by kubectl."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import chart
from tests.support.pages import ROOT

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")
pytestmark = pytest.mark.timeout(300)


class Here:
    """A user of a cluster."""

    def __init__(self, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"

    def run(self, *command: str, stdin: str = "") -> str:
        """What a command prints; it must succeed."""
        env = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.kubeconfig.parent)}
        done = subprocess.run(
            command, cwd=ROOT, env=env, input=stdin, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def helm(self, *arguments: str) -> str:
        """Helm, in the namespace of the pages."""
        return self.run(sys.executable, "-m", "tests.support.helm", *arguments, "--namespace=kube-system")

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """The real one."""
        assert shutil.which("kubectl"), "kubectl is not installed: apt-get install kubernetes-client"
        return self.run("kubectl", *arguments, stdin=stdin)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    found = Here(tmp_path)
    command = [sys.executable, "-m", "tests.support.apiserver", "--kubeconfig", str(found.kubeconfig)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            yield found
        finally:
            server.terminate()


def test_helm_installs_upgrades_and_removes_the_chart(here: Here) -> None:
    printed = here.helm("install", "cilium", "configs/chart", "--set=routingMode=native")
    assert "STATUS: deployed\nREVISION: 1\n" in printed
    get = ("-n", "kube-system", "get")
    assert "cilium" in here.kubectl(*get, "daemonset,deployment,configmap", "-o", "name")
    mode = (*get, "configmap", "cilium-config", "-o", "jsonpath={.data.routing-mode}")
    assert here.kubectl(*mode) == "native"
    printed = here.helm("upgrade", "cilium", "configs/chart", "--reuse-values", "--set=debug.enabled=true")
    assert "REVISION: 2" in printed
    assert here.kubectl(*mode) == "native"
    here.helm("uninstall", "cilium")
    assert here.kubectl(*get, "daemonset,deployment,configmap", "-o", "name") == ""


def test_the_manifests_are_applied_without_helm(here: Here) -> None:
    applied = here.kubectl("apply", "-f", "configs/manifests/").splitlines()
    assert {line.rpartition(" ")[2] for line in applied} == {"created"}
    assert len(applied) == len(chart.objects({}))
