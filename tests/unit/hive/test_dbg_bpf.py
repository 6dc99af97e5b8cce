"""``cilium-dbg bpf``: entries written by the command line, and lists as JSON."""

from __future__ import annotations

import errno
import json
from contextlib import nullcontext
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import pytest

from cells.maps.bpf import BpfError, MapType
from cells.maps.map import MapSpec
from cells.maps.records.cluster import IpcacheKey, IpcacheValue
from cells.maps.records.endpoints import LxcKey, LxcValue, PolicyEntry, PolicyKey
from cells.maps.records.flows import CtEntry, CtKey, NatEntry
from cells.maps.specs import MapSizes, map_specs, policy_spec
from hive.dbg.main import run
from tests.support.fake_map import FakeMap

SPECS = {
    spec.name: spec
    for spec in (
        *map_specs(MapSizes(1 << 20, 1 << 20, 16384), preallocate=False, cpus=1).values(),
        policy_spec(1234, 16384),
        MapSpec("cilium_throttle", MapType.HASH, 8, 56, 16),
        MapSpec("cilium_auth_map", MapType.HASH, 12, 8, 16),
        MapSpec("cilium_vtep_map", MapType.HASH, 4, 16, 8),
    )
}
Maps = dict[str, FakeMap[Any, Any]]


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Maps:
    """What is pinned: a test adds maps by name. No agent runs."""
    pinned: Maps = {}

    def opened(path: Path) -> nullcontext[FakeMap[Any, Any]]:
        if path.name not in pinned:
            raise BpfError(errno.ENOENT, "open", str(path))
        return nullcontext(pinned[path.name])

    monkeypatch.setattr("hive.dbg.bpf.maps.open_map", opened)
    monkeypatch.setattr("hive.dbg.bpf.command.root_only", lambda _: None)
    monkeypatch.setattr("hive.dbg.bpf.policy.GLOBALS", tmp_path)
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/none.sock")
    return pinned


def pin(maps: Maps, name: str) -> FakeMap[Any, Any]:
    maps[name] = FakeMap(SPECS[name])
    return maps[name]


