"""Compares objects of our chart with Cilium's, and lists the reason of each difference."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

DIFFERENT_KEYS: Final = {
    "prometheus-serve-addr": "metrics of agents are served by default",
    "cluster-pool-ipv4-cidr": "an empty list is left out: the operator says that it needs one",
    "set-cilium-is-up-condition": "false is said, since left out it would mean true",
    "remove-cilium-node-taints": "false is said, since left out it would mean true",
}
"""Keys of the ConfigMap with other values than Cilium's, and the reasons."""
KINDS: Final = (
    *("DaemonSet", "Deployment", "ServiceAccount"),
    *("ServiceMonitor", "PodDisruptionBudget", "ResourceQuota"),
)
OBJECTS: Final = {
    *("Service/cilium-agent", "Service/cilium-operator", "ConfigMap/ip-masq-agent"),
    *("Service/hubble-metrics", "ConfigMap/cilium-dynamic-metrics-config"),
    *("ClusterRoleBinding/cilium", "ClusterRoleBinding/cilium-operator"),
}
APART: Final = {"DaemonSet/cilium-bgp-speaker", "ServiceAccount/hubble-generate-certs"}
"""Objects that Cilium's chart does not have, or of which the recording has only the name."""
UNSERVED: Final = "the part it is for is not built here"
HALF: Final = "Cilium's chart follows its own value by half"
OWN: Final = "commands of ours need neither shells nor a copy on the node"
LEAST: Final = "only what is used is allowed"
DIFFERENT: Final = (
    (r"/image$|/imagePullPolicy$", "images are our own"),
    (r"containers/\[(cilium-agent|cilium-operator)\]/(command|args)", "commands are our own"),
    (r"initContainers/\[[a-z-]+\]/(command|args|env/\[(BIN_PATH|CGROUP_ROOT)|volumeMounts/\[~1hostbin)", OWN),
    (r"checksum$", "the ConfigMap is another one"),
    (r"volumes/\[cni-path\]", "no plugin is put there, nothing is mounted"),
    (r"(volumeMounts|volumes)/\[(.*bpf|bpf-maps)\]", HALF),
    (
        r"\[cilium-agent\]/volumeMounts/\[~1host~1proc~1sys~1net\]|volumes/\[host-proc-sys-net\]",
        "the agent looks there",
    ),
    (r"securityContext/(capabilities/drop|seLinuxOptions)", "a privileged container needs no lists"),
    (
        r"\[cilium-operator\]/(liveness|readiness)Probe",
        "the kubelet does not reach the loopback of a pod's network",
    ),
    (r"PodDisruptionBudget/cilium-operator:/spec/maxUnavailable", "Kubernetes takes one of both"),
    (r"\[mount-bpf-fs\]/", HALF),
    (r"/successThreshold$", "1 is Kubernetes' default"),
    (r"(volumeMounts|volumes)/\[.*envoy.*sockets\]", "sockets are in the run directory, which is mounted"),
    (
        r"(volumeMounts|volumes)/\[(~1lib~1modules|lib-modules|~1run~1xtables.lock|xtables-lock)\]",
        "no module, no iptables",
    ),
    (
        r"(volumeMounts|volumes)/\[(~1host~1proc~1sys~1kernel|host-proc-sys-kernel)\]",
        "nothing there is changed",
    ),
    (
        r"(volumeMounts|volumes)/\[(.*cgroupv2|cilium-cgroup)\]",
        "nothing of cgroups is removed with the state",
    ),
    (r"env/\[GOMEMLIMIT\]", "a Go runtime's"),
    (r"\[cilium-agent\]/(liveness|readiness)Probe/exec", "commands are our own"),
    (r"lifecycle/postStart", "no iptables rules of others are touched"),
    (r"/capabilities/add$", LEAST),
    (r"/\[config\]/securityContext/|\[cilium-operator\]/securityContext/", LEAST),
    (
        r"(volumeMounts|volumes)/\[(~1etc~1cilium~1config-map|config-map)\]",
        "the agent sees the ConfigMap change",
    ),
    (r"clean-cilium-state\]/volumeMounts/\[.*\]", "what the plugin wrote is removed with the state"),
    (
        r"template/metadata/annotations(/prometheus.io~1(port|scrape))?$|ports/\[prometheus\]",
        "metrics are served by default",
    ),
    (r"\[(envoy-admin|envoy-metrics)\]", UNSERVED),
    (r"ports/\[peer-service\]", "it is listed with metrics of flows alone"),
    (
        r"containers/\[cilium-agent\]/ports/\[hubble-metrics\]",
        "a Service leads to it, also where a file has the metrics",
    ),
    (r"\[cilium-agent\]/resources/requests", "what an agent needs is asked for"),
    (r"env/\[CILIUM_DEBUG\]", "debug is read from the ConfigMap"),
    (r"/labels/app.kubernetes.io~1part-of$", "every object of ours has the label"),
)
"""Places that differ, and the reasons."""


def places(of: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Map JSON pointers to values; list elements go by name or mountPath, other lists are compared whole."""
    if isinstance(of, dict) and of:
        for key, value in of.items():
            yield from places(value, f"{at}/{key.replace('~', '~0').replace('/', '~1')}")
        return
    name = _name(of)
    if name:
        for one in of:
            rest = {key: value for key, value in one.items() if key != name}
            yield from places(rest or True, f"{at}/[{one[name].replace('/', '~1')}]")
    elif of not in (None, "", [], {}):
        yield at, json.dumps(of, sort_keys=True)


def _name(of: Any) -> str | None:
    if not isinstance(of, list) or not of or not all(isinstance(one, dict) for one in of):
        return None
    for key in ("mountPath", "name"):
        if all(key in one for one in of) and len({one[key] for one in of}) == len(of):
            return key
    return None


def compared(objects: Mapping[str, Any]) -> set[str]:
    """Return the objects to compare, by ``Kind/name``; pods of our own have separate tests."""
    compare = {key for key in objects if key in OBJECTS or key.partition("/")[0] in KINDS}
    return {key for key in compare if "envoy" not in key and key not in APART}


def why(key: str, place: str) -> str | None:
    """Return the reason for which a place may differ."""
    return next((reason for pattern, reason in DIFFERENT if re.search(pattern, f"{key}:{place}")), None)


def recorded_places(of: list[str] | str) -> set[str]:
    """Return the places at which Cilium's object changes, written as ours."""
    if isinstance(of, str):
        return {""}
    found = set()
    for one in of:
        named = re.sub(r"\[(?:name|mountPath)=([^\]]*)\]", lambda at: f"[{at[1].replace('/', '~1')}]", one)
        within = "/spec/template/" if named.startswith("pod:") else "/spec/template/spec/"
        found.add(named if named.startswith("/") else within + named.removeprefix("pod:"))
    return found


def within(place: str, others: set[str]) -> bool:
    """Return whether two places are equal or one contains the other."""
    plain = place.replace("~1", "/")
    return any(
        plain.startswith(other) or other.startswith(plain)
        for other in (one.replace("~1", "/") for one in others)
    )
