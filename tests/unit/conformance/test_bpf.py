"""Our records of the public maps against what Cilium's client made of the same bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from click.testing import CliRunner

from cells.maps import (
    CT_IN,
    CT_RELATED,
    CT_SERVICE,
    CtEntry,
    CtKey,
    IpcacheKey,
    IpcacheValue,
    LxcKey,
    LxcValue,
    MetricsKey,
    MetricsValue,
    NatEntry,
    PolicyEntry,
    PolicyKey,
)
from cells.maps.sizes import MapSizes
from cells.maps.specs import map_specs, policy_spec
from cells.observe.events import reason_name
from hive.services.maps import command as lb
from tests.support.counts import Count, not_replayed
from tests.unit.conformance.bpf_recordings import EXCLUDED, REPLAYED, entries, load, maps, printed
from tests.unit.conformance.recordings import DATA

CPUS = 2
SPECS = {
    spec.name: spec
    for spec in map_specs(MapSizes(1 << 20, 1 << 20, 16384), preallocate=False, cpus=CPUS).values()
} | {"cilium_policy_01234": policy_spec(1234, 16384)}

PROTOCOLS = {1: "ICMP", 6: "TCP", 17: "UDP"}
CT_FLAGS = (
    *("RxClosing", "TxClosing", "Nat64", "LBLoopback", "SeenNonSyn", "NodePort", "ProxyRedirect"),
    *("DSRInternal", "FromL7LB", "Reserved1", "FromTunnel"),
)
SOURCES = {1: "bpf_host.c", 2: "bpf_lxc.c"}
DIRECTIONS = {1: "INGRESS", 2: "EGRESS", 3: "SERVICE"}


def ct_text(key: CtKey, entry: CtEntry) -> str:
    """A row of `bpf ct list global`."""
    way = "SVC" if key.flags & CT_SERVICE else "IN" if key.flags & CT_IN else "OUT"
    names = [name for bit, name in enumerate(CT_FLAGS) if entry.flags >> bit & 1]
    source, destination = (key.saddr, key.daddr) if way == "SVC" else (key.daddr, key.saddr)
    ports = (key.dport, key.sport) if way == "SVC" else (key.sport, key.dport)
    words = [
        f"{PROTOCOLS[key.protocol]} {way} {source}:{ports[0]} -> {destination}:{ports[1]}",
        *(["related"] if key.flags & CT_RELATED else []),
        f"expires={entry.lifetime} Packets={entry.packets} Bytes={entry.octets}",
        f"RxFlagsSeen=0x{entry.rx_flags_seen:02x} LastRxReport={entry.last_rx_report}",
        f"TxFlagsSeen=0x{entry.tx_flags_seen:02x} LastTxReport={entry.last_tx_report}",
        f"Flags=0x{entry.flags:04x} [ {' '.join([*names, ']'])} RevNAT={entry.rev_nat_index}",
        f"SourceSecurityID={entry.source_identity} IfIndex={entry.ifindex} BackendID={entry.backend_id}",
    ]
    return " ".join(words)


def lxc_text(key: LxcKey, value: LxcValue) -> str:
    """A row of `bpf endpoint list`."""
    if value.is_host:
        return f"{key.ip}:0 (localhost)"
    mac, node_mac = value.mac.hex(":").upper(), value.node_mac.hex(":").upper()
    return (
        f"{key.ip}:0 id={value.endpoint_id} sec_id={value.identity} flags=0x{value.flags:04X} "
        f"ifindex={value.ifindex} mac={mac} nodemac={node_mac}"
    )


def ipcache_text(key: IpcacheKey, value: IpcacheValue) -> str:
    """A row of `bpf ipcache list`."""
    flags = "skiptunnel" if value.flags & 1 else "<none>"
    return (
        f"{key.network} identity={value.identity} encryptkey={value.encrypt_key} "
        f"tunnelendpoint={value.tunnel_endpoint}, flags={flags}"
    )


def metrics_text(key: MetricsKey, value: MetricsValue) -> str:
    """A row of `bpf metrics list`."""
    reason = {0: "Success", 1: "1, 0"}.get(key.reason) or reason_name(key.reason)
    source = SOURCES.get(key.file, f"unknown({key.file})")
    return f"{reason} {DIRECTIONS[key.direction]} {value.packets} {value.octets} {key.line} {source}"


def policy_text(key: PolicyKey, entry: PolicyEntry) -> str:
    """A row of `bpf policy get -n`."""
    last = key.port | 0xFFFF >> key.port_bits
    ports = f"{key.port}-{last}" if last != key.port else str(key.port)
    protocol = PROTOCOLS.get(key.protocol, "ANY")
    bits = 8 + key.port_bits if key.protocol else 0
    words = (
        *("Deny" if entry.deny else "Allow", "Egress" if key.egress else "Ingress", key.identity),
        *(f"{ports}/{protocol}" if key.port_bits else protocol, entry.proxy_port or "NONE"),
        *({0: "disabled", 1: "spire"}[entry.auth_type], entry.octets, entry.packets, bits),
    )
    return " ".join(map(str, words))


def policy_json(key: PolicyKey, entry: PolicyEntry, data: bytes) -> dict[str, object]:
    """An item of `bpf policy get -o json`: raw fields."""
    network = int.from_bytes
    return {
        "ProxyPortNetwork": network(entry.proxy_port.to_bytes(2, "big"), "little"),
        "Flags": entry.pack(key)[2],
        "AuthType": entry.auth_type,
        "Pad1": 0,
        "Pad2": 0,
        "Packets": entry.packets,
        "Bytes": entry.octets,
        "Key": {
            "Prefixlen": network(data[:4], "little"),
            "Identity": key.identity,
            "TrafficDirection": int(key.egress),
            "Nexthdr": key.protocol,
            "DestPortNetwork": network(key.port.to_bytes(2, "big"), "little"),
        },
    }


def ct_row(key: bytes, value: bytes) -> tuple[bytes, bytes, str]:
    k, v = CtKey.unpack(key), CtEntry.unpack(value)
    return k.pack(), v.pack(), ct_text(k, v)


def lxc_row(key: bytes, value: bytes) -> tuple[bytes, bytes, str]:
    k, v = LxcKey.unpack(key), LxcValue.unpack(value)
    return k.pack(), v.pack(), lxc_text(k, v)


def ipcache_row(key: bytes, value: bytes) -> tuple[bytes, bytes, str]:
    k, v = IpcacheKey.unpack(key), IpcacheValue.unpack(value)
    return k.pack(), v.pack(), ipcache_text(k, v)


def metrics_row(key: bytes, value: bytes) -> tuple[bytes, bytes, str]:
    k = MetricsKey.unpack(key)
    return k.pack(), MetricsValue.unpack(value).pack(), metrics_text(k, MetricsValue.unpack(value * CPUS))


def policy_row(key: bytes, value: bytes) -> tuple[bytes, bytes, str]:
    k, v = PolicyKey.unpack(key), PolicyEntry.unpack(value)
    return k.pack(), v.pack(k), policy_text(k, v)


def nat_text(key: CtKey, entry: NatEntry) -> str:
    """A row of `bpf nat list`."""
    way, what = ("IN", "DST") if key.flags & CT_IN else ("OUT", "SRC")
    source, destination, to = (
        f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"
        for ip, port in ((key.saddr, key.sport), (key.daddr, key.dport), (entry.address, entry.port))
    )
    return (
        f"{PROTOCOLS[key.protocol]} {way} {source} -> {destination} XLATE_{what} {to} Created=<AGO>"
        f" NeedsCT={int(entry.needs_ct)}"
    )


def nat_row(key: bytes, value: bytes) -> tuple[bytes, bytes, str]:
    k, v = CtKey.unpack(key), NatEntry.unpack(value)
    return k.pack(), v.pack(), nat_text(k, v)


ROWS: dict[str, Callable[[bytes, bytes], tuple[bytes, bytes, str]]] = {
    **dict.fromkeys([name for name in SPECS if name.startswith("cilium_ct")], ct_row),
    **dict.fromkeys([name for name in SPECS if name.startswith("cilium_snat")], nat_row),
    "cilium_ipcache": ipcache_row,
    "cilium_lxc": lxc_row,
    "cilium_metrics": metrics_row,
    "cilium_policy_01234": policy_row,
}
NOT_ROWS = ("IP ", "REASON ", "POLICY ", "Policy stats empty.")
"""How headers begin, and what is printed instead of rows."""


@pytest.mark.parametrize("name", REPLAYED)
def test_our_records_are_the_same_bytes(name: str) -> None:
    for pin, table in maps(name).items():
        spec = SPECS[pin]
        recorded = table["type"], table["key_size"], table["value_size"]
        assert (spec.type.name.lower(), spec.key_size, spec.value_size) == recorded
        for key, value in entries(table) if pin in ROWS else ():
            assert ROWS[pin](key, value)[:2] == (key, value)


LISTS = [
    name
    for name in REPLAYED
    if load(name)["stdout"]
    and not {"-o", "lb"} & set(load(name)["argv"])
    and not (name.endswith("client1.19") and "nat" not in name)
]
"""What both clients print in the same words, and 1.17's in its own."""


