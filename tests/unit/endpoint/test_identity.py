"""Identities and the labels they stand for."""

import hashlib

import pytest

from cells.endpoint import (
    FIRST_IDENTITY,
    INIT,
    INIT_LABELS,
    LAST_IDENTITY,
    Identities,
    Label,
    labels_sha256,
    parse,
)
from cells.endpoint.identity import NoIdentityError
from cells.endpoint.labels import is_identity_label

WEB, DB = ("k8s:app=web",), ("k8s:app=db",)


def test_the_same_labels_have_the_same_number() -> None:
    identities = Identities()
    assert identities.acquire(WEB).id == identities.acquire(WEB).id == FIRST_IDENTITY
    assert identities.acquire(DB).id == FIRST_IDENTITY + 1


def test_a_freed_number_is_not_reused_at_once() -> None:
    identities = Identities()
    first = identities.acquire(WEB).id
    identities.release(first)
    assert identities.acquire(DB).id == first + 1


def test_reserved_identities_are_always_there() -> None:
    identities = Identities()
    assert identities.acquire(INIT_LABELS).id == INIT
    identities.release(INIT)
    identities.release(INIT)
    kept = identities.get(INIT)
    assert kept is not None
    assert kept.references == 0
    assert [identity.id for identity in identities.all()] == list(range(1, 12))


def test_a_restored_identity_keeps_its_number() -> None:
    identities = Identities()
    assert identities.restore(4711, WEB).id == 4711
    assert identities.acquire(WEB).id == 4711
    assert identities.acquire(DB).id == 4712


@pytest.mark.parametrize("number", [0, 1, 255, 65536, 1 << 24])
def test_a_number_that_cannot_be_an_endpoints_is_replaced(number: int) -> None:
    assert Identities().restore(number, WEB).id == FIRST_IDENTITY


def test_two_label_sets_that_claim_one_number_get_two() -> None:
    identities = Identities()
    assert identities.restore(300, WEB).id == 300
    assert identities.restore(300, DB).id == 301


def test_a_held_number_goes_to_nobody_but_its_restored_owner() -> None:
    identities = Identities()
    identities.hold(FIRST_IDENTITY)
    assert identities.acquire(WEB).id == FIRST_IDENTITY + 1
    assert identities.restore(FIRST_IDENTITY, DB).id == FIRST_IDENTITY


def test_there_is_an_end_to_the_numbers() -> None:
    identities = Identities()
    for number in range(FIRST_IDENTITY, LAST_IDENTITY + 1):
        identities.restore(number, (f"k8s:n={number}",))
    with pytest.raises(NoIdentityError, match="no free identity between 256 and 65535"):
        identities.acquire(WEB)
    identities.release(4711)
    assert identities.acquire(WEB).id == 4711


def test_the_digest_is_over_the_serialised_labels() -> None:
    assert labels_sha256(("reserved:host",)) == hashlib.sha256(b"reserved:host=;").hexdigest()
    expected = hashlib.sha256(b"k8s:a=1;k8s:b=;").hexdigest()
    assert labels_sha256(("k8s:b", "k8s:a=1")) == expected


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("k8s:app=web", Label("k8s", "app", "web")),
        ("reserved:init", Label("reserved", "init")),
        ("$host", Label("reserved", "host")),
        ("app=a:b", Label("unspec", "app", "a:b")),
        ("app", Label("unspec", "app")),
        ("k8s:app=a=b", Label("k8s", "app", "a=b")),
    ],
)
def test_labels_have_a_source_a_key_and_a_value(text: str, label: Label) -> None:
    assert parse(text) == label


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("k8s:app=web", True),
        ("reserved:health", True),
        ("k8s:io.kubernetes.pod.namespace=default", True),
        ("k8s:io.kubernetes.container.name=x", False),
        ("k8s:app.kubernetes.io/name=x", True),
        ("k8s:pod-template-hash=1", False),
        ("k8s:statefulset.kubernetes.io/pod-name=x", False),
        ("k8s:io.cilium.k8s.policy.cluster=default", True),
        ("k8s:annotation.x=1", False),
    ],
)
def test_the_default_filter_tells_identity_labels_from_others(text: str, counts: bool) -> None:
    assert is_identity_label(parse(text)) is counts
