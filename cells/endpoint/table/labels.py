"""The labels of an endpoint: what the requester says, and what its pod's objects say.

For:   Endpoints, PodLabelsWatch.   Needs: LabelFilter.   Gives: called_labels, merged_labels, EndpointLabels.
Source: Cilium 1.17, PUT /endpoint and the labels of pods.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from cells.cluster.identity import (
    INIT_LABELS,
    RESERVED,
    Label,
    LabelFilter,
    parse,
    texts,
)
from cells.endpoint.table.model import Endpoint, EndpointError, EndpointRequest


class EndpointLabels(NamedTuple):
    """Labels by what they are for, each sorted."""

    identity: tuple[str, ...]
    info: tuple[str, ...] = ()
    custom: tuple[str, ...] = ()
    """Those for the identity that a user put on the endpoint."""


INIT = EndpointLabels(INIT_LABELS)
"""Of an endpoint of which nothing is known."""


def called_labels(request: EndpointRequest, cluster: str, keep: LabelFilter) -> EndpointLabels:
    """The labels of an endpoint by its request alone; the name of the ``cluster`` is on every pod.

    Raises EndpointError 400.
    """
    if not request.labels:
        return _namespace_labels(request.pod_namespace, cluster) if request.pod_namespace else INIT
    own = _of_namespace(request.pod_namespace, cluster) if request.pod_namespace else []
    given = _given(request)
    identity, info = keep.split(given.values())
    if not identity:
        raise EndpointError(400, "no valid labels provided")
    keys = {label.key for label in own}
    return EndpointLabels(texts([*(label for label in identity if label.key not in keys), *own]), texts(info))


@lru_cache(maxsize=1024)
def _namespace_labels(namespace: str, cluster: str) -> EndpointLabels:
    return EndpointLabels(texts(_of_namespace(namespace, cluster)))


def _of_namespace(namespace: str, cluster: str) -> list[Label]:
    """What every pod of the namespace has."""
    return [
        Label("k8s", "io.kubernetes.pod.namespace", namespace),
        Label("k8s", "io.cilium.k8s.policy.cluster", cluster),
    ]


def merged_labels(request: EndpointRequest, pod: Iterable[Label], keep: LabelFilter) -> EndpointLabels:
    """The labels of an endpoint by its pod; the request's are added where the pod has no such key.

    Raises EndpointError 400.
    """
    known = {label.key: label for label in pod}
    identity, info = keep.split((_given(request) | known).values())
    return EndpointLabels(texts(identity) or INIT_LABELS, texts(info))


def of_pod(endpoint: Endpoint, pod: Iterable[Label], keep: LabelFilter) -> EndpointLabels:
    """The labels of an endpoint there is, whose pod has these; a user's stay unless the pod has the key."""
    identity, info = keep.split(pod)
    keys = {label.key for label in identity}
    custom = [label for label in map(parse, endpoint.custom_labels) if label.key not in keys]
    return EndpointLabels(texts([*identity, *custom]) or INIT_LABELS, texts(info), texts(custom))


def with_custom(endpoint: Endpoint, wanted: Iterable[str], keep: LabelFilter) -> EndpointLabels:
    """The labels of an endpoint there is, once a user wants these on it.

    A label whose key the pod has already changes nothing, nor does one that makes no identity. Raises
    EndpointError 500 for reserved ones that are added or taken away.
    """
    before, after = set(map(parse, endpoint.custom_labels)), set(map(parse, wanted))
    reserved = texts(label for label in before ^ after if label.source == RESERVED)
    if reserved:
        raise EndpointError(500, f"Not allowed to add reserved labels: {','.join(reserved)}")
    own = [parse(text) for text in endpoint.pod_labels]
    keys = {label.key for label in own}
    custom: dict[str, Label] = {
        label.key: label
        for label in sorted(after)
        if label.key and label.key not in keys and keep.counts(label)
    }
    return EndpointLabels(texts([*own, *custom.values()]), endpoint.info_labels, texts(custom.values()))


def _given(request: EndpointRequest) -> dict[str, Label]:
    given = {label.key: label for label in map(parse, request.labels)}
    reserved = texts(label for label in given.values() if label.source == RESERVED)
    if reserved:
        raise EndpointError(400, f"not allowed to add reserved labels: {','.join(reserved)}")
    return given
