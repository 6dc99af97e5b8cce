"""``cilium-dbg bpf``: entries that the command line writes into pinned maps of the kernel."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest
from msgspec.structs import replace

from cells.maps.bpf import pin
from cells.maps.map import MapSpec, create_map, open_map
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.endpoints import LxcKey, LxcValue, PolicyEntry, PolicyKey
from cells.maps.specs import MapSizes, map_specs, policy_spec
from hive.dbg.bpf.maps import GLOBALS
from hive.dbg.main import run
from tests.support.namespaces import in_node

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel

SPECS = map_specs(MapSizes(1 << 16, 1 << 16, 1 << 14), preallocate=False, cpus=1)


def pinned(spec: MapSpec, entry: tuple[bytes, bytes] | None = None) -> None:
    """Pin a new map without entries, or with one."""
    GLOBALS.mkdir(parents=True, exist_ok=True)
    with create_map(replace(spec, invalidates=None)) as made:
        if entry is not None:
            made.update(*entry)
        pin(made.fd, GLOBALS / spec.name)


def rows(name: str) -> dict[bytes, bytes]:
    """All entries."""
    with open_map(GLOBALS / name) as opened:
        return dict(opened.items())


def test_prefixes_of_other_lengths_stay_when_one_is_deleted(in_node: None) -> None:
    pinned(SPECS["ipcache"])
    for prefix in ("10.1.0.0/16", "10.1.0.0/24"):
        words = ["--tunnelendpoint", "172.21.0.2", "--identity", prefix[-2:]]
        assert run(["bpf", "ipcache", "update", prefix, *words]) == 0
    assert run(["bpf", "ipcache", "delete", "10.1.0.0/24"]) == 0
    assert run(["bpf", "ipcache", "delete", "10.1.0.0/25"]) == 1
    key, value = IpcacheKey(IPv4Address("10.1.0.0"), 16), IpcacheValue(16, IPv4Address("172.21.0.2"))
    assert rows("cilium_ipcache") == {key.pack(): value.pack()}
    assert run(["bpf", "ipcache", "match", "10.1.0.0/16"]) == 0


def test_an_entry_of_a_policy_replaces_the_one_of_its_key(in_node: None) -> None:
    spec = policy_spec(1234, 16384)
    pinned(spec)
    words = ["1234", "ingress", "24583", "80/tcp"]
    assert run(["bpf", "policy", "add", *words]) == 0
    assert run(["bpf", "policy", "add", *words, "--deny"]) == 0
    key = PolicyKey(24583, egress=False, protocol=6, port=80, port_bits=16)
    assert rows(spec.name) == {key.pack(): PolicyEntry(deny=True).pack(key)}
    assert run(["bpf", "policy", "delete", *words]) == 0
    assert run(["bpf", "policy", "delete", *words]) == 1
    assert rows(spec.name) == {}


def test_an_endpoint_is_deleted_by_its_address(in_node: None) -> None:
    spec = SPECS["lxc"]
    pinned(spec, (LxcKey(IPv4Address("10.0.0.7")).pack(), bytes(LxcValue.SIZE)))
    assert run(["bpf", "endpoint", "delete", "10.0.0.7"]) == 0
    assert run(["bpf", "endpoint", "delete", "10.0.0.7"]) == 1
    assert rows(spec.name) == {}
