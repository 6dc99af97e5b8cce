"""The chart: what is generated of it, and how it is rendered with Helm's own engine.

``python -m tests.support.chart`` writes what follows from values.yaml: the paths of values, the schema, and
configs/manifests, which are the chart with its default values.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from cells.proxy.envoy.resources import EnvoyFiles
from tests.support.chart_words import words
from tests.support.envoy import external_bootstrap

CONFIGS: Final = Path(__file__).resolve().parents[2] / "configs"
CHART: Final = CONFIGS / "chart"
MANIFESTS: Final = CONFIGS / "manifests"
OPEN: Final = (
    "commonLabels",
    "extraConfig",
    "apiRateLimit",
    "certgen.affinity",
    "certgen.annotations.cronJob",
    "certgen.annotations.job",
    "certgen.nodeSelector",
    "certgen.podLabels",
    "certgen.resources",
    "cni.resources",
    "cni.prefixMacMap",
    "resources",
    "initResources",
    "annotations",
    "podAnnotations",
    "podLabels",
    "nodeSelector",
    "affinity",
    "updateStrategy",
    "ipMasqAgent.config",
    "podSecurityContext",
    "securityContext.seLinuxOptions",
    "cgroup.autoMount.resources",
    "dashboards.annotations",
    "hubble.annotations",
    "hubble.metrics.serviceAnnotations",
    "hubble.metrics.serviceMonitor.annotations",
    "hubble.metrics.serviceMonitor.labels",
    "hubble.metrics.serviceMonitor.tlsConfig",
    "hubble.relay.nodeSelector",
    "hubble.relay.podAnnotations",
    "hubble.relay.podLabels",
    "hubble.relay.resources",
    "hubble.tls.auto.certManagerIssuerRef",
    "prometheus.serviceMonitor.labels",
    "prometheus.serviceMonitor.annotations",
    "resourceQuotas.cilium",
    "resourceQuotas.operator",
    "operator.prometheus.serviceMonitor.labels",
    "operator.prometheus.serviceMonitor.annotations",
    "operator.podSecurityContext",
    "operator.securityContext",
    "ipam.operator.autoCreateCiliumPodIPPools",
    "operator.resources",
    "operator.annotations",
    "operator.podAnnotations",
    "operator.podLabels",
    "operator.nodeSelector",
    "operator.affinity",
    "operator.updateStrategy",
    "bgpControlPlane.speaker.resources",
    "bgpControlPlane.speaker.nodeSelector",
    "bgpControlPlane.speaker.updateStrategy",
    "envoy.resources",
    "envoy.annotations",
    "envoy.podAnnotations",
    "envoy.podLabels",
    "envoy.nodeSelector",
    "envoy.affinity",
    "envoy.updateStrategy",
    "envoy.securityContext.seLinuxOptions",
    "serviceAccounts.cilium.annotations",
    "serviceAccounts.envoy.annotations",
    "serviceAccounts.hubblecertgen.annotations",
    "serviceAccounts.operator.annotations",
)
"""Values with content of the user's own."""
UNSET: Final = {
    "daemon.configSources": "string",
    "daemon.allowedConfigOverrides": "string",
    "daemon.blockedConfigOverrides": "string",
    "k8sClientRateLimit.qps": "number",
    "k8sClientRateLimit.burst": "integer",
    "k8sClientRateLimit.operator.qps": "number",
    "k8sClientRateLimit.operator.burst": "integer",
    "bpf.ctTcpMax": "integer",
    "bpf.disableExternalIPMitigation": "boolean",
    "bpf.hostLegacyRouting": "boolean",
    "bpf.ctAnyMax": "integer",
    "bpf.mapDynamicSizeRatio": "number",
    "sessionAffinity": "boolean",
    "dnsProxy.enableTransparentMode": "boolean",
    "cni.chainingMode": "string",
    "cni.chainingTarget": "string",
    "certgen.image.override": "string",
    "certgen.ttlSecondsAfterFinished": "integer",
    "image.override": "string",
    "envoy.enabled": "boolean",
    "envoy.image.override": "string",
    "bgpControlPlane.speaker.image.override": "string",
    "envoy.log.defaultLevel": "string",
    "operator.image.override": "string",
    "prometheus.metrics": "array",
    "prometheus.serviceMonitor.metricRelabelings": "array",
    "operator.prometheus.serviceMonitor.relabelings": "array",
    "operator.prometheus.serviceMonitor.metricRelabelings": "array",
    "upgradeCompatibility": "string",
    "policyAuditMode": "boolean",
    "agentAdmissionPolicy.enabled": "boolean",
    "labels": "string",
    "l2announcements.leaseDuration": "string",
    "l2announcements.leaseRenewDeadline": "string",
    "l2announcements.leaseRetryPeriod": "string",
    "nodePort.range": "string",
    "nodePort.directRoutingDevice": "string",
    "loadBalancer.mode": "string",
    "maglev.hashSeed": "string",
    "loadBalancer.algorithm": "string",
    "loadBalancer.serviceTopology": "boolean",
    "socketLB.hostNamespaceOnly": "boolean",
    "socketLB.terminatePodConnections": "boolean",
    "cni.readCniConf": "string",
    "hubble.eventBufferCapacity": "integer",
    "hubble.eventQueueSize": "integer",
    "hubble.metrics.enabled": "array",
    "hubble.metrics.serviceMonitor.metricRelabelings": "array",
    "hubble.relay.dialTimeout": "string",
    "hubble.relay.retryTimeout": "string",
    "hubble.relay.sortBufferDrainTimeout": "string",
    "hubble.relay.sortBufferLenMax": "integer",
    "hubble.skipUnknownCGroupIDs": "boolean",
}
"""The types of values that have no default."""
UNTYPED: Final = {
    "hubble.eventBufferCapacity",
    "hubble.eventQueueSize",
    "loadBalancer.serviceTopology",
    "policyAuditMode",
    "sessionAffinity",
    "socketLB.hostNamespaceOnly",
    "socketLB.terminatePodConnections",
}
"""Values that have no type in Cilium's chart: text is taken, too, as --set-string gives it."""
WITHOUT_EFFECT: Final = {
    "authentication.gcInterval": "string",
    "authentication.queueSize": "integer",
    "authentication.rotatedIdentitiesQueueSize": "integer",
    "dnsProxy.socketLingerTimeout": "integer",
    "envoy.initialFetchTimeoutSeconds": "integer",
    "envoy.log.format": "string",
    "iptablesRandomFully": "boolean",
    "logSystemLoad": "boolean",
    "monitor.enabled": "boolean",
    "nat.mapStatsEntries": "integer",
    "nat.mapStatsInterval": "string",
    "operator.image.alibabacloudDigest": "string",
    "operator.image.awsDigest": "string",
    "operator.image.azureDigest": "string",
    "operator.image.genericDigest": "string",
    "operator.image.suffix": "string",
    "operator.pprof.address": "string",
    "operator.pprof.enabled": "boolean",
    "operator.pprof.port": "integer",
    "pprof.address": "string",
    "pprof.enabled": "boolean",
    "pprof.port": "integer",
    "prometheus.controllerGroupMetrics": "array",
}
"""The types of values that are taken and change nothing, where Cilium's chart has one."""
OF_KUBERNETES: Final = {
    "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution": "array",
    "envoy.securityContext.seLinuxOptions.level": "string",
    "envoy.securityContext.seLinuxOptions.type": "string",
    "operator.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution": "array",
    "operator.updateStrategy.type": "string",
    "podSecurityContext.appArmorProfile.type": "string",
    "securityContext.seLinuxOptions.level": "string",
    "securityContext.seLinuxOptions.type": "string",
    "updateStrategy.type": "string",
}
"""The types of fields of Kubernetes in values of the user's own, where Cilium's chart has one."""
NEEDED: Final = (
    "bgpControlPlane.secretsNamespace.name",
    "cgroup.hostRoot",
    "cni.binPath",
    "cni.confFileMountPath",
    "cni.confPath",
    "cni.hostConfDirMountPath",
    "daemon.runPath",
    "envoy.healthPort",
    "envoy.prometheus.port",
    "ipv4.enabled",
    "operator.prometheus.port",
    "operator.replicas",
    "operator.unmanagedPodWatcher.intervalSeconds",
    "prometheus.port",
    "scheduling.mode",
    "securityContext.capabilities.ciliumAgent",
    "serviceAccounts.cilium.name",
    "serviceAccounts.envoy.name",
    "serviceAccounts.hubblecertgen.name",
    "serviceAccounts.operator.name",
)
"""Values that cannot be null. Others, being null, leave out a key or a field."""
NULLABLE: Final = {
    "bpf.events",
    "bpf.events.drop",
    "bpf.events.policyVerdict",
    "bpf.events.trace",
    "debug",
    "dnsProxy",
    "endpointRoutes",
    "externalIPs",
    "hostFirewall",
    "hostPort",
    "ipam.operator",
    "ipv6",
    "k8s",
    "k8sClientRateLimit",
    "k8sClientRateLimit.operator",
    "k8sNetworkPolicy",
    "loadBalancer.protocolDifferentiation",
    "nodePort",
    "sctp",
    "socketLB",
    "wellKnownIdentities",
}
"""Sections that can be null: then their keys are left out."""
EITHER: Final = {
    "k8sServicePort": ("string", "integer"),
    "ipam.operator.clusterPoolIPv4PodCIDRList": ("array", "string"),
    "ipam.operator.clusterPoolIPv6PodCIDRList": ("array", "string"),
}
"""Values of one of several types."""
ANYTHING: Final = (
    "devices",
    "kubeProxyReplacement",
    "hubble.relay.listenPort",
    "maglev.tableSize",
    "nodePort.addresses",
    "policyCIDRMatchMode",
    "operator.setNodeTaints",
    "operator.podDisruptionBudget.maxUnavailable",
)
"""Values of more than one type."""
FILES: Final = {
    "configmap.yaml": ("configmap.yaml",),
    "daemonset.yaml": ("daemonset.yaml",),
    "envoy.yaml": ("envoy.yaml",),
    "serviceaccount.yaml": ("serviceaccounts.yaml",),
    "operator.yaml": ("operator.yaml",),
    "rbac.yaml": ("rbac-agent.yaml", "rbac-operator.yaml", "admission.yaml"),
}
"""Manifest -> templates."""
HEADER: Final = "# Generated from configs/chart with its default values: python -m tests.support.chart\n"


