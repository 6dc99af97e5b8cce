"""The labels of an endpoint to be: what the requester says, and what its pod's namespace adds.

For:   Endpoints.   Needs: values.   Gives: labels_of.
Source: Cilium 1.17, PUT /endpoint and the labels of pods.
"""

from cells.cluster.identity import INIT_LABELS, RESERVED, Label, parse, split_identity_labels, texts
from cells.endpoint.model import EndpointError, EndpointRequest


def labels_of(request: EndpointRequest, cluster: Label) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Identity labels and informing labels; ``cluster`` is on every pod. Raises EndpointError 400."""
    namespace = Label("k8s", "io.kubernetes.pod.namespace", request.pod_namespace)
    own = [namespace, cluster] if request.pod_namespace else []
    if not request.labels:
        return (texts(own) if own else INIT_LABELS), ()
    given = {label.key: label for label in map(parse, request.labels)}
    reserved = texts(label for label in given.values() if label.source == RESERVED)
    if reserved:
        raise EndpointError(400, f"not allowed to add reserved labels: {','.join(reserved)}")
    identity, info = split_identity_labels(given.values())
    if not identity:
        raise EndpointError(400, "no valid labels provided")
    keys = {label.key for label in own}
    return texts([*(label for label in identity if label.key not in keys), *own]), texts(info)
