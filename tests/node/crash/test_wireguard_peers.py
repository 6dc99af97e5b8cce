"""The agent killed before WireGuard changes: no peer loses its allowed IPs or gets another's."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cells.encryption.wireguard.control import UserspaceControl
from cells.encryption.wireguard.device import SOCKETS
from cells.encryption.wireguard.peers import DUMMY_KEY
from hive.lab import agent_process
from hive.lab.node import Lab
from tests.support.agents import serving
from tests.support.crash.drill import POINTS, Drill, chosen
from tests.support.waiting import eventually

pytestmark = [pytest.mark.node, pytest.mark.timeout(300 if POINTS else 3600)]

SETTINGS = (
    *("--enable-wireguard=true", "--enable-wireguard-userspace-fallback=true"),
    "--enable-l7-proxy=false",  # another process, and its calls are not the agent's
)
Nodes = dict[int, tuple[int, tuple[int, ...]]]
Allowed = dict[bytes, frozenset[str]]

BEFORE: Nodes = {1: (1, (1,)), 2: (2, (2, 12)), 3: (3, (3,)), 4: (4, (4,))}
AFTER: Nodes = {1: (1, (1,)), 2: (22, (2,)), 4: (4, (4, 12)), 5: (5, (5,))}
"""Nodes with the number of their key, and of their ranges: one gets another key, a range moves, one goes."""


@pytest.fixture
def drill(node: Lab, tmp_path: Path) -> Iterator[Drill]:
    if shutil.which("wireguard-go") is None:
        pytest.fail("wireguard-go is not installed: apt-get install wireguard-go", pytrace=False)
    drill = Drill(node, tmp_path)
    yield drill
    drill.close()


def key(number: int) -> bytes:
    """Of a peer; that none has the private one does not matter to the device."""
    return bytes([9, *bytes(30), number])


def manifest(number: int, key_number: int, ranges: tuple[int, ...]) -> dict[str, Any]:
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNode",
        "metadata": {
            "name": f"n{number}",
            "annotations": {"network.cilium.io/wg-pub-key": base64.b64encode(key(key_number)).decode()},
        },
        "spec": {
            "addresses": [{"type": "InternalIP", "ip": f"192.0.2.{number}"}],
            "ipam": {"podCIDRs": [f"10.9.{each}.0/24" for each in ranges]},
            "encryption": {"key": 255},
        },
    }


def write(folder: Path, nodes: Nodes) -> None:
    """At once: a file that is replaced."""
    fresh = folder.parent / "fresh.json"
    items = [manifest(number, *node) for number, node in nodes.items()]
    fresh.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    fresh.rename(folder / "nodes.json")


def wanted(nodes: Nodes) -> Allowed:
    return {
        key(key_number): frozenset([f"192.0.2.{number}/32", *(f"10.9.{each}.0/24" for each in ranges)])
        for number, (key_number, ranges) in nodes.items()
    }


def possible() -> Allowed:
    """What each key's peer may have on the way: all that its node has before and after."""
    found: dict[bytes, frozenset[str]] = {}
    for node in {*BEFORE, *AFTER}:
        states = [wanted({node: nodes[node]}) for nodes in (BEFORE, AFTER) if node in nodes]
        every = frozenset[str]().union(*(allowed for each in states for allowed in each.values()))
        found |= {key: every for each in states for key in each}
    return found


def device() -> Allowed:
    """Peers of the node's device, by key."""
    peers = UserspaceControl(SOCKETS / "cilium_wg0.sock").read().peers
    return {key: frozenset(map(str, peer.allowed)) for key, peer in peers.items()}


def test_peers_have_their_own_addresses_whenever_the_agent_is_killed(drill: Drill, tmp_path: Path) -> None:
    lab, folder = drill.lab, tmp_path / "objects"
    folder.mkdir()
    settings = (f"--manifests-dir={folder}", *SETTINGS)

    def peers() -> Allowed:
        with lab.open() as node:
            return node.run(device)

    write(folder, BEFORE)
    serving(lab, *settings)  # wireguard-go, which outlives it, is not counted
    eventually(lambda: peers() == wanted(BEFORE))
    agent_process.crash(lab)
    drill.start(*settings)
    before = drill.made
    write(folder, AFTER)
    eventually(lambda: peers() == wanted(AFTER))
    calls = drill.counted_lines[before : drill.made]
    agent_process.crash(lab)
    then, now = wanted(BEFORE), wanted(AFTER)
    may_be = possible()
    lasting = {one: then[one] & now[one] for one in then.keys() & now.keys()}
    for number in chosen("wireguard peers", 1, len(calls)):
        write(folder, BEFORE)
        drill.start(*settings)
        eventually(lambda: peers() == wanted(BEFORE))
        if number <= len(calls):
            drill.cut_after(number)
        write(folder, AFTER)
        if number <= len(calls):
            drill.expect_cut()
        else:
            eventually(lambda: peers() == wanted(AFTER))
            agent_process.crash(lab)
        left = peers()
        left.pop(DUMMY_KEY, None)  # what moves away, and has no peer
        assert {one for one, stays in lasting.items() if not stays <= left[one]} == set()
        assert {one for one, allowed in left.items() if not allowed <= may_be.get(one, frozenset())} == set()
        serving(lab, *settings)
        eventually(lambda: peers() == wanted(AFTER))
        agent_process.crash(lab)
