"""Differences between the configured and the running settings."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cells.config import AgentConfig
from cells.config.drift import Change, ConfigDrift
from cells.unsupported import WithoutEffect
from lifecycle import Hive, Settings, Sources, config, invoke, provide, supply
from lifecycle.testing import eventually

pytestmark = pytest.mark.anyio


class Some(Settings, frozen=True):
    """Settings of the test."""

    mtu: int = 1500
    """A number."""
    name: str = "a"
    """A text."""


class Unused(WithoutEffect, frozen=True):
    """Accepted, and of no use."""

    buffers: int = 1
    """A number."""


@asynccontextmanager
async def running(state_dir: Path, sources: Sources) -> AsyncIterator[tuple[Hive, ConfigDrift]]:
    agent = AgentConfig.__new__(AgentConfig)
    agent.state_dir = agent.state = state_dir
    agent.api_socket = state_dir / "cilium.sock"
    hive = Hive(
        config(Some, Unused),
        supply(agent, AgentConfig),
        provide(ConfigDrift),
        invoke(ConfigDrift),
        settings=sources,
    )
    async with hive.started():
        yield hive, hive.get(ConfigDrift)


def health(hive: Hive) -> str:
    return "\n".join(
        f"{one.level} {one.message}" for one in hive.health.snapshot() if one.module.endswith("drift")
    )


def reports(hive: Hive) -> list[str]:
    """The status of every part, errors too."""
    return [f"{one.message} {one.error or ''}" for one in hive.health.snapshot()]


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """A ConfigMap as the kubelet mounts it."""
    directory = tmp_path / "config"
    directory.mkdir()
    swap(directory, 1, mtu="1400")
    return directory


def swap(directory: Path, generation: int, **values: str) -> None:
    """Put a new generation in place, as the kubelet does."""
    fresh = directory / f"..data_{generation}"
    fresh.mkdir()
    for name, value in values.items():
        (fresh / name).write_text(value)
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    (directory / "..data_tmp").symlink_to(fresh.name)
    (directory / "..data_tmp").replace(directory / "..data")


async def test_a_swapped_config_map_is_noticed_and_so_is_the_way_back(tmp_path: Path, mounted: Path) -> None:
    async with running(tmp_path, Sources(config_dir=mounted)) as (hive, drift):
        await eventually(lambda: hive.get(ConfigDrift).changes == ())
        swap(mounted, 2, mtu="1300", name="b")
        expected = (
            Change("mtu", "1400", "1300", f"file {mounted}/mtu"),
            Change("name", "a", "b", f"file {mounted}/name"),
        )
        await eventually(lambda: drift.changes == expected)
        await eventually(lambda: "restart the agent to apply it" in health(hive))
        swap(mounted, 3, mtu="1400", name="a")
        await eventually(lambda: drift.changes == ())
        await eventually(lambda: "matches the running configuration" in health(hive))


async def test_a_configured_value_that_would_be_refused_is_reported(tmp_path: Path, mounted: Path) -> None:
    async with running(tmp_path, Sources(config_dir=mounted)) as (hive, drift):
        swap(mounted, 2, mtu="many")
        await eventually(lambda: [change.name for change in drift.changes] == ["(refused)"])
        await eventually(lambda: f"no agent would start from it ({mounted}/mtu: 'many'" in health(hive))
        assert drift.changes[0].configured.startswith(f"{mounted}/mtu: 'many': expected")


async def test_a_setting_given_by_flag_shows_no_drift(tmp_path: Path, mounted: Path) -> None:
    async with running(tmp_path, Sources(["--mtu=9000"], config_dir=mounted)) as (_, drift):
        swap(mounted, 2, mtu="1300", name="c")
        await eventually(lambda: [change.name for change in drift.changes] == ["name"])


async def test_a_setting_without_effect_does_not_drift(tmp_path: Path, mounted: Path) -> None:
    async with running(tmp_path, Sources(config_dir=mounted)) as (_, drift):
        swap(mounted, 2, mtu="1400", name="c", buffers="7")
        await eventually(lambda: [change.name for change in drift.changes] == ["name"])


async def test_a_named_file_is_watched_too(tmp_path: Path, mounted: Path) -> None:
    file = tmp_path / "elsewhere" / "hive.yaml"
    file.parent.mkdir()
    file.write_text("name: b")
    sources = Sources([f"--config={file}"], config_dir=mounted, file_flag="config")
    async with running(tmp_path, sources) as (hive, drift):
        await eventually(
            lambda: f"ok {file} with {mounted} matches the running configuration" in health(hive)
        )
        swap(mounted, 2, mtu="1400", name="never counts")
        file.write_text("name: c")
        await eventually(lambda: drift.changes == (Change("name", "b", "c", f"file {file}"),))


def copied(config_dir: Path, *sources: Path | str, deny: list[str] | None = None, **values: str) -> None:
    """A config-dir as build-config leaves it."""
    config_dir.mkdir()
    listed = [
        {"kind": "directory" if isinstance(one, Path) else "node", "namespace": "", "name": str(one)}
        for one in sources
    ]
    (config_dir / "config-sources").write_text(json.dumps(listed))
    overrides = {"allowConfigKeys": None, "denyConfigKeys": deny}
    (config_dir / "config-sources-overrides").write_text(json.dumps(overrides))
    for name, value in values.items():
        (config_dir / name).write_text(value)


async def test_of_a_copied_config_dir_the_mounted_config_maps_are_watched(
    tmp_path: Path, mounted: Path
) -> None:
    second = tmp_path / "second"
    second.mkdir()
    (second / "name").write_text("b")
    copied(tmp_path / "copy", mounted, second, mtu="1400", name="b")
    async with running(tmp_path, Sources(config_dir=tmp_path / "copy")) as (hive, drift):
        await eventually(
            lambda: f"ok {second} with {mounted} matches the running configuration" in health(hive)
        )
        swap(mounted, 2, mtu="1300", name="never counts")
        await eventually(lambda: drift.changes == (Change("mtu", "1400", "1300", f"file {mounted}/mtu"),))
        (second / "name").unlink()
        await eventually(lambda: [change.configured for change in drift.changes] == ["1300", "never counts"])


@pytest.mark.parametrize("how", ["of a cluster", "filtered", "not mounted", "by hand", "broken"])
async def test_unwatchable_sources_are_not_watched(tmp_path: Path, mounted: Path, how: str) -> None:
    copy = tmp_path / "copy"
    copied(
        copy,
        tmp_path / "missing" if how == "not mounted" else mounted,
        *(["worker-1"] if how == "of a cluster" else []),
        deny=["mtu"] if how == "filtered" else None,
        mtu="1400",
    )
    if how == "by hand":
        (copy / "config-sources").unlink()
    if how == "broken":
        (copy / "config-sources").write_text("directory:/etc")
    async with running(tmp_path, Sources(config_dir=copy)) as (hive, drift):
        await eventually(lambda: f"ok {copy} matches the running configuration" in health(hive))
        (copy / "mtu").write_text("1200")
        await eventually(lambda: [change.configured for change in drift.changes] == ["1200"])


async def test_a_config_dir_that_is_replaced_is_watched_again(tmp_path: Path) -> None:
    directory = tmp_path / "plain"
    directory.mkdir()
    (directory / "mtu").write_text("1400")
    async with running(tmp_path, Sources(config_dir=directory)) as (hive, drift):
        await eventually(lambda: "matches the running configuration" in health(hive))
        directory.rename(tmp_path / "away")
        await eventually(lambda: any("was removed or replaced" in one for one in reports(hive)))
        directory.mkdir()
        (directory / "mtu").write_text("1200")
        await eventually(lambda: [change.configured for change in drift.changes] == ["1200"])


async def test_without_a_config_dir_nothing_is_watched(tmp_path: Path) -> None:
    async with running(tmp_path, Sources(["--mtu=9000"])) as (hive, drift):
        assert drift.changes == ()
        assert health(hive).startswith("ok no config-dir")


async def test_three_generations_of_the_running_configuration_are_saved(tmp_path: Path) -> None:
    for mtu in (1, 2, 3, 4):
        async with running(tmp_path, Sources([f"--mtu={mtu}"])):
            pass
    retained = [tmp_path / f"agent-runtime-config{suffix}.json" for suffix in ("", "-1", "-2", "-3")]
    assert [json.loads(path.read_text())["Settings"]["mtu"] for path in retained[:3]] == ["4", "3", "2"]
    assert not retained[3].exists()
    assert json.loads((tmp_path / "viper-agent-config.yaml").read_text()) == {"mtu": "4"}
    for_tools = json.loads(retained[0].read_text())
    assert (for_tools["EnableIPv4"], for_tools["EnableIPv6"], for_tools["ClockSource"]) == (True, False, 0)
    assert (tmp_path / "agent-runtime-config.json").stat().st_mode & 0o777 == 0o600


async def test_a_copy_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    async with running(tmp_path / "missing", Sources(["--mtu=7"])) as (_, drift):
        found = {one.option.name: one.text for one in drift.settings()}
        assert found == {"mtu": "7", "name": "a", "buffers": "1"}
