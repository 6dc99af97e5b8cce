"""What `cilium-dbg bpf` prints of entries that no recording has, and of maps that cannot be read."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from hive.dbg.bpf.maps import GLOBALS
from hive.dbg.main import run
from tests.unit.conformance.pinned_maps import listed, pin_maps, pinned

NO_FILE = "no such file or directory"


def with_flags(table: dict[bytes, bytes], flags: int) -> dict[bytes, bytes]:
    """Connections with other flags."""
    return {key: row[:36] + flags.to_bytes(2, "little") + row[38:] for key, row in table.items()}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (0x0200, "Flags=0x0200 [ ]"),
        (0x0800, "Flags=0x0800 [ Unknown=0x0800 ]"),
        (0xF601, "Flags=0xf601 [ RxClosing FromTunnel Unknown=0xf000 ]"),
    ],
)
def test_flags_of_connections_without_a_name_are_a_number(
    flags: int, text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.dbg.bpf.command._families", lambda: ["4"])
    tables = pinned("ct_list_global")
    tables["cilium_ct4_global"] = with_flags(tables["cilium_ct4_global"], flags)
    lines = listed("ct list global", tables, capfd, monkeypatch).splitlines()[:3]
    assert all(f" {text} RevNAT=" in line for line in lines)


def test_entries_without_a_protocol_are_in_json_alone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.dbg.bpf.command._families", lambda: ["4"])
    monkeypatch.setattr("hive.dbg.bpf.command._clock", lambda: 600)
    tables = pinned("ct_list_global") | pinned("nat_list")
    for pin in ("cilium_ct4_global", "cilium_ct_any4_global", "cilium_snat_v4_external"):
        rows = tables[pin].items()
        tables[pin] = {key[:12] + b"\0" + key[13:]: value for key, value in rows}
    assert listed("ct list global", tables, capfd, monkeypatch).strip() == ""
    assert listed("nat list", tables, capfd, monkeypatch).strip() == ""
    assert len(json.loads(listed("ct list global -o json", tables, capfd, monkeypatch))) == 5
    assert len(json.loads(listed("nat list -o json", tables, capfd, monkeypatch))) == 2


def test_translations_show_the_kinds_of_their_flags(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.dbg.bpf.command._families", lambda: ["4"])
    monkeypatch.setattr("hive.dbg.bpf.command._clock", lambda: 600)
    rows = pinned("nat_list")["cilium_snat_v4_external"].items()
    tables = {"cilium_snat_v4_external": {key[:13] + b"\6": value for key, value in rows}}
    lines = listed("nat list", tables, capfd, monkeypatch).splitlines()[:2]
    assert all(re.search(r"^TCP OUT \S+ -> \S+ related service XLATE_SRC ", line) for line in lines)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("cluster 3", "Failed to retrieve cluster maps: Per-cluster NAT maps are not initialized"),
        ("cluster web", 'Invalid ClusterID: strconv.ParseUint: parsing "web": invalid syntax'),
        ("global", "Invalid argument"),
        ("cluster", "Invalid argument"),
    ],
)
def test_translations_are_listed_of_one_table_alone(
    words: str, text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pin_maps(monkeypatch, {})
    assert run(["bpf", "nat", "list", *words.split()]) == 0
    assert capfd.readouterr() == ("", text)


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0, "0"),
        (125, "1k"),
        (1250, "10k"),
        (12345, "98760"),
        (125 * 10**9, "1T"),
        (125 * 10**15, "1E"),
    ],
)
def test_bandwidths_are_decimal_quantities(
    rate: int, text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = rate.to_bytes(8, "little") + bytes(48)
    tables = {"cilium_throttle": {number.to_bytes(8, "little"): row for number in (9, 10)}}
    lines = listed("bandwidth list", tables, capfd, monkeypatch).splitlines()[1:]
    assert [line.split() for line in lines] == [["10", text], ["9", text]]


def test_unknown_authentication_types_are_named_by_their_number(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = pinned("auth_list") | pinned("policy_get_numeric")
    rows = tables["cilium_auth_map"].items()
    tables["cilium_auth_map"] = {key[:10] + b"\7" + key[11:]: value for key, value in rows}
    assert " Unknown-auth-type-7 " in listed("auth list", tables, capfd, monkeypatch)
    (pin,) = (pin for pin in tables if pin.startswith("cilium_policy"))
    tables[pin] = {key: value[:3] + b"\3" + value[4:] for key, value in tables[pin].items()}
    lines = listed("policy get 1234 -n", tables, capfd, monkeypatch).splitlines()[1:]
    assert all(" Unknown-auth-type-3 " in line for line in lines)


@pytest.mark.parametrize(
    ("bits", "text", "prefix"),
    [
        (40, "TCP", "0"),
        (44, "<INVALID PREFIX LENGTH: 4>", "4"),
        (48, "TCP", "8"),
        (49, "80-32847/TCP", "9"),
        (63, "80-81/TCP", "23"),
        (64, "80/TCP", "24"),
        (39, "<INVALID PREFIX LENGTH: 255>", "255"),
    ],
)
def test_rules_of_policy_maps_show_the_length_of_their_prefix(
    bits: int, text: str, prefix: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = bits.to_bytes(4, "little") + (24583).to_bytes(4, "little") + b"\0\6\0\x50"
    line = listed("policy get 1234 -n", {"cilium_policy_01234": {key: bytes(24)}}, capfd, monkeypatch)
    cells = re.split(" {2,}", line.splitlines()[1].strip())
    assert (cells[3], cells[-1]) == (text, prefix)


SERVICE4 = bytes.fromhex("0a6000010050")
"""10.96.0.1:80"""
SERVICE6 = bytes.fromhex("fd0000000000000000000000000000010050")
BACKENDS = {
    "cilium_lb4_backends_v3": {
        b"\1\0\0\0": bytes.fromhex("0a0001140035000007000000"),
        b"\2\0\0\0": bytes.fromhex("0a0001150035630103000500"),
    },
    "cilium_lb6_backends_v3": {
        b"\3\0\0\0": bytes.fromhex("fd0000100001000000000000000000770050840000000000"),
    },
}


def service(address: bytes, slot: int, backend: int, flags: int, scope: int = 0) -> tuple[bytes, bytes]:
    """An entry of a map of services with the number 9."""
    key = address + slot.to_bytes(2, "little") + bytes((0, scope, 0, 0))
    value = backend.to_bytes(4, "little") + b"\1\0" + b"\0\x09" + flags.to_bytes(2, "little") + bytes(2)
    return key, value


def test_services_without_a_backend_behind_a_proxy_or_of_another_family_are_listed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = BACKENDS | {
        "cilium_lb4_services_v2": dict(
            (
                service(SERVICE4, 0, 0x901F, 0x0440),
                service(SERVICE4, 1, 8, 0),
                service(SERVICE4, 2, 3, 0),
                service(SERVICE4, 0, 0, 0xC0E0, scope=1),
                service(SERVICE4, 0, 0, 0x4000, scope=2),
            )
        ),
        "cilium_lb6_services_v2": dict((service(SERVICE6, 1, 1, 0),)),
    }
    assert json.loads(listed("lb list -o json", tables, capfd, monkeypatch)) == {
        "10.96.0.1:80 (0)": [
            "0.0.0.0:0 (9) (0) [ClusterIP, l7-load-balancer] (L7LB Proxy Port: 8080)",
            "0.0.0.0:0 (9) (0) [ClusterIP, non-routable, quarantined] ",
        ],
        "10.96.0.1:80 (1)": ["backend 8 not found"],
        "10.96.0.1:80 (2)": ["fd00:10:1::77:80 (9) (2)"],
        "10.96.0.1:80/i (0)": ["0.0.0.0:0 (9) (0) [LoadBalancer, check source-range, deny, dsr] "],
        "[fd00::1]:80 (1)": ["[10.0.1.20]:53 (9) (1)"],
    }


def test_backends_show_their_cluster_and_protocols_without_a_name(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(listed("lb list --backends -o json", BACKENDS, capfd, monkeypatch)) == {
        "1": ["ANY://10.0.1.20@7"],
        "2": ["99://10.0.1.21@3[]"],
        "3": ["SCTP://fd00:10:1::77"],
    }


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("lb maglev get 7", "No entry found for service 7"),
        ("lb maglev get web", 'Unable to parse web: strconv.ParseUint: parsing "web": invalid syntax'),
        (
            "lb maglev get 65536",
            'Unable to parse 65536: strconv.ParseUint: parsing "65536": value out of range',
        ),
        ("lb maglev get", "Missing service id argument\n"),
        (
            "ipcache get 10.0.0.1",
            f"unable to dump IPCache: loading pinned map {GLOBALS / 'cilium_ipcache'}: {NO_FILE}",
        ),
        (
            "frag list",
            f"failed to open map: loading pinned map {GLOBALS / 'cilium_ipv4_frag_datagrams'}: {NO_FILE}\n",
        ),
        ("multicast group list", "failed to get multicast bpf map: multicast not enabled"),
        ("mcast sub ls all", "Failed to get multicast bpf map: multicast not enabled"),
        (
            "multicast subscriber list",
            "invalid argument: expected group address or 'all' as argument, got 0 arguments",
        ),
        (
            "multicast subscriber list 10.0.0.1",
            "invalid argument: invalid group address: invalid multicast IP: 10.0.0.1",
        ),
    ],
)
def test_readers_of_maps_fail_in_the_words_of_the_client(
    words: str, text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pin_maps(monkeypatch, {})
    assert run(["bpf", *words.split()]) == 1
    assert capfd.readouterr() == ("", f"Error: {text}\n")


@pytest.mark.parametrize("family", ["4", "6"])
def test_connections_of_another_layout_are_refused_for_json_in_words_of_their_own(
    family: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.dbg.bpf.command._families", lambda: [family])
    pin_maps(monkeypatch, {f"cilium_ct{family}_global": {bytes(14 if family == "4" else 38): bytes(55)}})
    assert run(["bpf", "ct", "list", "global", "-o", "json"]) == 1
    reason = "look up next key: unexpected EOF"
    assert capfd.readouterr() == ("", f"Error: Error while collecting BPF map entries: {reason}\n")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("srv6 policy", [{"VRFID": 5, "DestCIDR": "10.9.0.0/24", "SID": "fd00:5::1"}]),
        ("srv6 pol", [{"VRFID": 5, "DestCIDR": "10.9.0.0/24", "SID": "fd00:5::1"}]),
        ("srv6 sid", [{"SID": "fd00:5::1", "VRFID": 5}]),
        ("srv6 ctx", [{"SourceIP": "10.0.1.77", "DestCIDR": "10.9.0.0/24", "ID": 5}]),
    ],
)
def test_rules_of_srv6_are_listed_as_json(
    words: str, found: list[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(listed(f"{words} -o json", pinned("srv6_policy"), capfd, monkeypatch))[:1] == found


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("srv6 policy", "Cannot find SRv6 policy maps\n"),
        ("srv6 sid", "Cannot find SRv6 SID map\n"),
        ("srv6 vrf", "Cannot find SRv6 VRF mapping maps\n"),
    ],
)
def test_rules_of_srv6_without_maps_end_in_a_sentence(
    words: str, text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pin_maps(monkeypatch, {})
    assert run(["bpf", *words.split()]) == 0
    assert capfd.readouterr() == ("", text)


@pytest.mark.parametrize("wanted", ["all", "239.1.1.1"])
def test_subscribers_of_multicast_groups_are_listed(
    wanted: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = listed(f"multicast subscriber list {wanted}", pinned("multicast_group_list"), capfd, monkeypatch)
    assert out.splitlines() == [
        "Group           Subscriber      Type            ",
        "239.1.1.1       10.0.1.77       Local Endpoint  ",
        "                192.0.2.11      Remote Node     ",
    ]


def test_fragments_of_both_families_are_listed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = bytes.fromhex("00351092")
    key4 = bytes.fromhex("0a0000020a00000112341100")
    key6 = bytes.fromhex("fd00" + 13 * "00" + "02fd00" + 13 * "00" + "010001234511000000")
    tables = {"cilium_ipv4_frag_datagrams": {key4: ports}, "cilium_ipv6_frag_datagrams": {key6: ports}}
    rows = [line.split() for line in listed("frag ls", tables, capfd, monkeypatch).splitlines()[1:]]
    assert rows == [
        ["4660", "UDP", "10.0.0.1:53", "10.0.0.2:4242"],
        ["74565", "UDP", "[fd00::1]:53", "[fd00::2]:4242"],
    ]
    del tables["cilium_ipv6_frag_datagrams"]
    assert json.loads(listed("frag list -o json", tables, capfd, monkeypatch)) == [
        {"ID": 4660, "Proto": 17, "SourceAddress": "10.0.0.1:53", "DestAddress": "10.0.0.2:4242"}
    ]