def as_json(capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run(["bpf", *words, "-o", "json"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.parametrize(
    ("prefix", "key"),
    [
        ("10.244.3.110/32", IpcacheKey(IPv4Address("10.244.3.110"), 32)),
        ("10.244.3.110/24", IpcacheKey(IPv4Address("10.244.3.0"), 24)),
        ("fd00:10::/64", IpcacheKey(IPv6Address("fd00:10::"), 64)),
    ],
)
def test_a_prefix_is_written_matched_and_deleted(
    prefix: str, key: IpcacheKey, maps: Maps, capfd: pytest.CaptureFixture[str]
) -> None:
    ipcache = pin(maps, "cilium_ipcache")
    flags = ["--tunnelendpoint", "172.21.0.2", "--identity", "6", "--encryptkey", "255", "--skiptunnel"]
    assert run(["bpf", "ipcache", "update", prefix, *flags]) == 0
    value = IpcacheValue(6, IPv4Address("172.21.0.2"), 255, 1)
    text = "identity=6 encryptkey=255 tunnelendpoint=172.21.0.2, flags=skiptunnel"
    assert ipcache.raw == {key.pack(): value.pack()}
    assert capfd.readouterr().out == f"Updated entry {key.network} => {text}\n"
    assert run(["bpf", "ipcache", "match", str(key.network)]) == 0
    assert capfd.readouterr().out == f'key {key.network} has value "{text}"\n'
    assert run(["bpf", "ipcache", "delete", prefix]) == 0
    assert capfd.readouterr() == (f"Deleted entry {key.network}\n", "")
    assert not ipcache.raw


def test_prefixes_of_clusters_are_entries_of_their_own(maps: Maps, capfd: pytest.CaptureFixture[str]) -> None:
    pin(maps, "cilium_ipcache")
    for cluster, identity in (("0", "5"), ("1", "6")):
        words = ["--tunnelendpoint", "172.21.0.2", "--identity", identity, "--clusterid", cluster]
        assert run(["bpf", "ipcache", "update", "10.1.0.0/16", *words]) == 0
    capfd.readouterr()
    assert sorted(as_json(capfd, "ipcache", "list")) == ["10.1.0.0/16", "10.1.0.0/16@1"]
    assert run(["bpf", "ipcache", "get", "10.1.2.3"]) == 0
    assert "identity=5" in capfd.readouterr().out
    assert run(["bpf", "ipcache", "delete", "10.1.0.0/16", "--clusterid", "1"]) == 0
    assert capfd.readouterr().out == "Deleted entry 10.1.0.0/16@1\n"
    assert list(as_json(capfd, "ipcache", "list")) == ["10.1.0.0/16"]


NOT_THERE = "unable to delete element {} from map {}: delete: key does not exist"
EXAMPLE = "Expected one such as 10.244.3.110/32"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["update"], f"Error: No prefix provided. {EXAMPLE}"),
        (["match", "10.0.0.1"], f'Error: Invalid prefix address. {EXAMPLE}, got "10.0.0.1"'),
        (
            ["delete", "10.0.0.0/255.0.0.0"],
            f'Error: Invalid prefix address. {EXAMPLE}, got "10.0.0.0/255.0.0.0"',
        ),
        (["delete", "10.0.0.1/33"], f'Error: Invalid prefix address. {EXAMPLE}, got "10.0.0.1/33"'),
        (["delete", "fe80::1%a/64"], f'Error: Invalid prefix address. {EXAMPLE}, got "fe80::1%a/64"'),
        (
            ["update", "10.0.0.1/32", "--tunnelendpoint", "fd00::1"],
            'Error: Invalid tunnel endpoint. Expected --tunnelendpoint=172.21.0.2, got "fd00::1"',
        ),
        (
            ["delete", "10.0.0.1/32"],
            f"Error deleting entry 10.0.0.1/32: {NOT_THERE.format('10.0.0.1/32', 'cilium_ipcache')}",
        ),
    ],
)
def test_what_cannot_be_done_to_the_ipcache_is_one_line(
    words: list[str], line: str, maps: Maps, capfd: pytest.CaptureFixture[str]
) -> None:
    pin(maps, "cilium_ipcache")
    assert run(["bpf", "ipcache", *words]) == 1
    assert capfd.readouterr() == ("", f"{line}\n")


def test_a_prefix_inside_of_another_does_not_match(maps: Maps, capfd: pytest.CaptureFixture[str]) -> None:
    ipcache = pin(maps, "cilium_ipcache")
    assert run(["bpf", "ipcache", "match", "10.1.0.0/24"]) == 1
    assert capfd.readouterr() == ("", "No entries found.\n")
    key = IpcacheKey(IPv4Address("10.1.0.0"), 16)
    ipcache.raw[key.pack()] = IpcacheValue(5).pack()
    assert run(["bpf", "ipcache", "match", "10.1.0.0/24"]) == 1
    assert capfd.readouterr() == ("10.1.0.0/24 does not match to any ipcache entry\n", "")


def test_prefixes_with_host_bits_that_another_program_wrote_are_listed_and_found(
    maps: Maps, capfd: pytest.CaptureFixture[str]
) -> None:
    key = IpcacheKey(IPv4Address("10.1.2.3"), 16)
    pin(maps, "cilium_ipcache").raw[key.pack()] = IpcacheValue(5).pack()
    assert list(as_json(capfd, "ipcache", "list")) == ["10.1.2.3/16"]
    assert run(["bpf", "ipcache", "get", "10.1.9.9"]) == 0
    assert capfd.readouterr().out.startswith("10.1.9.9 maps to identity identity=5 ")


