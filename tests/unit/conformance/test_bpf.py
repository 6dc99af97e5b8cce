"""Our map records against the output of Cilium's client for the same bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cells.maps.records.cluster import (
    EgressKey,
    EgressValue,
    IpcacheKey,
    IpcacheValue,
    NodeKey,
    NodeValue,
    TunnelKey,
    TunnelValue,
)
from cells.maps.records.endpoints import LxcKey, LxcValue, PolicyEntry, PolicyKey
from cells.maps.records.flows import CtEntry, CtKey, MetricsKey, MetricsValue, NatEntry
from cells.maps.specs import MapSizes, map_specs, policy_spec
from hive.dbg.bpf.maps import GLOBALS
from hive.dbg.main import run
from hive.services.maps import command as lb
from tests.support.counts import Count, not_replayed
from tests.support.recordings import INDEX, recordings
from tests.unit.conformance.bpf_recordings import EXCLUDED, REPLAYED, entries, load, maps, printed
from tests.unit.conformance.pinned_maps import CPUS, pin_maps, pinned
from tests.unit.conformance.replayed_agent import lines_of, replaying

NO_FILE = "no such file or directory"
SPECS = {
    spec.name: spec
    for spec in map_specs(MapSizes(1 << 20, 1 << 20, 16384), preallocate=False, cpus=CPUS).values()
} | {"cilium_policy_01234": policy_spec(1234, 16384)}


def _packed(key: Any, value: Any) -> tuple[bytes, bytes]:
    return key.pack(), value.pack()


ROWS: dict[str, Callable[[bytes, bytes], tuple[bytes, bytes]]] = {
    **dict.fromkeys(
        [name for name in SPECS if name.startswith("cilium_ct")],
        lambda key, value: _packed(CtKey.unpack(key), CtEntry.unpack(value)),
    ),
    **dict.fromkeys(
        [name for name in SPECS if name.startswith("cilium_snat")],
        lambda key, value: _packed(CtKey.unpack(key), NatEntry.unpack(value)),
    ),
    "cilium_egress_gw_policy_v4": lambda key, value: _packed(
        EgressKey.unpack(key), EgressValue.unpack(value)
    ),
    "cilium_node_map_v2": lambda key, value: _packed(NodeKey.unpack(key), NodeValue.unpack(value)),
    "cilium_tunnel_map": lambda key, value: _packed(TunnelKey.unpack(key), TunnelValue.unpack(value)),
    "cilium_ipcache": lambda key, value: _packed(IpcacheKey.unpack(key), IpcacheValue.unpack(value)),
    "cilium_lxc": lambda key, value: _packed(LxcKey.unpack(key), LxcValue.unpack(value)),
    "cilium_metrics": lambda key, value: _packed(MetricsKey.unpack(key), MetricsValue.unpack(value)),
    "cilium_policy_01234": lambda key, value: (
        PolicyKey.unpack(key).pack(),
        PolicyEntry.unpack(value).pack(PolicyKey.unpack(key)),
    ),
}
"""How the bytes of a map are read, and written again."""


@pytest.mark.parametrize("name", REPLAYED)
def test_our_records_are_the_same_bytes(name: str) -> None:
    for pin, table in maps(name).items():
        spec = SPECS[pin]
        recorded = table["type"], table["key_size"], table["value_size"]
        assert (spec.type.name.lower(), spec.key_size, spec.value_size) == recorded
        for key, value in entries(table) if pin in ROWS else ():
            assert ROWS[pin](key, value) == (key, value)


NOT_PRINTED = {
    "metrics_list_other_max_entries_removes_pin": "the recorded client replaced the map",
}
PRINTED = sorted(
    path.stem
    for path in recordings("bpf").glob("*.json")
    if "client1.19" not in path.stem and path.stem not in NOT_PRINTED
)


@pytest.mark.parametrize("name", PRINTED)
def test_our_client_prints_what_the_recorded_one_did(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = load(f"bpf/{name}")
    pin_maps(monkeypatch, pinned(name))
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    with ExitStack() as running:
        if recording.get("agent", "running") == "running":
            running.enter_context(replaying(tmp_path / "cilium.sock", recording.get("api_exchanges") or []))
        if "agent-runtime-config.json = " in recording.get("note", ""):
            (tmp_path / "config.json").write_text(recording["note"].partition(" = ")[2])
            monkeypatch.setattr("hive.dbg.bpf.command._RUNTIME_CONFIG", tmp_path / "config.json")
        code = run(recording["argv"][1:])
    out, err = capfd.readouterr()
    stdout = recording["stdout"]
    expected = stdout if isinstance(stdout, str) else json.dumps(stdout, indent=2)
    assert sorted(lines_of(out, name)) == sorted(lines_of(expected, name))
    errors = lines_of(err.replace(str(tmp_path), "/var/run/cilium"), name)
    assert errors == lines_of(recording.get("stderr", ""), name)
    assert code == recording["exit_code"]


RESIZED = [
    pytest.param(name, one, id=f"{name}-{one['map']}-{one['change']}")
    for name in PRINTED
    for one in load(f"bpf/{name}").get("size_sensitivity") or ()
    if one["map"] != "cilium_metrics"  # the recorded client removes the map
]


@pytest.mark.parametrize(("name", "recorded"), RESIZED)
def test_maps_with_entries_of_other_sizes_end_the_command_in_one_line(
    name: str,
    recorded: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part, change = re.fullmatch(r"(key|value)_size([+-]\d)", recorded["change"]).groups()  # type: ignore[union-attr]

    def resized(data: bytes, of: str) -> bytes:
        return (data + bytes(8))[: len(data) + int(change)] if of == part else data

    tables = pinned(name)
    rows = tables[recorded["map"]].items()
    tables[recorded["map"]] = {resized(key, "key"): resized(value, "value") for key, value in rows}
    pin_maps(monkeypatch, tables)
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    with replaying(tmp_path / "cilium.sock", load(f"bpf/{name}").get("api_exchanges") or []):
        code = run(load(f"bpf/{name}")["argv"][1:])
    result = recorded["result"]
    errors = [line for line in lines_of(capfd.readouterr().err, name) if "retrieve label" not in line]
    assert (code, errors) == (result["exit_code"], lines_of(result["stderr_head"], name))


def test_counters_of_another_size_are_left_alone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pin_maps(monkeypatch, {"cilium_metrics": {bytes(12): bytes(16 * CPUS)}})
    assert run(["bpf", "metrics", "list"]) == 1
    assert capfd.readouterr().err == (
        "Error: Unable to read /sys/fs/bpf/tc/globals/cilium_metrics: "
        "unmarshaling *metricsmap.Key doesn't consume all data\n"
    )


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        ("cilium_ipcache", "ipcache"),
        ("cilium_node_map_v2", "nodeid"),
        ("cilium_auth_map", "auth"),
        ("cilium_egress_gw_policy_v4", "egress"),
        ("cilium_vtep_map", "vtep"),
    ],
)
def test_empty_maps_print_a_sentence_to_stderr_and_empty_json(
    pin: str, words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pin_maps(monkeypatch, {pin: {}})
    assert run(["bpf", words, "list"]) == 0
    assert capfd.readouterr() == ("", "No entries found.\n")
    assert run(["bpf", words, "list", "-o", "json"]) == 0
    assert json.loads(capfd.readouterr().out) in ([], {}, None)


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("auth", 0, "Cannot find auth bpf map"),
        ("config", 0, "Cannot find config bpf map"),
        ("egress", 0, "Cannot find egress gateway bpf maps"),
        ("nodeid", 0, "Cannot find node bpf map"),
        *(
            (name, 1, f"error dumping contents of map: loading pinned map {GLOBALS / pin}: {NO_FILE}")
            for name, pin in (
                ("bandwidth", "cilium_throttle"),
                ("ipmasq", "cilium_ipmasq_v4"),
                ("vtep", "cilium_vtep_map"),
            )
        ),
    ],
)
@pytest.mark.parametrize("form", [[], ["-o", "json"]])
def test_maps_of_features_that_are_off_end_the_command_as_in_the_client(
    name: str,
    code: int,
    text: str,
    form: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pin_maps(monkeypatch, {})
    assert run(["bpf", name, "list", *form]) == code
    assert capfd.readouterr() == ("", f"{text}\n")


def test_networks_that_are_not_masqueraded_are_listed_of_both_families(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [bytes.fromhex(text) for text in ("080000000a000000", "10000000a9fe0000")]
    key6 = bytes.fromhex("07000000fc" + 15 * "00")
    pin_maps(monkeypatch, {"cilium_ipmasq_v6": {key6: b"\0"}})
    assert run(["bpf", "ipmasq", "list", "-o", "json"]) == 0
    assert json.loads(capfd.readouterr().out) == ["fc00::/7"]
    pin_maps(monkeypatch, {"cilium_ipmasq_v4": dict.fromkeys(keys, b"\0"), "cilium_ipmasq_v6": {key6: b"\0"}})
    assert run(["bpf", "ipmasq", "list", "-o", "json"]) == 0
    assert json.loads(capfd.readouterr().out) == ["10.0.0.0/8", "169.254.0.0/16", "fc00::/7"]
    assert run(["bpf", "ipmasq", "ls"]) == 0
    assert [line.rstrip() for line in capfd.readouterr().out.splitlines()] == [
        *("IP PREFIX/ADDRESS", "10.0.0.0/8", "169.254.0.0/16", "fc00::/7")
    ]
    pin_maps(monkeypatch, {"cilium_ipmasq_v4": {}})
    assert run(["bpf", "ipmasq", "list", "-o", "json"]) == 0
    assert json.loads(capfd.readouterr().out) == []


def ct_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str, up: bool = True) -> int:
    """`cilium-dbg bpf ct list global` of the recorded connections."""
    pin_maps(monkeypatch, pinned("ct_list_global"))
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{tmp_path}/cilium.sock")
    socket = tmp_path / "cilium.sock"
    socket.unlink(missing_ok=True)
    with replaying(socket, 2 * load("bpf/nat_list")["api_exchanges"]) if up else nullcontext():
        return run(["bpf", "ct", "list", "global", *words])


@pytest.mark.parametrize("words", [(), ("--time-diff-clocksource-mode", "ktime")])
def test_connections_show_the_seconds_until_they_expire(
    words: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = int(float(Path("/proc/uptime").read_text().split()[0]))
    assert ct_list(tmp_path, monkeypatch, "-d", *words) == 0
    after = int(float(Path("/proc/uptime").read_text().split()[0]))
    found = re.findall(r"expires=(\d+) \(remaining: (-?\d+) sec\(s\)\) Packets=", capfd.readouterr().out)
    assert len(found) == sum(map(len, pinned("ct_list_global").values()))
    assert all(before <= int(expires) - int(remaining) <= after for expires, remaining in found)


def test_connections_without_a_known_clock_have_no_remaining_seconds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, reason in (
        (("--time-diff-clocksource-mode", "sundial"), "invalid clocksource"),
        (
            ("--time-diff-clocksource-mode", "jiffies", "--time-diff-clocksource-hz", "0"),
            "invalid HZ value",
        ),
    ):
        assert ct_list(tmp_path, monkeypatch, "-d", *words) == 1
        assert capfd.readouterr() == ("", f"Error: could not determine clocksource: {reason}\n\n")
    monkeypatch.setattr("hive.dbg.bpf.command._RUNTIME_CONFIG", tmp_path / "none.json")
    assert ct_list(tmp_path, monkeypatch, "-d", up=False) == 1
    assert "could not determine clocksource: open " in capfd.readouterr().err


def test_egress_policies_keep_the_host_bits_of_their_cidr(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = EgressKey(IPv4Address("10.0.1.77"), IPv4Interface("203.0.113.9/24"))
    value = EgressValue(IPv4Address("192.0.2.10"), IPv4Address("192.0.2.11"))
    pin_maps(monkeypatch, {"cilium_egress_gw_policy_v4": {key.pack(): value.pack()}})
    assert run(["bpf", "egress", "list", "-o", "json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert row == {
        "SourceIP": "10.0.1.77",
        "DestCIDR": "203.0.113.9/24",
        "EgressIP": "192.0.2.10",
        "GatewayIP": "192.0.2.11",
    }


SLOT = re.compile(r"(\S+) \((\d+)\) (\S+) \((\d+)\) \((\d+)\)(?: \[(.*)\])?")
"""A row of `bpf lb list`: service, slot, backend, the service's number, the slot again, how it is served."""


