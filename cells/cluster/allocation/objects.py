"""What a CiliumIdentity object looks like, and which number labels are to have.

For:    CiliumIdentityAllocator. Needs: Label. Gives: body, labels_of, meaning, candidates.
Source: Cilium 1.17, CiliumIdentity and its labels.
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, Final

from cells.cluster.identity import CLUSTER, parse, texts
from cells.kubernetes import CILIUM_IDENTITIES

HEARTBEAT: Final = "io.cilium.heartbeat"
"""Annotation by which the operator marks an identity as unused."""
ATTEMPTS: Final = 16
"""Numbers that are tried for labels, before the next round."""
_NAMESPACE_LABELS: Final = "io.cilium.k8s.namespace.labels."


def body(number: int, labels: tuple[str, ...]) -> dict[str, Any]:
    """The object: labels for selectors are those of Kubernetes, without those of the namespace."""
    parsed = [parse(text) for text in labels]
    return {
        "apiVersion": CILIUM_IDENTITIES.api_version,
        "kind": CILIUM_IDENTITIES.kind,
        "metadata": {
            "name": str(number),
            "labels": {
                label.key: label.value
                for label in parsed
                if label.source == "k8s" and not label.key.startswith(_NAMESPACE_LABELS)
            },
        },
        "security-labels": dict(meaning(labels)),
    }


def meaning(labels: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The labels as ``security-labels`` of the object, sorted: what objects are found by."""
    parsed = [parse(text) for text in labels]
    return tuple(sorted((f"{label.source}:{label.key}", label.value) for label in parsed))


def labels_of(security_labels: Mapping[str, str]) -> tuple[str, ...]:
    """The labels of an object."""
    return texts(parse(f"{key}={value}" if value else key) for key, value in security_labels.items())


def candidates(labels: tuple[str, ...]) -> Iterator[int]:
    """Numbers to try for labels, the same on every node.

    So two nodes that want the same labels at once try the same number, and the API server lets one of them
    have it: the other finds the labels it wanted.
    """
    digest = sha256(";".join(labels).encode()).digest()
    for attempt in range(ATTEMPTS):
        part = int.from_bytes(sha256(digest + bytes([attempt])).digest()[:8], "big")
        yield CLUSTER.start + part % len(CLUSTER)
