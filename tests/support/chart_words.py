"""What values of the chart are for, where values.yaml has no comment: by the setting, or by their name."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import yaml

from cells.agent import agent
from cells.operator import LEADER, operator
from lifecycle.graph import sections

BY_NAME: Final = {
    "affinity": "Affinity of the pods (core/v1).",
    "annotations": "Annotations of the objects.",
    "automount": "Mount the account's token into pods.",
    "blockedConfigOverrides": "Settings that sources after the first may not set, with commas.",
    "cleanBpfState": "Have each agent's pod begin without programs and maps.",
    "confFileMountPath": "Where cni.configMap is mounted.",
    "configMap": "A ConfigMap with the configuration of the plugin.",
    "configMapKey": "Its key.",
    "binPath": "The directory of plugins on nodes.",
    "confPath": "The directory of network configurations on nodes.",
    "hostConfDirMountPath": "Where agents have it.",
    "create": "Make it; false where there is one.",
    "cilium": "Of agents.",
    "operator": "Of operators.",
    "digest": "The image's digest, used with useDigest.",
    "useDigest": "Name the image by its digest.",
    "dnsPolicy": "Where the pods' resolver is from (core/v1).",
    "enabled": "Have it, or not.",
    "endpoints": "Addresses of etcd, as https://etcd:2379.",
    "extraArgs": "More arguments of the container.",
    "extraContainers": "More containers of the pods.",
    "extraEnv": "More variables of the containers.",
    "extraHostPathMounts": "More paths of the node, and where containers have them.",
    "extraInitContainers": "More containers that run before the agent.",
    "extraVolumeMounts": "More mounts of the containers.",
    "extraVolumes": "More volumes of the pods.",
    "failureThreshold": "Failures in a row that count.",
    "hostRoot": "Where cgroup v2 is mounted.",
    "imagePullSecrets": "Secrets that images are pulled with.",
    "initResources": "Resources of the init containers (core/v1).",
    "interval": "How often Prometheus asks.",
    "jobLabel": "The label that names the job for Prometheus.",
    "label": "The label that Grafana looks for.",
    "labelValue": "Its value.",
    "labels": "More labels of the object.",
    "maxUnavailable": "How many may be away at a time.",
    "metricRelabelings": "Prometheus' relabelings of metrics.",
    "metricsService": "A headless Service for whoever asks for metrics.",
    "minAvailable": "How many must be there.",
    "name": "Its name.",
    "namespace": "Its namespace, when not the release's.",
    "nodeSelector": "Labels of the nodes that pods are on.",
    "override": "The whole name of the image, instead of repository and tag.",
    "periodSeconds": "Seconds between two probes.",
    "podAnnotations": "Annotations of the pods.",
    "podLabels": "More labels of the pods.",
    "podSecurityContext": "Security context of the pods (core/v1).",
    "port": "The port that metrics are served at.",
    "priorityClassName": "Priority class of the pods.",
    "privileged": "Let containers do everything.",
    "pullPolicy": "When images are pulled: IfNotPresent, Always or Never.",
    "relabelings": "Prometheus' relabelings of targets.",
    "replicas": "How many operators; one leads.",
    "repository": "Where the image is.",
    "resources": "Resources of the container (core/v1).",
    "rollOutPods": "Replace the pods when the settings change.",
    "seLinuxOptions": "SELinux' labels of the containers.",
    "securityContext": "Security context of the container (core/v1).",
    "tag": "The image's tag.",
    "terminationGracePeriodSeconds": "Seconds until a pod that was asked to end is killed.",
    "tolerations": "Taints of nodes that pods are on all the same.",
    "topologySpreadConstraints": "How the pods are spread over nodes (core/v1).",
    "updateStrategy": "How pods are replaced (apps/v1).",
    "applySysctlOverwrites": "Capabilities of the container that writes the sysctl settings.",
    "k8sServicePort": "The API server's port, with k8sServiceHost.",
    "keepDeprecatedProbes": "Probes by a command, as a DaemonSet of old has them.",
    "removeNodeTaints": "Take the taint agent-not-ready from nodes whose agent is ready.",
    "setNodeNetworkStatus": "Say NetworkUnavailable=False of nodes whose agent is ready.",
    "intervalSeconds": "Seconds between two looks.",
    "prefixMacMap": "MAC addresses of pods by how their names begin.",
}
"""Last part of a value's path -> what it is for."""


SETTINGS: Final = Path(__file__).resolve().parents[2] / "configs" / "chart" / "files" / "settings.yaml"


@cache
def _keys() -> dict[str, str]:
    """Path of a value -> its key in the ConfigMap."""
    table = yaml.safe_load(SETTINGS.read_text())
    return {one["value"]: one["key"] for one in table}


@cache
def _descriptions() -> dict[str, str]:
    """Key -> the first sentence of its documentation."""
    options = [option for section in sections(agent, operator, *LEADER) for option in section.options]
    return {option.name: option.help for option in options}


def words(path: str) -> str:
    """What the value is for; empty if it is not documented."""
    setting = _descriptions().get(_keys().get(path, ""), "")
    return setting or BY_NAME.get(path.rpartition(".")[2], "")