class RenderError(Exception):
    """The chart refuses these values; the text has the reason."""


def values() -> dict[str, Any]:
    """The chart's default values."""
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def paths(of: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Every path of a value that is not a map, or an empty or open one."""
    for name, value in of.items():
        path = f"{at}.{name}".lstrip(".")
        if isinstance(value, dict) and value and path not in OPEN:
            yield from paths(value, path)
        else:
            yield path


def needed() -> list[str]:
    """Sections and values that cannot be null, sections before what is in them."""
    sections: set[str] = set()
    for path in paths(values()):
        above = path.split(".")[:-1]
        sections |= {".".join(above[:depth]) for depth in range(1, len(above) + 1)}
    return sorted({*sections - NULLABLE, *NEEDED})


def schema() -> dict[str, Any]:
    """The schema of values: their types, and what the comments of values.yaml say."""
    found = _schema(values(), "", comments())
    for texts, text in (
        (WITHOUT_EFFECT, "Taken as by Cilium's chart, and without effect."),
        (OF_KUBERNETES, "A field of Kubernetes."),
    ):
        for path, kind in texts.items():
            *above, last = path.split(".")
            at = found
            for name in above:
                at = at.setdefault("properties", {}).setdefault(name, {"type": ["object", "null"]})
            at.setdefault("properties", {})[last] = {"description": text, "type": [kind, "null"]}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart", **found}


def _schema(of: Mapping[str, Any], at: str, descriptions: Mapping[str, str]) -> dict[str, Any]:
    properties = {name: _type(value, f"{at}.{name}".lstrip("."), descriptions) for name, value in of.items()}
    return {"type": "object", "properties": properties}


def _type(value: Any, path: str, descriptions: Mapping[str, str]) -> dict[str, Any]:
    text = descriptions.get(path) or (
        "" if isinstance(value, dict) and value and path not in OPEN else words(path)
    )
    described = {"description": text} if text else {}
    if path in OPEN:
        return {**described, "type": ["object", "null"]} if path != "apiRateLimit" else described
    if isinstance(value, dict):
        return {**described, **_schema(value, path, descriptions)}
    if path in UNSET:
        kinds = [UNSET[path], *(["string"] if path in UNTYPED else []), "null"]
        return {**described, "type": kinds}
    if path in EITHER:
        return {**described, "type": [*EITHER[path], "null"]}
    if value is None or path in ANYTHING:
        return described
    types = {bool: "boolean", int: "integer", str: "string", list: "array", float: "number"}
    return {**described, "type": [types[type(value)], "null"]}


def comments() -> dict[str, str]:
    """Path -> the comment before it in values.yaml."""
    found: dict[str, str] = {}
    at: list[tuple[int, str]] = []
    held: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        text = line.strip()
        if text.startswith("#"):
            held.append(text.removeprefix("#").strip())
        elif match := re.match(r"^( *)([A-Za-z0-9]+):", line):
            depth = len(match[1])
            at = [one for one in at if one[0] < depth] + [(depth, match[2])]
            if held:
                found[".".join(name for _, name in at)] = " ".join(held)
            held = []
        else:
            held = []
    return found


@cache
def _loaded(kubernetes: str = "") -> Any:
    """The chart; for a version of Kubernetes, a copy that states it: the engine cannot be asked for one."""
    import helm_python

    if not kubernetes:
        return helm_python.Chart.load(CHART)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(CHART, Path(folder) / "chart"))
        for path in (copy / "templates").iterdir():
            path.write_text(path.read_text().replace(".Capabilities.KubeVersion.Version", f'"{kubernetes}"'))
        return helm_python.Chart.load(copy)


def render(
    given: Mapping[str, Any], *, namespace: str = "kube-system", release: str = "cilium", kubernetes: str = ""
) -> dict[str, str]:
    """Template -> what Helm's engine makes of it. Raises RenderError."""
    import helm_python

    try:
        chart = _loaded(kubernetes)
        chart.validate_schema(dict(given))
        found = chart.render(dict(given), name=release, namespace=namespace)
    except helm_python.HelmError as error:
        raise RenderError(str(error)) from error
    return {name.rpartition("/")[2]: text for name, text in found.items()}


def objects(
    given: Mapping[str, Any], *, namespace: str = "kube-system", release: str = "cilium", kubernetes: str = ""
) -> dict[str, dict[str, Any]]:
    """``Kind/name`` -> object. Raises RenderError."""
    found: dict[str, dict[str, Any]] = {}
    for name, text in render(given, namespace=namespace, release=release, kubernetes=kubernetes).items():
        if name.endswith(".yaml"):
            for one in yaml.load_all(text, Loader=yaml.CSafeLoader):
                if one:
                    found[f"{one['kind']}/{one['metadata']['name']}"] = one
    return found


def generated() -> dict[Path, str]:
    """File -> what shall be in it, but for the manifests."""
    listed = sorted(set(paths(values())) - set(OPEN))
    bootstrap = external_bootstrap(EnvoyFiles(Path("/var/run/cilium/envoy")), "127.0.0.1", 9878, 9964)
    return {
        CHART / "files" / "known.txt": "".join(f"{one}\n" for one in listed),
        CHART / "files" / "needed.txt": "".join(f"{one}\n" for one in needed()),
        CHART / "files" / "open.txt": "".join(f"{one}\n" for one in OPEN),
        CHART / "files" / "dashboard.json": (CONFIGS / "grafana" / "hive-agent.json").read_text(),
        CHART / "files" / "envoy-bootstrap.json": json.dumps(bootstrap, indent=2) + "\n",
        CHART / "values.schema.json": json.dumps(schema(), indent=2, ensure_ascii=False) + "\n",
    }


def manifests() -> dict[Path, str]:
    """File -> the chart with its default values."""
    found = render({})
    texts = {name: "---\n".join(_tidy(found[one]) for one in parts) for name, parts in FILES.items()}
    return {MANIFESTS / name: HEADER + text for name, text in texts.items()}


def _tidy(text: str) -> str:
    """Without the empty lines that templates leave."""
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines() if line.strip())


def main() -> None:
    """Write everything that is generated."""
    for of in (generated, manifests):
        for path, text in of().items():
            path.write_text(text)
            sys.stdout.write(f"{path.relative_to(CONFIGS)}\n")


if __name__ == "__main__":
    main()