@pytest.mark.parametrize(
    "name", [name for name in REPLAYED if re.search(r"/lb_list(_proto|_client|$)", name)]
)
def test_services_in_maps_are_shown_as_the_client_shows_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {pin: dict(entries(table)) for pin, table in maps(name).items()}
    monkeypatch.setattr("hive.services.maps.open_map", lambda path: nullcontext(tables[path.name]))
    result = CliRunner().invoke(lb, ["list", "-o", "json"], catch_exceptions=False)
    ours = {
        (row["SERVICE"], row["SLOT"], row["ID"], *((row["BACKEND"],) if row["SLOT"] else (row["FLAGS"],)))
        for row in json.loads(result.output)
    }
    theirs = set()
    for line in printed(name):
        if (match := SLOT.fullmatch(line)) is not None:
            service, slot, backend, number, _, flags = match.groups()
            theirs.add((service, int(slot), int(number), backend if int(slot) else flags))
    assert {tuple(plain(one) for one in row) for row in ours} == {
        tuple(plain(one) for one in row) for row in theirs
    }


def plain(value: object) -> object:
    """Without the protocol, which 1.17's client does not show."""
    return re.sub(r"(?<=:\d\d)(\d*)/(TCP|UDP|ANY)", r"\1", value) if isinstance(value, str) else value


def test_the_client_leaves_our_map_of_counts_alone() -> None:
    (asked,) = maps("bpf/metrics_list").values()
    spec = SPECS["cilium_metrics"]
    assert (spec.max_entries, spec.flags) == (asked["max_entries_in_test"], asked["flags"])


def test_every_recording_is_replayed_or_has_a_reason_not_to_be(count: Count) -> None:
    index = json.loads(INDEX.read_text())
    assert set(REPLAYED) | set(EXCLUDED) == {row["file"].removesuffix(".json") for row in index["bpf"]}
    assert {f"bpf/{path.stem}" for path in recordings("bpf").iterdir()} >= set(REPLAYED)
    count("recordings of map readers", {"replayed": len(REPLAYED), **not_replayed(EXCLUDED.values())})
