"""Renders the chart and loads recordings of Cilium's, so that tests can compare values and ConfigMaps."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support import chart
from tests.support.recordings import recordings

DATA = recordings("helm")
NAMES = sorted(path.stem for path in DATA.glob("*.json") if path.stem not in {"default", "effects"})
EFFECTS: dict[str, Any] = json.loads((DATA / "effects.json").read_text())
"""The change that each value of Cilium's chart makes alone."""
CONFIG = "ConfigMap/cilium-config"
OF_INIT = {"clean-cilium-state", "clean-cilium-bpf-state", "cni-uninstall"}
"""Keys read by containers that run before the agent, or after its removal."""


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


def asked(name: str) -> dict[str, Any]:
    """Return a set's values with Hubble on, certgen's image and the API kinds of the recorded cluster."""
    given: dict[str, Any] = copy.deepcopy(load(name)["values"])
    given.setdefault("certgen", {"image": {"repository": "quay.io/cilium/certgen", "tag": "v0.2.1"}})
    if isinstance(hubble := given.setdefault("hubble", {}), dict):
        hubble.setdefault("enabled", True)
    if (load(name).get("rendered_with") or {}).get("extra_api_versions"):
        given.setdefault("prometheus", {}).setdefault("serviceMonitor", {})["trustCRDsExist"] = True
    return given


@cache
def served(name: str) -> tuple[dict[str, dict[str, Any]], frozenset[str]]:
    """Render the values of a set that our chart accepts; also return the paths of those it refuses.

    The objects are empty if the chart refuses the set whatever is removed.
    """
    given, left = asked(name), set[str]()
    while True:
        found = _rendered(name, given)
        if not isinstance(found, str):
            return found, frozenset(left)
        refused = re.search(r"\): ([\w.]+)[:=]", found)
        if refused is None or not _removed(given, refused[1]):
            return {}, frozenset(left)
        left.add(refused[1])


def _removed(given: dict[str, Any], path: str) -> bool:
    """Remove a value; return whether it existed."""
    *above, last = path.split(".")
    at: Any = given
    for step in above:
        at = at.get(step) if isinstance(at, dict) else None
    return isinstance(at, dict) and at.pop(last, ...) is not ...


@cache
def rendered(name: str) -> dict[str, dict[str, Any]] | str:
    """Return the objects that our chart renders of the set, or its error."""
    return _rendered(name, asked(name))


def _rendered(name: str, given: dict[str, Any]) -> dict[str, dict[str, Any]] | str:
    how = load(name).get("rendered_with") or {}
    try:
        return chart.objects(
            given,
            namespace=how.get("namespace", "kube-system"),
            release=how.get("release", "cilium"),
            kubernetes=how.get("kubernetes_version", ""),
        )
    except chart.RenderError as error:
        return str(error)


def recorded(name: str) -> dict[str, Any]:
    """Return ``Kind/name`` -> object, as Cilium's chart renders the set."""
    default: dict[str, Any] = load("default")["rendered"]
    found = copy.deepcopy(default)
    for key, changes in load(name)["diff"].items():
        for pointer, (_, new) in changes.items():
            if pointer and key not in found:
                continue  # one of those that are not compared
            if pointer:
                _put(found[key], pointer, new)
            elif new == "<absent>":
                found.pop(key, None)
            else:
                found[key] = copy.deepcopy(default[key] if new == "<as in default>" else new)
    return found


def _put(into: Any, pointer: str, new: Any) -> None:
    *path, last = pointer.split("/")[1:]
    for step in path:
        into = into[_within(into, step)]
    if last == "#order":
        return
    at = _within(into, last)
    if new == "<absent>":
        del into[at]
    elif at is None:
        into.append(new)
    else:
        into[at] = new


def _within(into: Any, step: str) -> Any:
    return _at(into, step) if isinstance(into, list) else _plain(step)


def _plain(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~")


def _at(among: list[Any], step: str) -> int | None:
    key, _, value = step[1:-1].partition("=")
    return next((i for i, one in enumerate(among) if one[key] == _plain(value)), None)


def comparable() -> list[str]:
    """Return the sets that Cilium's chart renders."""
    return [one for one in NAMES if "diff" in load(one)]


def recorded_keys(name: str) -> dict[str, str] | None:
    """Return the ConfigMap that Cilium's chart renders, empty if it renders none."""
    default = load("default")["rendered"][CONFIG]["data"]
    found = dict(default)
    for pointer, (_, new) in load(name)["diff"].get(CONFIG, {}).items():
        if not pointer:
            return None if new == "<absent>" else default if new == "<as in default>" else new["data"]
        key = pointer.removeprefix("/data/")
        if new == "<absent>":
            found.pop(key, None)
        elif key != pointer:
            found[key] = new
    return found


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
"""Output of the first version of the chart: keys of the ConfigMap, and immutable fields."""