def test_writes_without_a_map_or_to_one_of_another_layout_are_one_line(
    maps: Maps, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["bpf", "ipcache", "update", "10.1.0.0/16", "--tunnelendpoint", "172.21.0.2"]
    assert run(words) == 1
    where = "/sys/fs/bpf/tc/globals/cilium_ipcache"
    reason = f"loading pinned map {where}: no such file or directory"
    assert capfd.readouterr().err == f"Error updating entry 10.1.0.0/16: {reason}\n"
    maps["cilium_ipcache"] = FakeMap(MapSpec("cilium_ipcache", MapType.HASH, 20, 12, 8))
    assert run(words) == 1
    line = "Error updating entry 10.1.0.0/16: map cilium_ipcache: wrong size of key or value\n"
    assert capfd.readouterr().err == line


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["ingress", "24583"], [PolicyKey(24583, egress=False)]),
        (["Egress", "0", "53/udp"], [PolicyKey(0, egress=True, protocol=17, port=53, port_bits=16)]),
        (
            ["egress", "7", "80"],
            [PolicyKey(7, egress=True, protocol=one, port=80, port_bits=16) for one in (1, 6, 17, 58, 132)],
        ),
    ],
)
@pytest.mark.parametrize("deny", [False, True])
def test_entries_of_policies_are_added_and_deleted(
    words: list[str], keys: list[PolicyKey], deny: bool, maps: Maps, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = pin(maps, "cilium_policy_01234")
    flags = ["--deny"] if deny else []
    assert run(["bpf", "policy", "add", "1234", *words, *flags]) == 0
    assert policy.raw == {key.pack(): PolicyEntry(deny=deny).pack(key) for key in keys}
    assert run(["bpf", "policy", "delete", "1234", *words]) == 0
    assert not policy.raw
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["add"], "Missing endpoint id argument"),
        (["delete", "1234", "ingress"], "<endpoint id>, <traffic-direction>, and <identity> required"),
        (["add", "²", "ingress", "5"], 'Failed to parse endpointID "\\u00b2"'),
        (["add", "65536", "ingress", "5"], 'Failed to parse endpointID "65536"'),
        (
            ["add", "1234", "in", "5"],
            'Failed to convert in to a valid traffic direction: invalid direction "in" provided',
        ),
        (["add", "1234", "ingress", "4294967296"], "Failed to convert 4294967296"),
        (["add", "1234", "ingress", "5", "80/http"], 'Failed to parse L4: invalid protocol "HTTP"'),
        (
            ["add", "1234", "ingress", "5", "80/tcp/x"],
            'Failed to parse L4: invalid format "80/tcp/x". Should be <port>[/<protocol>]',
        ),
        (
            ["add", "1234", "ingress", "5", "7e4/tcp"],
            'Failed to parse L4: invalid port "7e4": strconv.ParseUint: parsing "7e4": invalid syntax',
        ),
        (
            ["delete", "1234", "ingress", "5", "80/tcp"],
            f"Cannot delete policy key '5 80/TCP': {NOT_THERE.format('5 80/TCP', 'cilium_policy_01234')}",
        ),
        (["get", "²"], 'Failed to parse endpointID "\\u00b2"'),
    ],
)
def test_what_cannot_be_done_to_a_policy_map_is_one_line(
    words: list[str], line: str, maps: Maps, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = pin(maps, "cilium_policy_01234")
    assert run(["bpf", "policy", *words]) == 1
    assert capfd.readouterr() == ("", f"Error: {line}\n")
    assert not policy.raw


def test_all_policy_maps_are_one_list_in_json(
    maps: Maps, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["bpf", "policy", "get", "--all"]) == 0
    assert capfd.readouterr().out == "no maps found\n"
    path = tmp_path / "cilium_policy_01234"
    path.touch()
    key = PolicyKey(5, egress=False)
    pin(maps, path.name).raw[key.pack()] = PolicyEntry(deny=True).pack(key)
    (found,) = as_json(capfd, "policy", "get", "--all")
    assert [found] == as_json(capfd, "policy", "list")
    assert (found["EndpointID"], found["Path"]) == ("1234", str(path))
    assert [one["Key"]["Identity"] for one in found["Content"]] == [5]


def test_an_endpoint_is_deleted(maps: Maps, capfd: pytest.CaptureFixture[str]) -> None:
    missing = "loading pinned map /sys/fs/bpf/tc/globals/cilium_lxc: no such file or directory"
    assert run(["bpf", "endpoint", "delete", "10.0.0.7"]) == 1
    assert capfd.readouterr().err == f"Error: Unable to open map: {missing}\n"
    endpoints = pin(maps, "cilium_lxc")
    key = LxcKey(IPv4Address("10.0.0.7"))
    endpoints.raw[key.pack()] = bytes(LxcValue.SIZE)
    assert run(["bpf", "endpoint", "delete", "10.0.0.7"]) == 0
    assert not endpoints.raw
    assert capfd.readouterr() == ("", "")
    assert run(["bpf", "endpoint", "delete", "10.0.0.7"]) == 1
    reason = NOT_THERE.format("10.0.0.7:0", "cilium_lxc")
    assert capfd.readouterr().err == f"Error: Unable to delete endpoint entry: {reason}\n"
    assert run(["bpf", "endpoint", "delete", "10.0.0"]) == 1
    reason = 'ParseAddr("10.0.0"): IPv4 address too short'
    assert capfd.readouterr().err == f"Error: Unable to parse IP '10.0.0': {reason}\n"


def test_connections_are_the_fields_of_their_structs_in_json(
    maps: Maps, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("cilium_ct4_global", "cilium_ct_any4_global", "cilium_ct6_global", "cilium_ct_any6_global"):
        pin(maps, name)
    key = CtKey(ip_address("10.0.0.1"), ip_address("10.0.0.2"), 80, 0x1234, 6, 1)
    entry = CtEntry(backend_id=7, packets=3, octets=300, lifetime=9, flags=16, rev_nat_index=2, ifindex=4)
    maps["cilium_ct4_global"].raw[key.pack()] = entry.pack()
    (found,) = as_json(capfd, "ct", "list", "global")
    assert found["Key"] == {
        "DestAddr": [10, 0, 0, 1],
        "SourceAddr": [10, 0, 0, 2],
        "DestPort": 80 << 8,
        "SourcePort": 0x3412,
        "NextHeader": 6,
        "Flags": 1,
    }
    value = {name: number for name, number in found["Value"].items() if number}
    assert value == {
        "Union0": [0, 7],
        "Packets": 3,
        "Bytes": 300,
        "Lifetime": 9,
        "Flags": 16,
        "RevNAT": 2 << 8,
        "IfIndex": 4,
    }


def test_translations_are_the_fields_of_their_structs_in_json_without_a_clock(
    maps: Maps, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("cilium_snat_v4_external", "cilium_snat_v6_external"):
        pin(maps, name)
    key = CtKey(ip_address("fd00::1"), ip_address("fd00::2"), 80, 81, 17, 0)
    entry = NatEntry(ip_address("fd00::3"), 0x1234, created=77, needs_ct=True)
    maps["cilium_snat_v6_external"].raw[key.pack()] = entry.pack()
    (found,) = as_json(capfd, "nat", "list")
    assert found["Key"]["DestAddr"] == list(IPv6Address("fd00::1").packed)
    assert found["Value"] == {
        "Created": 77,
        "NeedsCT": 1,
        "Pad1": 0,
        "Pad2": 0,
        "Addr": list(IPv6Address("fd00::3").packed),
        "Port": 0x3412,
    }


@pytest.mark.parametrize(
    ("words", "name", "key", "value", "expected"),
    [
        (
            *("bandwidth", "cilium_throttle", "d204000000000000"),
            "d01213".ljust(112, "0"),
            {"1234": ["1250000"]},
        ),
        (
            *("vtep", "cilium_vtep_map", "0a010100", "82364c982e5600000aa948ec00000000"),
            {"10.1.1.0": ["vtepmac=82:36:4C:98:2E:56 tunnelendpoint=10.169.72.236"]},
        ),
        (
            *("auth", "cilium_auth_map", "076000000e60000007000100", "a19d5a8e1e090c00"),
            [
                {
                    "LocalIdentity": 24583,
                    "RemoteIdentity": 24590,
                    "RemoteNodeID": 7,
                    "AuthType": 1,
                    "Expiration": "2024-12-18T10:00:00.000000512Z",
                }
            ],
        ),
    ],
)
def test_lists_of_features_have_the_shape_of_cilium_in_json(
    words: str,
    name: str,
    key: str,
    value: str,
    expected: object,
    maps: Maps,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pin(maps, name).raw[bytes.fromhex(key)] = bytes.fromhex(value)
    assert as_json(capfd, words, "list") == expected


def test_the_runtime_configuration_is_what_has_a_meaning_of_an_array_of_256(
    maps: Maps, capfd: pytest.CaptureFixture[str]
) -> None:
    config = pin(maps, "cilium_runtime_config")
    for number in range(config.spec.max_entries):
        config.raw[number.to_bytes(4, "little")] = (number + 5).to_bytes(8, "little")
    assert as_json(capfd, "config", "list") == [
        {"Key": "AgentLiveness", "Value": 6},
        {"Key": "UTimeOffset", "Value": 5},
    ]
    assert run(["bpf", "config", "list"]) == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert lines == [["KEY", "VALUE"], ["AgentLiveness", "6"], ["UTimeOffset", "5"]]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("recorder", "the recorder is not built: read cilium-dbg monitor"),
        ("sha", "programs have no templates: hive bpf list shows those that are loaded"),
        ("multicast group add", "multicast is not built"),
        ("auth flush", "mutual authentication is not built"),
        ("vtep update", "VTEP integration is not built"),
    ],
)
def test_commands_that_are_not_built_are_refused_by_name(
    words: str, reason: str, maps: Maps, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["bpf", *words.split()]) == 1
    line = f"Error: cilium-dbg bpf {words} is not available with this agent: {reason}"
    assert capfd.readouterr().err.splitlines() == [line]


def test_connections_of_other_scopes(maps: Maps, capfd: pytest.CaptureFixture[str]) -> None:
    for words, reason in (
        ("x", "unknown type x"),
        ("endpoint", "missing endpointID"),
        ("endpoint x", 'invalid endpointID: strconv.ParseUint: parsing "x": invalid syntax'),
    ):
        assert run(["bpf", "ct", "list", *words.split()]) == 0
        assert capfd.readouterr() == ("", f"Invalid argument: {reason}")
    assert run(["bpf", "ct", "list", "endpoint", "7"]) == 1
    assert "cilium_ct4_00007: no such file" in capfd.readouterr().err


def test_an_address_without_an_identity(maps: Maps, capfd: pytest.CaptureFixture[str]) -> None:
    pinned = pin(maps, "cilium_ipcache")
    assert run(["bpf", "ipcache", "get", "10.0.0.1"]) == 1
    assert capfd.readouterr() == ("", "No entries found.\n")
    pinned.update(IpcacheKey(IPv4Address("10.1.0.0"), 16).pack(), IpcacheValue(7).pack())
    assert run(["bpf", "ipcache", "get", "10.0.0.1"]) == 1
    assert capfd.readouterr() == ("10.0.0.1 does not map to any identity\n", "")
    assert run(["bpf", "ipcache", "get", "10.0.0.1/8"]) == 1
    assert capfd.readouterr().err.startswith("Error: Invalid ip address. IP address must be in dotted")


def test_counters_are_summed_by_line_as_json(maps: Maps, capfd: pytest.CaptureFixture[str]) -> None:
    pinned = pin(maps, "cilium_metrics")
    assert run(["bpf", "metrics", "list", "-o", "json"]) == 0
    assert capfd.readouterr() == ("", "No entries found.\n")
    for reserved in (0, 1):
        key = bytes((2, 2, 9, 0, 1, reserved, 0, 0))
        pinned.update(key, (3).to_bytes(8, "little") + (30).to_bytes(8, "little"))
    assert as_json(capfd, "metrics", "list") == [
        {
            "reason": "Invalid packet",
            "direction": "egress",
            "packets": 6,
            "bytes": 60,
            "line": 9,
            "file": "bpf_host.c",
        }
    ]
