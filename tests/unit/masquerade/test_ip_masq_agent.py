"""ip-masq-agent's file: its valid contents, and reloads."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from cells.config import AgentConfig
from cells.maps.node_maps import Maps
from cells.masquerade.devices import MasqueradeSettings
from cells.masquerade.ip_masq_agent import (
    DEFAULTS,
    LINK_LOCAL,
    IpMasqAgent,
    key_of,
    network_table,
    read_networks,
)
from lifecycle import Hive, config, invoke, provide, supply
from lifecycle.testing import eventually
from tests.support.fake_map import SPECS, FakeMap

PRIVATE = ip_network("10.0.0.0/8")


@pytest.mark.parametrize(
    ("text", "networks"),
    [
        (None, {*DEFAULTS, *LINK_LOCAL}),
        ("", {*DEFAULTS, *LINK_LOCAL}),
        ("\n", set(LINK_LOCAL)),
        ("{}", set(LINK_LOCAL)),
        ("nonMasqueradeCIDRs: [10.0.0.0/8]", {PRIVATE, *LINK_LOCAL}),
        ('{"nonMasqueradeCIDRs": ["10.0.0.0/8", "2001:db8::/32"], "masqLinkLocal": true, "resync": "1m"}',
         {PRIVATE, ip_network("2001:db8::/32"), LINK_LOCAL[1]}),
        ("masqLinkLocal: true\nmasqLinkLocalIPv6: true\n", set()),
    ],
)  # fmt: skip
def test_networks_are_read_from_the_ip_masq_agent_file(text: str | None, networks: set[object]) -> None:
    assert read_networks(text) == networks


@pytest.mark.parametrize(
    "text",
    [
        *(
            "[1, 2]",
            "nonMasqueradeCIDRs: 10.0.0.0/8",
            "nonMasqueradeCIDRs: [nowhere]",
            "a: [",
            "masqLinkLocal: 1",
        ),
        *("nonMasqueradeCIDRs: [10.0.0.0]", "nonMasqueradeCIDRs: [10.0.0.0/255.0.0.0]"),
    ],
)
def test_an_invalid_ip_masq_agent_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as refused:
        read_networks(text)
    assert "\n" not in str(refused.value)


def health(hive: Hive) -> str:
    return " ".join(one.message for one in hive.health.snapshot())


def is_watched(directory: Path) -> bool:
    """Whether this process has an inotify watch there (proc(5), fdinfo)."""
    found = [each.read_text() for each in Path("/proc/self/fdinfo").iterdir() if each.exists()]
    return f" ino:{directory.stat().st_ino:x} " in "".join(found)


def agent(path: Path) -> tuple[Hive, Any]:
    """An agent with that file, of IPv4 alone, and its maps."""
    maps: Any = Maps.__new__(Maps)
    maps.ipmasq4, maps.ipmasq6 = FakeMap(SPECS["ipmasq4"]), FakeMap(SPECS["ipmasq6"])
    maps.use = lambda *_: None
    hive = Hive(
        config(MasqueradeSettings),
        supply(maps, Maps),
        supply(AgentConfig.__new__(AgentConfig)),
        provide(IpMasqAgent, network_table),
        invoke(IpMasqAgent),
        settings={"enable-ip-masq-agent": "true", "ip-masq-agent-config-path": str(path)},
    )
    return hive, maps


@pytest.mark.anyio
async def test_the_file_is_followed_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "config" / "ip-masq-agent"
    hive, maps = agent(path)
    async with hive.started():
        await eventually(lambda: len(maps.ipmasq4.raw) == len(DEFAULTS) + 1)
        path.parent.parent.mkdir()
        await eventually(lambda: is_watched(path.parent.parent))
        path.parent.mkdir()
        path.write_text("nonMasqueradeCIDRs: [10.0.0.0/8]")
        await eventually(lambda: maps.ipmasq4.raw.keys() == {key_of(PRIVATE), key_of(LINK_LOCAL[0])})
        path.write_text("nonMasqueradeCIDRs: [nowhere]")
        await eventually(lambda: "networks stay as they were" in health(hive))
        assert len(maps.ipmasq4.raw) == 2
        path.unlink()
        await eventually(lambda: len(maps.ipmasq4.raw) == len(DEFAULTS) + 1)
    assert not maps.ipmasq6.raw


@pytest.mark.anyio
async def test_a_wrong_file_at_the_start_leaves_the_networks_of_the_agent_before(tmp_path: Path) -> None:
    path = tmp_path / "ip-masq-agent"
    path.write_text("nonMasqueradeCIDRs: [nowhere]")
    hive, maps = agent(path)
    maps.ipmasq4.update(key_of(PRIVATE), b"\1")
    async with hive.started():
        await eventually(lambda: "networks stay as they were" in health(hive))
        path.write_text("nonMasqueradeCIDRs: [192.0.2.0/24]")
        other = key_of(ip_network("192.0.2.0/24"))
        await eventually(lambda: maps.ipmasq4.raw.keys() == {other, key_of(LINK_LOCAL[0])})
    written, removed = (
        maps.ipmasq4.writes.index(("update", str(other))),
        maps.ipmasq4.writes.index(("delete", str(key_of(PRIVATE)))),
    )
    assert written < removed, "it was left until the file was right"


@pytest.mark.anyio
async def test_the_file_is_followed_in_a_directory_that_another_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "config" / "ip-masq-agent"
    path.parent.mkdir()
    path.write_text("nonMasqueradeCIDRs: [10.0.0.0/8]")
    hive, maps = agent(path)
    async with hive.started():
        await eventually(lambda: key_of(PRIVATE) in maps.ipmasq4.raw)
        fresh = tmp_path / "fresh"
        fresh.mkdir()
        (fresh / path.name).write_text("nonMasqueradeCIDRs: [192.0.2.0/24]")
        path.parent.rename(tmp_path / "old")
        fresh.rename(path.parent)
        await eventually(lambda: key_of(ip_network("192.0.2.0/24")) in maps.ipmasq4.raw)
        path.write_text("nonMasqueradeCIDRs: [198.18.0.0/15]")
        await eventually(lambda: key_of(ip_network("198.18.0.0/15")) in maps.ipmasq4.raw)
