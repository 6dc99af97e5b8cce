"""DEL over a real socket and a fake node: maps and state first, then the link, the address last."""

from __future__ import annotations

import anyio
import pytest

from lifecycle.testing import eventually
from tests.unit.cni_server.fakes import leftover
from tests.unit.cni_server.harness import Harness

pytestmark = pytest.mark.anyio


async def test_a_delete_is_answered_before_the_link_is_deleted_and_the_address_is_released_after(
    served: Harness,
) -> None:
    await served.call("ADD")
    node = served.node
    node.may_reap, node.may_forget = anyio.Event(), anyio.Event()
    reply = await served.call("DEL")
    assert (reply.code, reply.stdout) == (0, b"")
    assert not node.book
    await eventually(lambda: "reap" in node.steps)
    assert node.links
    assert node.addresses
    node.may_reap.set()
    await eventually(lambda: not node.links)
    assert node.addresses, "a pod that got it now would be taken for the old one by conntrack"
    node.may_forget.set()
    await eventually(node.clean)


async def delete_while_the_first_waits(served: Harness, names: list[str]) -> anyio.Event:
    """Add pods and delete them; until the event is set, the link of the first is being deleted."""
    for name in names:
        await served.call("ADD", name, CNI_IFNAME=name)
    served.node.may_reap = may_reap = anyio.Event()
    for name in names:
        await served.call("DEL", name, CNI_IFNAME=name)
        await eventually(lambda: "reap" in served.node.steps)
    return may_reap


async def test_links_that_come_while_others_are_deleted_are_deleted_together(served: Harness) -> None:
    node, names = served.node, [f"cid{number}" for number in range(4)]
    may_reap = await delete_while_the_first_waits(served, names)
    may_reap.set()
    await eventually(node.clean)
    assert node.steps.count("reap") == 2


async def test_of_links_deleted_together_one_that_stays_keeps_its_address_alone(served: Harness) -> None:
    node, names = served.node, [f"cid{number}" for number in range(3)]
    may_reap = await delete_while_the_first_waits(served, names)
    stays = max(node.links)
    node.cannot_delete = {stays}
    may_reap.set()
    await eventually(lambda: set(node.links) == {stays} and len(node.addresses) == 1)
    node.cannot_delete = set()
    await eventually(node.clean)


async def test_deleting_an_unknown_attachment_succeeds(served: Harness) -> None:
    for pod in ("pod1", None):
        reply = await served.call("DEL", pod=pod)
        assert (reply.code, reply.stdout) == (0, b"")


async def test_deleting_twice_succeeds(served: Harness) -> None:
    await served.call("ADD")
    assert (await served.call("DEL")).code == 0
    assert (await served.call("DEL")).code == 0
    await eventually(served.node.clean)


async def test_all_interfaces_of_the_container_are_deleted_and_no_others(served: Harness) -> None:
    await served.call("ADD", "cid1", CNI_IFNAME="eth0")
    await served.call("ADD", "cid1", CNI_IFNAME="net1")
    await served.call("ADD", "cid2", pod="pod2")
    assert (await served.call("DEL", "cid1", CNI_IFNAME="net1")).code == 0
    await eventually(lambda: len(served.node.links) == 1)
    assert [e.container_id for e in served.node.all()] == ["cid2"]


async def test_a_stray_interface_of_an_unknown_container_is_deleted(served: Harness) -> None:
    leftover(served.node, "cid1", served.pod("pod1"))
    assert (await served.call("DEL")).code == 0
    assert not served.node.links


async def test_the_interface_of_a_live_endpoint_survives_the_delete_of_an_unknown_container(
    served: Harness,
) -> None:
    await served.call("ADD", "cid1")
    assert (await served.call("DEL", "cid2")).code == 0
    assert served.node.links
    assert served.node.book


async def test_a_stray_interface_that_cannot_be_deleted_does_not_fail_the_delete(served: Harness) -> None:
    leftover(served.node, "cid1", served.pod("pod1"))
    served.node.refuse.add("delete in pod")
    assert (await served.call("DEL")).code == 0


async def test_maps_that_cannot_be_cleaned_do_not_keep_the_link_and_the_address(served: Harness) -> None:
    await served.call("ADD")
    served.node.refuse.add("delete endpoint")
    assert (await served.call("DEL")).code == 0
    await eventually(served.node.clean)


async def test_a_failing_link_is_tried_again_and_holds_its_address(
    served: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.cni.detach._FIRST_RETRY_SECONDS", 0.01)
    await served.call("ADD")
    served.node.refuse.add("reap")
    assert (await served.call("DEL")).code == 0
    await eventually(lambda: served.node.steps.count("reap") >= 3)
    assert served.node.addresses
    served.node.refuse.clear()
    await eventually(served.node.clean)


async def test_an_address_that_cannot_be_released_ends_nothing(served: Harness) -> None:
    await served.call("ADD")
    served.node.refuse.add("release")
    assert (await served.call("DEL")).code == 0
    await eventually(lambda: "release" in served.node.steps)
    assert (await served.call("ADD", "cid2", pod="pod2")).code == 0


async def test_a_chained_delete_leaves_the_interface(served: Harness) -> None:
    leftover(served.node, "cid1", served.pod("pod1"))
    reply = await served.call("DEL", conf={"name": "mynet", "chaining-mode": "generic-veth"})
    assert (reply.code, reply.stdout) == (0, b"")
    assert served.node.links


async def test_an_unknown_chaining_mode_is_refused(served: Harness) -> None:
    reply = await served.call("DEL", conf={"chaining-mode": "none"})
    assert (reply.code, reply.message) == (1, "invalid chaining-mode none")


async def test_neither_arguments_nor_a_previous_result_can_stop_a_delete(served: Harness) -> None:
    await served.call("ADD")
    reply = await served.call("DEL", conf={"prevResult": {"ips": "x"}}, CNI_ARGS="FOO=bar")
    assert reply.code == 0
    await eventually(served.node.clean)
