"""The manifests: valid by Kubernetes' schemas, and consistent."""

from pathlib import Path
from typing import Any, Literal

import kubernetes_validate
import pytest
import yaml

from cells.agent import agent
from cells.operator import operator
from cells.unsupported import OTHERS
from lifecycle import Hive, Sources

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
FILES = sorted((CONFIGS / "manifests").glob("*.yaml"))
VERSIONS = ["1.30", "1.33", "1.36"]


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CONFIGS / "manifests" / name).read_text())
    return found


def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in [*pod["initContainers"], *pod["containers"]]}


@pytest.fixture
def pod() -> dict[str, Any]:
    spec: dict[str, Any] = load("daemonset.yaml")["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_kubernetes_takes_them(file: Path, version: str) -> None:
    for found in yaml.safe_load_all(file.read_text()):
        kubernetes_validate.validate(found, version, strict=True)


def test_strict_validation_finds_a_misspelt_field() -> None:
    wrong = load("daemonset.yaml")
    wrong["spec"]["template"]["spec"]["hostNetwerk"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_agent_and_operator_start_from_the_config_map(tmp_path: Path) -> None:
    for key, value in load("configmap.yaml")["data"].items():
        (tmp_path / key).write_text(value)
    used: set[str] = set()
    for process in (agent, operator):
        unknown: Literal["refuse", "ignore"] = "refuse" if process is agent else "ignore"
        sources = Sources([f"--config-dir={tmp_path}"], {}, unknown=unknown, others=OTHERS)
        hive = Hive(process, settings=sources)
        hive.check()
        used |= {one.option.name for one in hive.settings() if one.origin.startswith("file ")}
    assert used == load("configmap.yaml")["data"].keys()


def test_prometheus_is_sent_where_the_agent_serves(pod: dict[str, Any]) -> None:
    annotations = load("daemonset.yaml")["spec"]["template"]["metadata"]["annotations"]
    (port,) = containers(pod)["cilium-agent"]["ports"]
    assert load("configmap.yaml")["data"]["prometheus-serve-addr"] == f":{port['containerPort']}"
    assert annotations["prometheus.io/port"] == str(port["containerPort"]) == str(port["hostPort"])


def test_init_containers_run_in_the_documented_order(pod: dict[str, Any]) -> None:
    assert [one["name"] for one in pod["initContainers"]] == [
        "config",
        "mount-cgroup",
        "apply-sysctl-overwrites",
        "mount-bpf-fs",
        "clean-cilium-state",
        "install-cni-binaries",
    ]


def test_every_mount_has_its_volume_and_every_volume_its_use(pod: dict[str, Any]) -> None:
    used = {mount["name"] for one in containers(pod).values() for mount in one["volumeMounts"]}
    assert used == {volume["name"] for volume in pod["volumes"]}


def test_every_container_gives_up_all_it_does_not_need(pod: dict[str, Any]) -> None:
    for name, one in containers(pod).items():
        context = one["securityContext"]
        assert context.get("privileged", False) == (name == "mount-bpf-fs")
        if name != "mount-bpf-fs":
            assert context["capabilities"]["drop"] == ["ALL"]
    added = containers(pod)["cilium-agent"]["securityContext"]["capabilities"]["add"]
    assert added == ["NET_ADMIN", "SYS_ADMIN", "NET_RAW"]


def test_every_capability_has_a_reason() -> None:
    text = (CONFIGS / "manifests" / "daemonset.yaml").read_text()
    lines = text.splitlines()
    added = [
        line for line in lines if line.strip().removeprefix("- ").split(" ")[0].isupper() and "- " in line
    ]
    assert added
    assert all("#" in line for line in added)


def test_the_probes_ask_where_the_agent_answers(pod: dict[str, Any]) -> None:
    one = containers(pod)["cilium-agent"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = one[probe]["httpGet"]
        assert (asked["host"], asked["port"], asked["path"]) == ("127.0.0.1", 9879, "/healthz")


def test_every_account_has_a_role_that_is_bound_to_it() -> None:
    found = [one for file in FILES for one in yaml.safe_load_all(file.read_text())]
    accounts = {one["metadata"]["name"] for one in found if one["kind"] == "ServiceAccount"}
    bound = {
        subject["name"] for one in found if one["kind"] == "ClusterRoleBinding" for subject in one["subjects"]
    }
    assert bound == {"cilium", "cilium-operator"}
    assert accounts - bound == {"cilium-envoy"}, "Envoy asks the API server for nothing"


@pytest.mark.parametrize("name", ["daemonset.yaml", "operator.yaml"])
def test_every_pod_has_an_account_of_ours_and_its_token(name: str) -> None:
    found = [one for file in FILES for one in yaml.safe_load_all(file.read_text())]
    accounts = {one["metadata"]["name"] for one in found if one["kind"] == "ServiceAccount"}
    (spec,) = (
        one["spec"]["template"]["spec"]
        for one in yaml.safe_load_all((CONFIGS / "manifests" / name).read_text())
        if "template" in one["spec"]
    )
    assert spec["serviceAccountName"] in accounts
    assert spec["automountServiceAccountToken"] is True
