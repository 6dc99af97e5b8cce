"""BGP in the chart: its settings, rights and the speaker in a pod of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import chart
from tests.support.recordings import recorded as recording

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")

CONFIG = "ConfigMap/cilium-config"
SPEAKER = "DaemonSet/cilium-bgp-speaker"
OPERATORS = {f"{kind}/cilium-operator-bgp-control-plane-secrets" for kind in ("Role", "RoleBinding")}
"""Cilium's operator may read every Secret, by its ClusterRole."""


def rendered(**given: Any) -> dict[str, Any]:
    return chart.objects({"bgpControlPlane": {"enabled": True, **given}})


def test_objects_and_keys_are_those_of_cilium_s_chart() -> None:
    recorded = json.loads(recording("helm/feature-bgp-own-secrets-namespace").read_text())
    objects = chart.objects(recorded["values"])
    theirs = {key for key in recorded["diff"] if key != CONFIG}
    assert {one for one in objects if "bgp" in one} == theirs | {SPEAKER}
    keys = {key for key in objects[CONFIG]["data"] if "bgp" in key}
    assert keys - {"external-bgp-speaker"} == {
        pointer.removeprefix("/data/") for pointer in recorded["diff"][CONFIG]
    }
    (subject,) = objects["RoleBinding/cilium-bgp-control-plane-secrets"]["subjects"]
    assert (subject["name"], subject["namespace"]) == ("cilium", "kube-system")


def test_the_operator_may_see_which_secrets_there_are_where_it_reports_them() -> None:
    objects = rendered()
    assert objects.keys() >= OPERATORS
    assert objects["Role/cilium-operator-bgp-control-plane-secrets"]["metadata"]["namespace"] == "kube-system"


def test_without_bgp_no_bgp_object_is_rendered() -> None:
    objects = chart.objects({})
    assert [one for one in objects if "bgp" in one] == []
    assert [key for key in objects[CONFIG]["data"] if "bgp" in key] == []
    rules = [each for one in objects.values() for each in one.get("rules") or ()]
    assert "bgp" not in str(rules)


def test_the_speaker_is_called_where_the_agent_looks_and_may_do_nothing_else() -> None:
    objects = rendered()
    pod = objects[SPEAKER]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    agent = objects["DaemonSet/cilium"]["spec"]["template"]["spec"]
    run = next(one["hostPath"]["path"] for one in agent["volumes"] if one["name"] == "cilium-run")
    assert [one["hostPath"]["path"] for one in pod["volumes"]] == [f"{run}/bgp"]
    assert container["volumeMounts"] == [{"name": "bgp-run", "mountPath": "/var/run/cilium/bgp"}]
    assert "unix:///var/run/cilium/bgp/speaker.sock" in container["args"][0]
    assert ">>speaker.log" in container["args"][0], "where the agent reads why sessions ended"
    assert container["image"] == f"{agent['containers'][0]['image']}-bgp"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}
    assert pod["hostNetwork"]
    assert not pod["automountServiceAccountToken"], "it asks the API server for nothing"
    assert objects[CONFIG]["data"]["external-bgp-speaker"] == "true"


def test_without_a_speaker_pod_the_agent_starts_gobgpd() -> None:
    objects = rendered(speaker={"enabled": False})
    assert SPEAKER not in objects
    assert objects[CONFIG]["data"]["external-bgp-speaker"] == "false"
