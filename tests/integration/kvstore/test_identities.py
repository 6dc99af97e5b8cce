"""Identity allocation through etcd: the same number for the same labels on every node."""

from __future__ import annotations

import anyio
import pytest

from cells.cluster.allocation.keys import encode
from cells.cluster.identity.identities import Identities
from cells.cluster.identity.numbers import CLUSTER, ClusterNumbers
from lifecycle import StartError
from tests.integration.kvstore.agreeing import STATE, agent, keys, until
from tests.support.etcd import Etcd

pytestmark = pytest.mark.anyio

WEB = ("k8s:app.kubernetes.io/name=web", "k8s:app=web", "k8s:io.kubernetes.pod.namespace=default")
DB = ("k8s:app=db", "k8s:empty", "k8s:io.kubernetes.pod.namespace=default")
WEB_TEXT = "k8s:app=web;k8s:app.kubernetes.io/name=web;k8s:io.kubernetes.pod.namespace=default;"


async def test_identity_keys_have_the_layout_of_cilium(etcd: Etcd) -> None:
    async with agent(etcd) as identities:
        web = await identities.acquire(WEB)
        assert web.id in CLUSTER
        assert keys(etcd, "id") == {str(web.id): WEB_TEXT}
        assert keys(etcd, "value") == {f"{WEB_TEXT}/192.0.2.1": str(web.id)}
        assert not etcd.lease_of(f"{STATE}id/{web.id}")
        assert etcd.lease_of(f"{STATE}value/{WEB_TEXT}/192.0.2.1")
        await until(lambda: not keys(etcd, "locks"))


async def test_nodes_that_want_the_same_labels_at_once_get_the_same_number(etcd: Etcd) -> None:
    async with agent(etcd, 1) as one, agent(etcd, 2) as other:
        found: dict[str, set[int]] = {"web": set(), "db": set()}

        async def ask(which: str, at: Identities) -> None:
            found[which].add((await at.acquire(WEB if which == "web" else DB)).id)

        async with anyio.create_task_group() as tasks:
            for at in (one, other, one, other):
                tasks.start_soon(ask, "web", at)
                tasks.start_soon(ask, "db", at)
        (web,), (db,) = found["web"], found["db"]
        assert keys(etcd, "id") == {str(web): encode(WEB), str(db): encode(DB)}
        await until(lambda: len(keys(etcd, "value")) == 4)


async def test_a_node_knows_what_the_others_numbers_stand_for(etcd: Etcd) -> None:
    async with agent(etcd, 1) as one, agent(etcd, 2) as other:
        web = await one.acquire(WEB)
        await until(lambda: other.by_labels(WEB) == web)
        etcd.put(f"{STATE}id/4711", "k8s:app=told;")  # as a Cilium agent would
        await until(lambda: other.get(4711))
        etcd.delete(f"{STATE}id/4711")
        await until(lambda: other.get(4711) is None)


async def test_labels_wait_while_every_free_number_is_in_the_kernels_maps(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("allocatable", "own"):
        monkeypatch.setattr(ClusterNumbers, name, range(256, 259))
    etcd.put(f"{STATE}id/256", "k8s:app=other;")
    async with agent(etcd) as identities, anyio.create_task_group() as tasks:
        await until(lambda: identities.get(256))
        for number in (257, 258):
            identities.hold(number)
        found: list[int] = []

        async def ask() -> None:
            found.append((await identities.acquire(WEB)).id)

        tasks.start_soon(ask)
        await until(lambda: keys(etcd, "locks"))
        await until(lambda: not keys(etcd, "locks"))
        assert not found
        identities.release_hold(258)
        await until(lambda: found == [258])


async def test_the_key_of_a_node_is_deleted_with_the_last_use_and_the_identity_stays(etcd: Etcd) -> None:
    async with agent(etcd) as identities:
        web = await identities.acquire(WEB)
        identities.release(web.id)
        await until(lambda: not keys(etcd, "value"))
        assert keys(etcd, "id") == {str(web.id): WEB_TEXT}
        assert (await identities.acquire(WEB)).id == web.id
        await until(lambda: keys(etcd, "value"))


async def test_deleted_keys_of_identities_in_use_are_restored(etcd: Etcd) -> None:
    async with agent(etcd) as identities:
        web = await identities.acquire(WEB)
        await until(lambda: str(web.id) in keys(etcd, "id"))
        etcd.delete(f"{STATE}id/{web.id}")
        etcd.delete(f"{STATE}value/{WEB_TEXT}/192.0.2.1")
        await until(lambda: keys(etcd, "id") == {str(web.id): WEB_TEXT} and keys(etcd, "value"))


async def test_a_number_survives_a_store_that_began_anew(etcd: Etcd) -> None:
    async with agent(etcd, 1) as one, agent(etcd, 2) as other:
        web = await one.acquire(WEB)
        await until(lambda: other.get(web.id))
        etcd.kill()
        etcd.empty()
        etcd.start()
        await until(lambda: keys(etcd, "id") == {str(web.id): WEB_TEXT} and keys(etcd, "value"))
        assert other.get(web.id) is not None


async def test_a_restart_keeps_its_numbers_while_the_store_is_away(etcd: Etcd) -> None:
    async with agent(etcd) as identities:
        web = await identities.acquire(WEB)
    etcd.kill()
    async with agent(etcd) as identities:
        assert (await identities.acquire(WEB, web.id)).id == web.id
        assert identities.acquire_now(DB) is None, "nobody can say which number that is to have"
        etcd.start()
        with anyio.fail_after(30):
            assert (await identities.acquire(DB)).id != web.id
        await until(lambda: len(keys(etcd, "value")) == 2)


async def test_a_lock_of_a_dead_client_is_waited_for_until_it_expires(etcd: Etcd) -> None:
    lock = f"{STATE}locks/{WEB_TEXT}.lock/1"
    etcd.put(lock, "")
    async with agent(etcd) as identities, anyio.create_task_group() as tasks:
        tasks.start_soon(identities.acquire, WEB)
        await until(lambda: len(keys(etcd, "locks")) == 2)
        assert not keys(etcd, "id")
        etcd.delete(lock)
        await until(lambda: keys(etcd, "id"))


async def test_objects_outside_the_schema_cannot_be_requested(etcd: Etcd) -> None:
    with pytest.raises(StartError, match="identity-allocation-mode=crd: there is no API server"):
        async with agent(etcd, 1, **{"identity-allocation-mode": "crd"}):
            pass
