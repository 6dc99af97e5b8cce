"""Pins and policy maps that another program removes are restored while the agent runs."""

import shutil
import struct
from collections.abc import Callable

import pytest

from cells.maps.map import open_map
from cells.maps.policy_map import PolicyMap
from tests.kernel.maps.nodes import GLOBALS, Node, agent
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = [pytest.mark.kernel, pytest.mark.anyio]


def pin_of_a_map(_node: Node, _policy: PolicyMap) -> None:
    (GLOBALS / "cilium_lxc").unlink()


def pin_of_a_policy(_node: Node, policy: PolicyMap) -> None:
    (GLOBALS / f"cilium_policy_{policy.endpoint_id:05d}").unlink()


def another_map(_node: Node, _policy: PolicyMap) -> None:
    (GLOBALS / "cilium_ipcache").rename(GLOBALS / "cilium_lxc")


def all_pins(_node: Node, _policy: PolicyMap) -> None:
    shutil.rmtree(GLOBALS)


def policy_taken_away(node: Node, policy: PolicyMap) -> None:
    node.maps.policies.delete(struct.pack("<I", policy.endpoint_id))


def seen(node: Node) -> dict[str, object]:
    found: dict[str, object] = {str(key): value for key, value in node.maps.policies.items()}
    for path in GLOBALS.iterdir() if GLOBALS.is_dir() else ():
        with open_map(path) as table:
            found[path.name] = table.id
    return found


@pytest.mark.parametrize("damage", [pin_of_a_map, pin_of_a_policy, another_map, all_pins, policy_taken_away])
async def test_a_removed_map_pin_is_restored(
    damage: Callable[[Node, PolicyMap], None], in_node: None
) -> None:
    async with agent() as node:
        policy = node.policies.acquire()
        node.policies.release(node.policies.acquire())
        watchdog = node.watchdog
        before = seen(node)
        await watchdog.compare()
        assert sum(watchdog.found.values()) == 0
        damage(node, policy)
        assert seen(node) != before
        await watchdog.compare()
        assert seen(node) == before
        assert sum(watchdog.found.values()) > 0
