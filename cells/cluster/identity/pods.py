"""The labels of a pod, as identities and policies know them.

For:    endpoints of pods, and explanations of policies. Needs: Label. Gives: pod_labels().
Source: Cilium 1.17, labels derived from pods and their namespaces.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from cells.cluster.identity.labels import Label

NAMESPACE: Final = "io.kubernetes.pod.namespace"
NAMESPACE_LABELS: Final = "io.cilium.k8s.namespace.labels"
SERVICE_ACCOUNT: Final = "io.cilium.k8s.policy.serviceaccount"
CLUSTER: Final = "io.cilium.k8s.policy.cluster"
_DERIVED: Final = frozenset({NAMESPACE, SERVICE_ACCOUNT, CLUSTER})
_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"


def pod_labels(
    own: Mapping[str, str],
    *,
    namespace: str,
    namespace_labels: Mapping[str, str],
    service_account: str,
    cluster: str,
) -> Iterator[Label]:
    """Every label of a pod, whether it counts for its identity or not.

    What a pod's own labels claim of its namespace, service account or cluster is left out: users who create
    pods
    must not choose whose policies they fall under. The API server labels every namespace with its name.
    """
    for key, value in own.items():
        if key not in _DERIVED and not key.startswith(f"{NAMESPACE_LABELS}."):
            yield Label("k8s", key, value)
    for key, value in ({_NAMESPACE_NAME: namespace} | dict(namespace_labels)).items():
        yield Label("k8s", f"{NAMESPACE_LABELS}.{key}", value)
    yield Label("k8s", NAMESPACE, namespace)
    yield Label("k8s", CLUSTER, cluster)
    if service_account:
        yield Label("k8s", SERVICE_ACCOUNT, service_account)
