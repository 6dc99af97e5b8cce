"""The chart's values and ConfigMap as tests compare them."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support import chart
from tests.support.recordings import recordings

DATA = recordings("helm")
NAMES = sorted(path.stem for path in DATA.glob("*.json") if path.stem not in {"default", "effects"})
CONFIG = "ConfigMap/cilium-config"
OF_INIT = {"clean-cilium-state", "clean-cilium-bpf-state", "cni-uninstall"}
"""Keys that containers read which come before the agent, or go after it."""


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


def asked(name: str) -> dict[str, Any]:
    """The values of a set, Hubble on, certgen's image, and what an API server would report of its kinds."""
    given: dict[str, Any] = copy.deepcopy(load(name)["values"])
    given.setdefault("certgen", {"image": {"repository": "quay.io/cilium/certgen", "tag": "v0.2.1"}})
    if isinstance(hubble := given.setdefault("hubble", {}), dict):
        hubble.setdefault("enabled", True)
    if (load(name).get("rendered_with") or {}).get("extra_api_versions"):
        given.setdefault("prometheus", {}).setdefault("serviceMonitor", {})["trustCRDsExist"] = True
    return given


@cache
def rendered(name: str) -> dict[str, dict[str, Any]] | str:
    """What our chart makes of the set, or why it refuses."""
    how = load(name).get("rendered_with") or {}
    try:
        return chart.objects(
            asked(name),
            namespace=how.get("namespace", "kube-system"),
            release=how.get("release", "cilium"),
            kubernetes=how.get("kubernetes_version", ""),
        )
    except chart.RenderError as error:
        return str(error)


@cache
def known_keys() -> set[str]:
    table = yaml.safe_load((chart.CHART / "files" / "settings.yaml").read_text())
    return {one["key"] for one in table} | {
        "enable-wireguard",
        "encrypt-node",
        "wireguard-persistent-keepalive",
        "ces-rate-limits",
        "ces-slice-mode",
        "cni-chaining-mode",
        "enable-external-ips",
        "enable-host-port",
        "enable-node-port",
        "external-envoy-proxy",
        "enable-hubble-open-metrics",
        "hubble-disable-tls",
        "hubble-dynamic-metrics-config-path",
        "hubble-export-allowlist",
        "hubble-export-denylist",
        "hubble-export-fieldmask",
        "hubble-export-file-path",
        "hubble-flowlogs-config-path",
        "hubble-metrics",
        "hubble-metrics-server",
        "hubble-metrics-server-enable-tls",
        "hubble-metrics-server-tls-cert-file",
        "hubble-metrics-server-tls-client-ca-files",
        "hubble-metrics-server-tls-key-file",
        "hubble-redact-enabled",
        "hubble-redact-http-headers-allow",
        "hubble-redact-http-headers-deny",
        "hubble-redact-http-urlquery",
        "hubble-redact-http-userinfo",
        "hubble-redact-kafka-apikey",
        "hubble-tls-cert-file",
        "hubble-tls-client-ca-files",
        "hubble-tls-key-file",
        "kube-proxy-replacement",
        "kvstore",
        "kvstore-opt",
        "operator-api-serve-addr",
        "unmanaged-pod-watcher-interval",
        "set-cilium-node-taints",
        "write-cni-conf-when-ready",
    }


OLDER: dict[str, Any] = json.loads((Path(__file__).parent / "older_chart.json").read_text())
"""What the chart rendered when it was new: keys of the ConfigMap, and fields that are immutable."""
