"""Constants of a generation, and atomic replacement of entries."""

import os
import struct
from ipaddress import IPv4Address
from typing import cast

import pytest
from msgspec.structs import replace

from cells.datapath import generation
from cells.datapath.generation import Constants, build_of, publish
from cells.datapath.programs import ENTRIES
from cells.datapath.settings import DatapathSettings
from cells.maps.map import Map
from lifecycle import Duration

CONSTANTS = Constants(
    *(7, 8000, 60, 61, 10, 8000, 60, 60),
    *(IPv4Address("169.254.42.1"), 2, (32768, 65535), 16381),
    *("0123456789ab", "next"),
)


def test_constants_survive_the_kernel() -> None:
    assert Constants.unpack(CONSTANTS.pack()) == CONSTANTS


def test_other_programs_constants_are_not_ours() -> None:
    assert Constants.unpack(bytes(100)) is None
    assert Constants.unpack(CONSTANTS.pack() + bytes(8)) is None


def test_the_settings_decide_the_lifetimes() -> None:
    settings = DatapathSettings(
        bpf_ct_timeout_regular_tcp=Duration(21600), bpf_ct_timeout_regular_any=Duration(30)
    )
    assert CONSTANTS.configured(settings) == replace(
        CONSTANTS, lifetime_tcp=21600, lifetime_syn=60, lifetime_any=30, lifetime_closed=10
    )


@pytest.mark.parametrize("wrong", [(), (30000,), (2, 1), (0, 5), (1, 65535), (1, 2, 3)])
def test_a_range_of_ports_leaves_some_for_translated_flows(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"node-port-range=.*expected two ports such as 30000,32767"):
        DatapathSettings(node_port_range=wrong).validate()
    others = DatapathSettings(node_port_range=(31000, 31999))
    assert CONSTANTS.configured(others).nat_ports == (32000, 65535)


@pytest.mark.parametrize("wrong", [Duration(0), Duration(0.5), Duration(-3), Duration(1 << 31)])
def test_a_lifetime_conntrack_cannot_keep_is_refused(wrong: Duration) -> None:
    with pytest.raises(ValueError, match=r"bpf-ct-timeout-regular-tcp-fin=.*expected whole seconds, from 1s"):
        DatapathSettings(bpf_ct_timeout_regular_tcp_fin=wrong).validate()


def test_a_build_is_named_by_its_contents() -> None:
    assert build_of(b"") == "e3b0c44298fc"


class FakeEntry:
    """hive_entry with programs as numbers: a descriptor stands for the program of the same id."""

    def __init__(self, programs: dict[int, int], refuse: int | None = None) -> None:
        self.programs = programs
        self.refuse = refuse

    def lookup(self, key: bytes) -> bytes | None:
        value = self.programs.get(*struct.unpack("<I", key))
        return None if value is None else struct.pack("<I", value)

    def update(self, key: bytes, value: bytes) -> None:
        (program,) = struct.unpack("<I", value)
        if program == self.refuse:
            raise OSError(22, "refused")
        self.programs[struct.unpack("<I", key)[0]] = program

    def delete(self, key: bytes) -> bool:
        return self.programs.pop(struct.unpack("<I", key)[0], None) is not None


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Descriptors that were given up."""
    vanished: list[int] = []
    monkeypatch.setattr(generation, "program_by_id", lambda program: program)
    monkeypatch.setattr(os, "close", vanished.append)
    return vanished


NEW = {name: 1000 + slot for name, slot in ENTRIES.items()}


def test_publishing_replaces_every_entry(closed: list[int]) -> None:
    entry = FakeEntry({slot: 500 + slot for slot in ENTRIES.values()})
    publish(cast("Map", entry), NEW)
    assert entry.programs == {slot: 1000 + slot for slot in ENTRIES.values()}
    assert sorted(closed) == sorted(500 + slot for slot in ENTRIES.values())


@pytest.mark.parametrize("before", [{0: 500, 1: 501, 2: 502, 3: 503}, {}, {0: 500}])
@pytest.mark.parametrize("refuse", [1000, 1001, 1002, 1003])
def test_a_refused_entry_restores_the_previous_ones(
    closed: list[int], before: dict[int, int], refuse: int
) -> None:
    entry = FakeEntry(dict(before), refuse)
    with pytest.raises(OSError, match="refused"):
        publish(cast("Map", entry), NEW)
    assert entry.programs == before
    assert sorted(closed) == sorted(before.values())[: len(closed)]
