"""Compares objects of our chart with Cilium's, and lists the reason of each difference."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

DIFFERENT_KEYS: Final = {
    "prometheus-serve-addr": "metrics of agents are served by default",
    "cluster-pool-ipv4-cidr": "an empty list is omitted: the operator refuses to start without a value",
    "set-cilium-is-up-condition": "false is written explicitly, since the default is true",
    "remove-cilium-node-taints": "false is written explicitly, since the default is true",
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
UNSERVED: Final = "belongs to a feature that is not built"
HALF: Final = "Cilium's chart applies its value in some places only"
OWN: Final = "our init containers need neither a shell nor a copy of a program on the node"
LEAST: Final = "least privilege: only used capabilities are granted"
DIFFERENT: Final = (
    (r"/image$|/imagePullPolicy$", "our own image"),
    (r"containers/\[(cilium-agent|cilium-operator)\]/(command|args)", "our own command"),
    (r"initContainers/\[[a-z-]+\]/(command|args|env/\[(BIN_PATH|CGROUP_ROOT)|volumeMounts/\[~1hostbin)", OWN),
    (r"checksum$", "the checksum is that of our ConfigMap"),
    (r"volumes/\[cni-path\]", "the agent installs no plugin there, so nothing is mounted"),
    (r"(volumeMounts|volumes)/\[(.*bpf|bpf-maps)\]", HALF),
    (
        r"\[cilium-agent\]/volumeMounts/\[~1host~1proc~1sys~1net\]|volumes/\[host-proc-sys-net\]",
        "the agent reads /proc/sys/net itself",
    ),
    (
        r"securityContext/(capabilities/drop|seLinuxOptions)",
        "a privileged container needs no capability list",
    ),
    (
        r"\[cilium-operator\]/(liveness|readiness)Probe",
        "the kubelet does not reach the loopback of a pod's network",
    ),
    (
        r"PodDisruptionBudget/cilium-operator:/spec/maxUnavailable",
        "Kubernetes accepts only one of maxUnavailable and minAvailable",
    ),
    (r"\[mount-bpf-fs\]/", HALF),
    (r"/successThreshold$", "1 is Kubernetes' default"),
    (
        r"(volumeMounts|volumes)/\[.*envoy.*sockets\]",
        "the sockets are in the run directory, which is mounted",
    ),
    (
        r"(volumeMounts|volumes)/\[(~1lib~1modules|lib-modules|~1run~1xtables.lock|xtables-lock)\]",
        "the agent loads no modules and runs no iptables",
    ),
    (
        r"(volumeMounts|volumes)/\[(~1host~1proc~1sys~1kernel|host-proc-sys-kernel)\]",
        "the agent changes nothing there",
    ),
    (
        r"(volumeMounts|volumes)/\[(.*cgroupv2|cilium-cgroup)\]",
        "clean-cilium-state removes nothing from cgroups",
    ),
    (r"env/\[GOMEMLIMIT\]", "a setting of the Go runtime"),
    (r"\[cilium-agent\]/(liveness|readiness)Probe/exec", "our own command"),
    (r"lifecycle/postStart", "the agent does not change iptables rules of other programs"),
    (r"/capabilities/add$", LEAST),
    (r"/\[config\]/securityContext/|\[cilium-operator\]/securityContext/", LEAST),
    (
        r"(volumeMounts|volumes)/\[(~1etc~1cilium~1config-map|config-map)\]",
        "the agent follows the mounted ConfigMap",
    ),
    (r"clean-cilium-state\]/volumeMounts/\[.*\]", "clean-cilium-state also removes files of the plugin"),
    (
        r"template/metadata/annotations(/prometheus.io~1(port|scrape))?$|ports/\[prometheus\]",
        "metrics are served by default",
    ),
    (r"\[(envoy-admin|envoy-metrics)\]", UNSERVED),
    (r"ports/\[peer-service\]", "the port is listed only with Hubble metrics"),
    (
        r"containers/\[cilium-agent\]/ports/\[hubble-metrics\]",
        "the Service also needs it with metrics from a file",
    ),
    (r"\[cilium-agent\]/resources/requests", "the agent requests the resources that it needs"),
    (r"env/\[CILIUM_DEBUG\]", "debug is read from the ConfigMap"),
    (r"/labels/app.kubernetes.io~1part-of$", "all our objects have the label"),
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
