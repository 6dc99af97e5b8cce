"""An ADD into a full range waits for the addresses of pods that are being deleted."""

import anyio
import pytest

from tests.unit.cni_server.harness import Harness

pytestmark = pytest.mark.anyio

FULL = "unable to allocate IP via local cilium agent: range is full"


async def leaving(served: Harness, *cids: str) -> anyio.Event:
    """These are attached and deleted; their links stay until the event is set. The range is full."""
    for cid in cids:
        assert (await served.call("ADD", cid, pod=f"pod-of-{cid}")).code == 0
    served.node.room = len(cids)
    reaped = served.node.may_reap = anyio.Event()
    for cid in cids:
        assert (await served.call("DEL", cid, pod=None)).code == 0
    return reaped


async def test_on_a_full_range_an_add_gets_the_address_after_the_link_is_deleted(served: Harness) -> None:
    reaped = await leaving(served, "old")
    client = await served.begin("ADD", "new", pod="pod-of-new")
    await anyio.wait_all_tasks_blocked()
    assert [endpoint.container_id for endpoint in served.node.all()] == []
    reaped.set()
    assert (await client.reply()).code == 0
    assert len(served.node.addresses) == 1


async def test_waiting_adds_get_the_freed_addresses_and_the_others_fail(served: Harness) -> None:
    reaped = await leaving(served, "old1", "old2")
    clients = [await served.begin("ADD", f"new{n}", pod=f"pod-of-new{n}") for n in range(8)]
    await anyio.wait_all_tasks_blocked()
    reaped.set()
    replies = [await client.reply() for client in clients]
    assert sorted(reply.code for reply in replies) == [0, 0, 1, 1, 1, 1, 1, 1]
    assert {reply.json["msg"] for reply in replies if reply.code} == {FULL}


async def test_on_a_full_range_an_add_fails_after_its_deadline(
    served: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.cni.add._ADDRESS_SECONDS", 0.02)
    reaped = await leaving(served, "old")
    reply = await served.call("ADD", "new", pod="pod-of-new")
    assert (reply.code, reply.json["msg"]) == (1, FULL)
    reaped.set()


async def test_on_a_full_range_without_deletes_an_add_fails_at_once(served: Harness) -> None:
    served.node.room = 0
    reply = await served.call("ADD", "new", pod="pod-of-new")
    assert (reply.code, reply.json["msg"]) == (1, FULL)


async def test_a_pod_waits_for_its_pool_to_grow_and_no_longer_than_that_may_take(
    served: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.node.room, served.node.grown = 0, anyio.Event()
    client = await served.begin("ADD", "new", pod="pod-of-new")
    await anyio.wait_all_tasks_blocked()
    served.node.room = 1
    served.node.grown.set()
    assert (await client.reply()).code == 0
    served.node.grown = anyio.Event()
    monkeypatch.setattr("cells.cni.add._ADDRESS_SECONDS", 0.02)
    reply = await served.call("ADD", "newer", pod="pod-of-newer")
    assert (reply.code, reply.json["msg"]) == (1, FULL)


async def test_a_name_that_the_kernel_would_take_for_a_pattern_is_refused(served: Harness) -> None:
    reply = await served.call("ADD", "new", pod="pod-of-new", CNI_IFNAME="eth%d")
    assert (reply.code, reply.json["code"], reply.json["msg"]) == (1, 4, "interface name contains %")