@pytest.mark.parametrize("name", LISTS)
def test_they_say_what_the_client_printed(name: str) -> None:
    rows = {
        " ".join(ROWS[pin](key, value)[2].split())
        for pin, table in maps(name).items()
        for key, value in entries(table)
    }
    lines = {line for line in printed(name) if not line.startswith(NOT_ROWS)}
    if name.endswith("ipcache_get"):
        (line,) = lines
        address, _, told = line.partition(" maps to identity ")
        assert f"{address}/32 {told}" in rows
    elif name.endswith("policy_get"):  # prints labels instead of identities
        assert {row.split(" ", 3)[3] for row in rows} == {
            " ".join(line.split()[3:]) for line in lines if line.split()[0] in {"Allow", "Deny"}
        }
    else:
        assert rows == lines


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


def test_a_policy_as_json_has_the_same_fields() -> None:
    name = "bpf/policy_get_json"
    (table,) = maps(name).values()
    ours = [
        policy_json(PolicyKey.unpack(key), PolicyEntry.unpack(value), key) for key, value in entries(table)
    ]
    stdout = load(name)["stdout"]
    recorded = json.loads(stdout) if isinstance(stdout, str) else stdout
    assert sorted(map(json.dumps, ours)) == sorted(map(json.dumps, recorded))


def test_the_client_leaves_our_map_of_counts_alone() -> None:
    (asked,) = maps("bpf/metrics_list").values()
    spec = SPECS["cilium_metrics"]
    assert (spec.max_entries, spec.flags) == (asked["max_entries_in_test"], asked["flags"])


def test_every_recording_is_replayed_or_has_a_reason_not_to_be(count: Count) -> None:
    index = json.loads((DATA / "index.json").read_text())
    assert set(REPLAYED) | set(EXCLUDED) == {row["file"].removesuffix(".json") for row in index["bpf"]}
    assert {f"bpf/{path.stem}" for path in (DATA / "bpf").iterdir()} == set(REPLAYED)
    count("recordings of map readers", {"replayed": len(REPLAYED), **not_replayed(EXCLUDED.values())})
