"""Simultaneous ADDs: a pod's link is created while the pod before is finished."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio
import pytest

from lifecycle.testing import eventually
from tests.unit.cni_server.fakes import FakeNode
from tests.unit.cni_server.harness import Client, Harness, harness

pytestmark = pytest.mark.anyio


async def at_once(served: Harness, *calls: tuple[str, str, str]) -> list[Client]:
    """Calls (command, container, pod) that the server sees together: no other task runs meanwhile."""
    return [await served.begin(command, cid, pod=pod) for command, cid, pod in calls]


async def test_links_of_pods_that_come_at_once_are_made_ahead(served: Harness) -> None:
    clients = await at_once(served, *(("ADD", f"cid{n}", f"pod{n}") for n in range(8)))
    replies = [await client.reply() for client in clients]
    assert {reply.code for reply in replies} == {0}
    assert served.node.ahead > 0
    names = {endpoint.container_id: endpoint.ifname for endpoint in served.node.all()}
    assert len(names) == 8
    for endpoint in served.node.all():
        link = served.node.links[endpoint.ifindex]
        assert (link.host_name, link.up) == (endpoint.ifname, True)
        assert link.pod == served.pod(endpoint.container_id.replace("cid", "pod"))


async def test_a_link_that_cannot_be_made_ahead_costs_its_pod_alone(served: Harness) -> None:
    served.node.refuse_once.add("create_veth")
    clients = await at_once(served, *(("ADD", f"cid{n}", f"pod{n}") for n in range(6)))
    replies = [await client.reply() for client in clients]
    assert sorted(reply.code for reply in replies) == [0, 0, 0, 0, 0, 1]
    await eventually(
        lambda: len(served.node.addresses) == len(served.node.links) == len(served.node.book) == 5
    )


async def test_two_containers_that_want_one_interface_at_once_get_one(served: Harness) -> None:
    clients = await at_once(served, ("ADD", "a", "shared"), ("ADD", "b", "shared"), ("ADD", "c", "pod3"))
    replies = [await client.reply() for client in clients]
    assert [reply.code for reply in replies] == [0, 1, 0]
    assert "already exists" in replies[1].message
    await eventually(lambda: len(served.node.links) == len(served.node.addresses) == 2)
    assert sorted(endpoint.container_id for endpoint in served.node.all()) == ["a", "c"]


async def test_calls_for_a_container_wait_for_its_running_add(served: Harness) -> None:
    calls = ("ADD", "a", "pod1"), ("DEL", "a", "pod1"), ("ADD", "a", "pod1"), ("ADD", "b", "pod2")
    clients = await at_once(served, *calls)
    replies = await asyncio.gather(*(client.reply() for client in clients))
    assert [reply.code for reply in replies] == [0, 0, 0, 0]
    assert sorted(endpoint.container_id for endpoint in served.node.all()) == ["a", "b"]
    await eventually(lambda: len(served.node.links) == len(served.node.addresses) == 2)


async def test_an_add_with_a_link_created_ahead_at_the_stop_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.cni.server.netns_cookie", FakeNode().cookie)
    async with harness(tmp_path) as served:
        clients = await at_once(served, *(("ADD", f"cid{n}", f"pod{n}") for n in range(4)))
        await eventually(lambda: served.node.ahead > 0)
    answered = 0
    for client in clients:
        try:
            answered += (await client.reply()).code == 0
        except ConnectionError:  # it was not heard, and knows that
            continue
    assert answered == len(served.node.book) == len(served.node.addresses) > 0


async def test_an_add_waiting_for_its_identity_delays_no_other(served: Harness) -> None:
    served.node.may_identify = anyio.Event()
    clients = await at_once(served, ("ADD", "a", "pod1"), ("ADD", "b", "pod2"), ("DEL", "c", "pod3"))
    assert (await clients[2].reply()).code == 0
    served.node.may_identify.set()
    assert [(await client.reply()).code for client in clients[:2]] == [0, 0]
