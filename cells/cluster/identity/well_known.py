"""Identities of well-known pods: their numbers are the same in every cluster, so nodes need not agree on
them.

For:    the table of identities. Needs: nothing. Gives: well_known_identities().
Source: Cilium 1.17, well-known identities: each twice, without and with the label of the namespace's name.
"""

from collections.abc import Iterator
from typing import Final

FIRST: Final = 100
_DNS, _CILIUM = "kube-system", ""
_EKS = "eks.amazonaws.com/component"
_OPERATOR = ("name=cilium-operator", "io.cilium/app=operator", "app.kubernetes.io/part-of=cilium")
_ETCD = "io.cilium/app=etcd-operator"
_PODS: Final = (
    (_CILIUM, "cilium-etcd-sa", (_ETCD,)),
    (_CILIUM, "default", ("app=etcd", "etcd_cluster=cilium-etcd", _ETCD)),
    (_DNS, "kube-dns", ("k8s-app=kube-dns",)),
    (_DNS, "kube-dns", ("k8s-app=kube-dns", f"{_EKS}=kube-dns")),
    (_DNS, "coredns", ("k8s-app=kube-dns",)),
    (_CILIUM, "cilium-operator", (*_OPERATOR, "app.kubernetes.io/name=cilium-operator")),
    (_DNS, "coredns", ("k8s-app=kube-dns", f"{_EKS}=coredns")),
    (
        _CILIUM,
        "cilium-etcd-operator",
        (
            "name=cilium-etcd-operator",
            _ETCD,
            "app.kubernetes.io/part-of=cilium",
            "app.kubernetes.io/name=cilium-etcd-operator",
        ),
    ),
)
"""Namespace (empty: Cilium's), service account and labels, by number."""


def well_known_identities(cluster: str, namespace: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Numbers and sorted labels; ``namespace`` is that of Cilium's pods, without it theirs are left out."""
    for number, (where, account, own) in enumerate(_PODS, FIRST):
        if not (found := where or namespace):
            continue
        labels = [
            *own,
            f"io.kubernetes.pod.namespace={found}",
            f"io.cilium.k8s.policy.serviceaccount={account}",
            f"io.cilium.k8s.policy.cluster={cluster}",
        ]
        named = [*labels, f"io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name={found}"]
        yield number, tuple(sorted(f"k8s:{label}" for label in labels))
        yield number + len(_PODS), tuple(sorted(f"k8s:{label}" for label in named))
