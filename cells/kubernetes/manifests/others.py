"""Kinds in manifests that are not read: those of Kubernetes have no meaning here, others may be mistakes.

Needs: nothing.   Gives: mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from cells.kubernetes.objects import Kind

_OF_KUBERNETES: Final[Mapping[str, frozenset[str]]] = {
    group: frozenset(kinds.split())
    for group, kinds in {
        "": "Binding ComponentStatus ConfigMap Endpoints Event LimitRange PersistentVolume "
        "PersistentVolumeClaim PodTemplate ReplicationController ResourceQuota Secret ServiceAccount",
        "apps": "ControllerRevision DaemonSet Deployment ReplicaSet StatefulSet",
        "autoscaling": "HorizontalPodAutoscaler",
        "batch": "CronJob Job",
        "policy": "PodDisruptionBudget",
    }.items()
}
"""Kinds of Kubernetes 1.36 by group; every other group of its own ends in ``.k8s.io``."""
_OF_CILIUM: Final = frozenset(
    [
        "CiliumBGPAdvertisement",
        "CiliumBGPClusterConfig",
        "CiliumBGPNodeConfig",
        "CiliumBGPNodeConfigOverride",
        "CiliumBGPPeerConfig",
        "CiliumBGPPeeringPolicy",
        "CiliumClusterwideEnvoyConfig",
        "CiliumEnvoyConfig",
        "CiliumExternalWorkload",
        "CiliumGatewayClassConfig",
    ]
)


def mistake(api_version: str, name: str, kinds: Iterable[Kind[Any]]) -> str:
    """What is doubtful about a kind that is not read; empty for one that is for other programs."""
    group = api_version.rpartition("/")[0]
    by_name = {kind.kind: kind for kind in kinds}
    if name in by_name:
        kind = by_name[name]
        return "" if kind.api_version == api_version else f"{name} is read as {kind.api_version} only"
    if name in _OF_KUBERNETES.get(group, ()) or group.endswith(".k8s.io"):
        return ""
    if group == "cilium.io" and name in _OF_CILIUM:
        return f"{name} is not served"
    names = {*by_name, *_OF_KUBERNETES.get(group, ())}
    near = get_close_matches(name, sorted(names), n=1, cutoff=0.85)
    return f"{name} is not known" + (f"; is it {near[0]}?" if near else "")
