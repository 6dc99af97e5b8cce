"""The agent's tables over the socket: dumped, and followed by the real client."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio.to_thread
import click
import msgspec
import pytest

from hive.client import follow
from lifecycle.admin import plain
from tests.unit.api.node import running_node
from tests.unit.api.pods import added

pytestmark = pytest.mark.anyio


async def test_tables_are_listed_and_dumped(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        number, address = await added(node)
        listed = (await node.ask("GET", "/statedb/tables")).body
        dumped = (await node.ask("GET", "/statedb/dump/endpoints")).body
        everything = (await node.ask("GET", "/statedb/dump")).body
    endpoints = next(one for one in listed if one["name"] == "endpoints")
    assert (endpoints["rows"], endpoints["initialized"], endpoints["waits-for"]) == (1, True, [])
    [row] = dumped["endpoints"]
    assert (row["rev"], row["key"]) == (endpoints["revision"], number)
    assert (row["obj"]["ipv4"], row["obj"]["pod_mac"]) == (address, "02:00:00:00:00:02")
    assert everything["endpoints"] == dumped["endpoints"]
    assert everything.keys() == {one["name"] for one in listed}


async def test_an_unknown_table_is_not_found(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        for path in ("/statedb/dump/endpoint", "/statedb/changes/endpoint"):
            got = await node.ask("GET", path)
            assert (got.status, got.body) == (
                404,
                {"err": "no table is named endpoint; did you mean endpoints?"},
            )


async def test_a_follower_gets_all_rows_and_changes_until_the_agent_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cells.api.server.SHUTDOWN_SECONDS", 3600.0)  # a stream does not hold up the stop

    async def line(lines: Iterator[Any]) -> Any:
        return await anyio.to_thread.run_sync(next, lines)

    async with running_node(tmp_path) as node:
        number, _ = await added(node)
        lines = follow("/statedb/changes/endpoints", node.socket)
        first = await line(lines)
        await added(node, "cid2")
        second = await line(lines)
        await node.ask("DELETE", f"/v1/endpoint/{number}")
        third = await line(lines)
    assert (first["key"], first["deleted"]) == (number, False)
    assert second["obj"]["container_id"] == "cid2"
    assert (third["key"], third["deleted"], third["obj"]["id"]) == (number, True, number)
    assert first["rev"] < second["rev"] < third["rev"]
    with pytest.raises(click.ClickException, match="has ended the answer"):
        await line(lines)


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Inner:
    mac: bytes
    addresses: tuple[IPv4Interface, ...]


class Outer(msgspec.Struct, frozen=True):
    inner: Inner
    names: frozenset[str]
    by_address: MappingProxyType[IPv4Address, Colour]


def test_rows_are_shown_as_people_write_them() -> None:
    inner = Inner(bytes.fromhex("0200000000ff"), (IPv4Interface("10.0.0.1/24"),))
    row = Outer(inner, frozenset({"b", "a"}), MappingProxyType({IPv4Address("10.0.0.2"): Colour.RED}))
    assert plain(row) == {
        "inner": {"mac": "02:00:00:00:00:ff", "addresses": ["10.0.0.1/24"]},
        "names": ["a", "b"],
        "by_address": {"10.0.0.2": "red"},
    }
    assert plain((None, True, 1.5, b"\x01\x02")) == [None, True, 1.5, "0102"]


async def test_health_is_a_table_in_the_form_that_ciliums_clients_read(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        node.health.report("agent.ipam.expire", "degraded", "cannot", OSError(5, "broken"))
        asked = {"table": "health", "index": "identifier", "key": "YWdlbnQ=", "lowerbound": True}
        got = await node.ask("GET", "/statedb/query", asked)
        rows = [json.loads(line)["obj"] for line in got.raw.splitlines()]
        (row,) = (each for each in rows if each["ID"]["Component"] == ["expire"])
        assert (row["ID"]["Module"], row["Level"], row["Message"]) == (
            ["agent", "ipam"],
            "Degraded",
            "cannot",
        )
        assert (row["Error"], row["LastOK"]) == ("OSError: [Errno 5] broken", "0001-01-01T00:00:00.000Z")
        second = base64.b64encode((2).to_bytes(8, "big")).decode()
        one = {"table": "health", "index": "__revision__", "key": second}
        (only,) = (await node.ask("GET", "/statedb/query", one)).raw.splitlines()
        assert json.loads(only)["rev"] == 2
        for wrong, status in (({"table": "x"}, 404), ({"index": "x"}, 400), ({"key": "*"}, 400)):
            refused = await node.ask("GET", "/statedb/query", asked | wrong)
            assert (refused.status, list(refused.body)) == (status, ["err"])


FIELDS = {
    "devices": "Index MTU Name HardwareAddr Flags Addrs RawFlags Type MasterIndex Selected NotSelectedReason",
    "routes": "Table LinkIndex Scope Dst Src Gw",
    "health": "ID Level Message Error LastOK Updated Stopped Final Count",
}
"""What ``cilium-dbg statedb`` reads of a row; recorded in Cilium 1.17."""


@pytest.mark.parametrize("table", FIELDS)
async def test_a_table_is_read_from_a_revision_on_as_cilium_dbg_does(tmp_path: Path, table: str) -> None:
    async with running_node(tmp_path) as node:
        asked = {"table": table, "index": "__revision__", "key": "AAAAAAAAAAA=", "lowerbound": True}
        lines = [
            json.loads(line) for line in (await node.ask("GET", "/statedb/query", asked)).raw.splitlines()
        ]
        assert lines
        assert all(list(line["obj"]) == FIELDS[table].split() for line in lines)
        assert [line["rev"] for line in lines] == list(range(1, len(lines) + 1))
        new = base64.b64encode((len(lines) + 1).to_bytes(8, "big")).decode()
        node.health.report("agent.ipam.expire", "degraded", "cannot", OSError(5, "broken"))
        changed = (await node.ask("GET", "/statedb/query", asked | {"key": new})).raw.splitlines()
        messages = [json.loads(line)["obj"]["Message"] for line in changed]
        assert ("cannot" in messages) if table == "health" else messages == []


async def test_the_loopback_device_is_shown_with_its_flags_and_addresses(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        asked = {"table": "devices", "index": "__revision__", "key": "AAAAAAAAAAA=", "lowerbound": True}
        rows = [
            json.loads(line)["obj"]
            for line in (await node.ask("GET", "/statedb/query", asked)).raw.splitlines()
        ]
        (lo,) = (row for row in rows if row["Name"] == "lo")
        assert (lo["Type"], lo["HardwareAddr"], lo["Selected"]) == ("device", "", False)
        assert {"Addr": "127.0.0.1", "Secondary": False, "Scope": 254} in lo["Addrs"]
        assert lo["Flags"] & 0b100101 == 0b100101  # up, loopback, running


async def test_a_table_of_what_is_not_built_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        asked = {"table": "bandwidth-qdiscs", "index": "__revision__", "key": "", "lowerbound": True}
        refused = await node.ask("GET", "/statedb/query", asked)
        assert refused.status == 404
        assert "bandwidth manager is not built" in refused.body["err"]
