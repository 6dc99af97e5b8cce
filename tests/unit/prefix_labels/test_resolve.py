"""The labels that all sources give a prefix determine its identity."""

from __future__ import annotations

import pytest

from cells.cluster.identity.numbers import HOST, KUBE_APISERVER, REMOTE_NODE, WORLD
from cells.cluster.ipcache.rows import Source
from cells.cluster.prefix_labels import PrefixFacts, PrefixLabels, resolved

NODE_WITH_LABELS = (2 << 24) + 1
OF_RULES = (1 << 24) + 1
POD = 4711
REMOTE = ("reserved:remote-node",)


def spoken(*labels: str, resource: str = "one", override: bool = False) -> PrefixLabels:
    return PrefixLabels(
        prefix="192.0.2.1/32",
        resource=resource,
        source=Source.CUSTOM_RESOURCE,
        labels=labels,
        override=override,
    )


@pytest.mark.parametrize(
    ("known", "labels"),
    [
        (PrefixFacts(), ("reserved:blue", "reserved:kube-apiserver", "reserved:world")),
        (
            PrefixFacts(WORLD, ("reserved:world",)),
            ("reserved:blue", "reserved:kube-apiserver", "reserved:world"),
        ),
        (
            PrefixFacts(around=("cidr:192.0.2.0/24",), world=("reserved:world-ipv4",)),
            ("cidr:192.0.2.0/24", "reserved:blue", "reserved:kube-apiserver", "reserved:world-ipv4"),
        ),
        (
            PrefixFacts(OF_RULES, ("cidr:192.0.2.1/32", "reserved:world"), around=("cidr:192.0.2.1/32",)),
            ("cidr:192.0.2.1/32", "reserved:blue", "reserved:kube-apiserver", "reserved:world"),
        ),
        (
            PrefixFacts(REMOTE_NODE, REMOTE, around=("cidr:192.0.2.0/24",)),
            ("reserved:blue", "reserved:kube-apiserver", "reserved:remote-node"),
        ),
        (
            PrefixFacts(NODE_WITH_LABELS, ("cidr:192.0.2.1/32", "node:role=worker", *REMOTE)),
            (
                "cidr:192.0.2.1/32",
                "reserved:blue",
                "node:role=worker",
                "reserved:kube-apiserver",
                "reserved:remote-node",
            ),
        ),
        (PrefixFacts(POD, ("k8s:app=web",)), None),
        (PrefixFacts(HOST, ("reserved:host",)), None),
        (PrefixFacts(KUBE_APISERVER, ("reserved:kube-apiserver", *REMOTE)), None),
    ],
)
def test_labels_of_all_sources_and_of_what_is_known_already_are_one_set(
    known: PrefixFacts, labels: tuple[str, ...] | None
) -> None:
    both = [spoken("reserved:kube-apiserver"), spoken("reserved:blue", resource="two")]
    assert resolved(both, known) == (labels and tuple(sorted(labels)))
    assert resolved([], known) is None


def test_who_overrides_is_alone_even_over_this_node_and_pods() -> None:
    both = [spoken("reserved:blue"), spoken("reserved:ingress", resource="two", override=True)]
    for known in (PrefixFacts(), PrefixFacts(HOST, ("reserved:host",)), PrefixFacts(POD, ("k8s:app=web",))):
        assert resolved(both, known) == ("reserved:ingress",)
    contradicting = [*both, spoken("reserved:health", resource="a", override=True)]
    assert resolved(contradicting, PrefixFacts()) == ("reserved:health",)


def test_what_is_in_the_cluster_by_its_labels_is_not_of_the_world() -> None:
    mixed = spoken("reserved:health", "reserved:world", "cidr:192.0.2.0/24")
    assert resolved([mixed], PrefixFacts(around=("cidr:192.0.2.0/24",))) == ("reserved:health",)
