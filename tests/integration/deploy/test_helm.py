"""The chart is installed, upgraded and removed by Helm's engine; the manifests by kubectl."""

from __future__ import annotations

import pytest

from tests.integration.deploy.cluster import Here, here
from tests.support import chart

__all__ = ["here"]

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")
pytestmark = pytest.mark.timeout(300)


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
