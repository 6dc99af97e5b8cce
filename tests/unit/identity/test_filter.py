"""Identity-relevant labels by the settings, and identities of well-known pods."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import structlog

from cells.base.labels import LabelFilter, parse, texts
from cells.cluster.identity import cell
from cells.cluster.identity.identities import Identities, NodeAllocator, identity_table
from cells.cluster.identity.numbers import CLUSTER, well_known_identities
from cells.config import AgentConfig, AgentSettings
from lifecycle import Hive, Lifecycle, StartError, invoke, supply

pytestmark = pytest.mark.anyio
LABELS = [
    "k8s:app=web",
    "k8s:tier=front",
    "k8s:pod-template-hash=1",
    "k8s:io.kubernetes.pod.namespace=default",
    "reserved:health",
    "cni:made-by=me",
]


def hive(**settings: str) -> Hive:
    known = AgentConfig(AgentSettings(cluster_name="blue"), Lifecycle("test"), structlog.get_logger())
    named = {name.replace("_", "-"): value for name, value in settings.items()}

    def needed(_: LabelFilter, __: Identities) -> None: ...

    return Hive(cell, supply(known), invoke(needed), settings=named)


async def retained(**settings: str) -> set[str]:
    async with hive(**settings).started() as running:
        return set(texts(running.get(LabelFilter).split(map(parse, LABELS))[0]))


ALWAYS = {"k8s:io.kubernetes.pod.namespace=default", "reserved:health"}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("", {"k8s:app=web", "k8s:tier=front", "cni:made-by=me"}),
        ("!tier", {"k8s:app=web", "cni:made-by=me"}),
        ("!k8s:tier k8s:!app", {"cni:made-by=me"}),
        ("k8s:app", {"k8s:app=web"}),
        ("app,tier", {"k8s:app=web", "k8s:tier=front"}),
        ("cni:.*", {"cni:made-by=me"}),
        ("k8s:.* !app", {"k8s:tier=front"}),
        ("pod-template-hash.*", set()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_rules_say_which_labels_make_identities(labels: str, expected: set[str]) -> None:
    assert await retained(labels=labels) == expected | ALWAYS


async def test_a_file_takes_the_place_of_the_default_rules(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.json"
    prefixes = [
        {"prefix": ".*", "source": "reserved"},
        {"prefix": "pod-template-hash", "source": "k8s"},
        {"prefix": "app", "source": "k8s", "invert": True},
    ]
    path.write_text(json.dumps({"version": 1, "valid-prefixes": prefixes}))
    assert await retained(label_prefix_file=str(path)) == {"k8s:pod-template-hash=1", "reserved:health"}
    both = await retained(label_prefix_file=str(path), labels="tier")
    assert both == {"k8s:pod-template-hash=1", "k8s:tier=front", "reserved:health"}


async def test_a_filter_with_only_exclusions_includes_all_other_labels(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.json"
    prefixes = [{"prefix": "tier", "source": "k8s", "invalid": True}]
    path.write_text(json.dumps({"version": 1, "valid-prefixes": prefixes}))
    assert await retained(label_prefix_file=str(path)) == set(LABELS) - {"k8s:tier=front"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "label-prefix-file=.*: Input data was truncated; expected"),
        ("[]", "Expected `object`, got `array`"),
        ('{"version": 2, "valid-prefixes": []}', "version 2"),
        ('{"version": 1, "valid-prefixes": [{"prefix": "a", "source": ""}]}', "prefix a: no source"),
        ('{"version": 1, "valid-prefixes": [{"prefix": "(", "source": "k8s"}]}', "regular expression"),
        ('{"version": 1, "valid-prefixes": [{"prefix": "", "source": "k8s"}]}', "regular expression"),
    ],
)
async def test_an_invalid_label_prefix_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prefixes.json"
    path.write_text(text)
    with pytest.raises(StartError, match=message):
        await retained(label_prefix_file=str(path))


async def test_a_missing_label_prefix_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"label-prefix-file=.*: No such file or directory"):
        await retained(label_prefix_file=str(tmp_path / "none"))


@pytest.mark.parametrize("labels", ["(", "k8s:", "!", "a[b"])
def test_invalid_label_rules_are_refused(labels: str) -> None:
    with pytest.raises(Exception, match=r"labels=.*: .*regular expression"):
        hive(labels=labels).check()


async def test_well_known_pods_have_the_same_numbers_everywhere() -> None:
    dns = texts(
        map(
            parse,
            (
                "k8s:k8s-app=kube-dns",
                "k8s:io.kubernetes.pod.namespace=kube-system",
                "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=kube-system",
                "k8s:io.cilium.k8s.policy.serviceaccount=coredns",
                "k8s:io.cilium.k8s.policy.cluster=blue",
            ),
        )
    )
    async with hive(enable_well_known_identities="true", k8s_namespace="cilium").started() as running:
        identities = running.get(Identities)
        found = await identities.acquire(dns, previous=4711)
        assert found.id == 112
        identities.release(found.id)
        assert identities.get(112) == found, "it is always there"
        numbers = [one.id for one in identities.all() if 100 <= one.id < 128]
        assert numbers == list(range(100, 116))
    async with hive().started() as running:
        assert (await running.get(Identities).acquire(dns)).id in CLUSTER


def test_well_known_identities_of_cilium_need_its_namespace() -> None:
    numbers = {number for number, _ in well_known_identities("default", "")}
    assert numbers == {102, 103, 104, 106, 110, 111, 112, 114}


def test_a_saved_number_of_a_well_known_identity_is_replaced() -> None:
    identities = Identities(identity_table(), NodeAllocator(CLUSTER))
    found = identities.acquire_now(("k8s:app=web",), previous=104)
    assert found is not None
    assert found.id in CLUSTER
