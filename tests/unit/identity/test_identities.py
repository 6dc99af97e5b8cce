"""Identities and the labels they stand for."""

from __future__ import annotations

import hashlib

import anyio
import pytest

from cells.base.labels import DEFAULT_FILTER, Label, labels_sha256, parse
from cells.cluster.identity import families
from cells.cluster.identity.identities import (
    Identities,
    Identity,
    IdentityAllocator,
    NodeAllocator,
    NoIdentityError,
    identity_table,
)
from cells.cluster.identity.numbers import CLUSTER, INIT, INIT_LABELS, Scope, scope_for, scope_of
from tests.unit.identity.fakes import SlowAllocator

FIRST, LAST = CLUSTER[0], CLUSTER[-1]
WEB, DB = ("k8s:app=web",), ("k8s:app=db",)


@pytest.fixture
def identities() -> Identities:
    return over(NodeAllocator(CLUSTER))


def over(allocator: IdentityAllocator) -> Identities:
    return Identities(identity_table(), allocator)


def number(identities: Identities, labels: tuple[str, ...], previous: int = 0) -> int:
    """The number the labels get, which takes no waiting."""
    found = identities.acquire_now(labels, previous)
    assert found is not None
    return found.id


def test_the_same_labels_have_the_same_number(identities: Identities) -> None:
    assert number(identities, WEB) == number(identities, WEB) == FIRST
    assert number(identities, DB) == FIRST + 1
    assert identities.references(FIRST) == 2


def test_a_freed_number_is_not_reused_at_once(identities: Identities) -> None:
    first = number(identities, WEB)
    identities.release(first)
    assert identities.get(first) is None
    assert number(identities, DB) == first + 1


def test_reserved_identities_are_always_there(identities: Identities) -> None:
    assert number(identities, INIT_LABELS) == INIT
    identities.release(INIT)
    identities.release(INIT)
    assert identities.get(INIT) == Identity(INIT, INIT_LABELS)
    assert identities.references(INIT) == 0
    assert [identity.id for identity in identities.all()] == list(range(1, 12))


def test_a_restored_identity_keeps_its_number(identities: Identities) -> None:
    assert number(identities, WEB, previous=4711) == 4711
    assert number(identities, WEB) == 4711
    assert number(identities, DB) == 4712


@pytest.mark.parametrize("previous", [0, 1, 255, 65536, 1 << 24])
def test_a_number_that_cannot_be_an_endpoints_is_replaced(identities: Identities, previous: int) -> None:
    assert number(identities, WEB, previous) == FIRST


def test_two_label_sets_that_claim_one_number_get_two(identities: Identities) -> None:
    assert number(identities, WEB, previous=300) == 300
    assert number(identities, DB, previous=300) == 301


def test_a_held_number_is_given_only_to_its_restored_owner(identities: Identities) -> None:
    identities.hold(FIRST)
    assert number(identities, WEB) == FIRST + 1
    assert number(identities, DB, previous=FIRST) == FIRST


def test_a_number_that_is_held_no_more_is_free(identities: Identities) -> None:
    identities.hold(FIRST)
    identities.release_hold(FIRST)
    assert number(identities, WEB) == FIRST


def test_exhausted_identity_numbers_raise_an_error() -> None:
    few = over(NodeAllocator(range(256, 260)))
    for each in range(4):
        number(few, (f"k8s:n={each}",))
    with pytest.raises(NoIdentityError, match="no free identity between 256 and 259"):
        few.acquire_now(WEB)
    few.release(258)
    assert number(few, WEB) == 258


def test_prefixes_and_names_have_numbers_of_this_node_alone(identities: Identities) -> None:
    assert number(identities, ("cidr:192.0.2.0/24", "reserved:world")) == (1 << 24) + 1
    assert number(identities, ("k8s:app=web",)) == FIRST
    identities.release((1 << 24) + 1)
    assert identities.get((1 << 24) + 1) is None


@pytest.mark.parametrize(
    ("labels", "scope"),
    [
        (("k8s:app=web",), Scope.CLUSTER),
        (("cidr:10.0.0.0/8", "reserved:world"), Scope.LOCAL),
        (("fqdn:*.example.com", "reserved:world-ipv4"), Scope.LOCAL),
        (("cidr:10.0.0.0/8", "k8s:app=web"), Scope.CLUSTER),
        (("k8s:zone=a", "reserved:remote-node"), Scope.REMOTE_NODE),
    ],
)
def test_the_scope_follows_from_the_labels(labels: tuple[str, ...], scope: Scope) -> None:
    assert scope_for(labels) is scope


@pytest.mark.parametrize(
    ("number", "scope"),
    [
        (0, Scope.RESERVED),
        (11, Scope.RESERVED),
        (100, Scope.WELL_KNOWN),
        (128, Scope.CLUSTER),
        (256, Scope.CLUSTER),
        (1 << 17, Scope.CLUSTER),
        ((1 << 24) + 1, Scope.LOCAL),
        ((2 << 24) + 1, Scope.REMOTE_NODE),
    ],
)
def test_the_scope_follows_from_the_number(number: int, scope: Scope) -> None:
    assert scope_of(number) is scope


@pytest.mark.anyio
async def test_labels_that_several_wait_for_are_asked_for_once() -> None:
    cluster = SlowAllocator()
    identities, got = over(cluster), list[int]()

    async def ask() -> None:
        got.append((await identities.acquire(WEB)).id)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert identities.acquire_now(WEB) is None
        cluster.may_answer.set()
    assert (got, cluster.asked) == ([FIRST] * 3, [WEB])
    assert identities.references(FIRST) == 3
    assert number(identities, WEB) == FIRST


@pytest.mark.anyio
async def test_a_waiter_allocates_when_the_requester_gives_up() -> None:
    cluster = SlowAllocator()
    identities, got = over(cluster), list[int]()

    async def ask() -> None:
        got.append((await identities.acquire(WEB)).id)

    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as first:
            async with anyio.create_task_group() as inner:
                inner.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                tasks.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                first.cancel()
        await anyio.wait_all_tasks_blocked()
        cluster.may_answer.set()
    assert (got, cluster.asked) == ([FIRST], [WEB, WEB])
    assert identities.references(FIRST) == 1


@pytest.mark.anyio
async def test_a_refused_allocation_raises_no_identity_error() -> None:
    cluster = SlowAllocator()
    cluster.refuse = True
    cluster.may_answer.set()
    with pytest.raises(NoIdentityError, match="the cluster gives none"):
        await over(cluster).acquire(WEB)


def test_metrics_count_identities_by_scope_and_label_source(identities: Identities) -> None:
    number(identities, WEB)
    number(identities, ("cidr:192.0.2.0/24", "reserved:world"))
    counted, sources = families(identities)
    assert counted.series == {("reserved",): 11, ("cluster_local",): 1, ("node_local",): 1}
    assert sources.series == {("reserved",): 12, ("k8s",): 1, ("cidr",): 1}


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
def test_the_default_filter_selects_identity_labels(text: str, counts: bool) -> None:
    assert DEFAULT_FILTER.counts(parse(text)) is counts
