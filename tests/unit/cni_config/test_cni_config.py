"""The CNI configuration file: contents, time of writing, and write errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import structlog

from cells.cni import CniServer, QueueLock
from cells.cni.configuration import CniConfigFileSettings, CniConfigSettings, cell, write_file
from cells.config import AgentConfig, AgentSettings
from cells.observe.bootstrap import ApiServed
from lifecycle import HealthStatus, Hive, Lifecycle, SettingsError, config, invoke, replace
from lifecycle.testing import eventually


def test_the_file_is_roots_alone_and_an_unchanged_one_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "cni" / "net.d" / "05-cilium.conflist"
    assert write_file(path, b"one")
    before = path.stat()
    assert before.st_mode & 0o7777 == 0o600
    assert not write_file(path, b"one")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert write_file(path, b"two")
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_file_that_cannot_take_its_place_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "05-cilium.conflist"
    path.mkdir()
    (path / "x").touch()
    with pytest.raises(OSError, match="directory"):
        write_file(path, b"one")
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"cni-chaining-mode": "generic-veth"}, "cni-chaining-mode=generic-veth: set cni-chaining-target"),
        (
            {"cni-chaining-mode": "portmap", "cni-chaining-target": "others"},
            "cni-chaining-mode=portmap: leave cni-chaining-target out, ",
        ),
        ({"cni-chaining-mode": "calico"}, "cni-chaining-mode=calico: expected one of none, aws-cni"),
        ({"read-cni-conf": "x.conf"}, "read-cni-conf=x.conf: expected an absolute path"),
        ({"cni-mac-addr-mode": "Random"}, "cni-mac-addr-mode=Random: expected random, deterministic"),
        (
            {"cni-fixed-mac": "01:00:00:00:00:01"},
            "cni-fixed-mac=01:00:00:00:00:01: expected a unicast MAC address",
        ),
        ({"cni-fixed-mac": "00:00:00:00:00:00"}, "other than zero"),
        ({"cni-fixed-mac": "aa:bb"}, "cni-fixed-mac=aa:bb: expected a MAC address"),
        ({"cni-prefix-mac-map": "{"}, "cni-prefix-mac-map={: expected a JSON object: "),
        ({"cni-prefix-mac-map": '["a"]'}, 'cni-prefix-mac-map=["a"]: expected a JSON object of prefixes'),
        (
            {"cni-prefix-mac-map": '{"a": 1}'},
            'cni-prefix-mac-map={"a": 1}: expected a JSON object of prefixes',
        ),
        (
            {"cni-prefix-mac-map": '{"a-": "x"}'},
            'cni-prefix-mac-map={"a-": "x"}: a-=x: expected a MAC address',
        ),
        (
            {"write-cni-conf-when-ready": "x.conflist"},
            "write-cni-conf-when-ready=x.conflist: expected an absolute",
        ),
        ({"cni-log-file": "x.log"}, "cni-log-file=x.log: expected an absolute path"),
    ],
)
def test_inconsistent_settings_are_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Hive(config(CniConfigSettings, CniConfigFileSettings), invoke(read_settings), settings=values).check()
    assert text in str(caught.value)
    assert caught.value.exit_code == 2


def read_settings(_contents: CniConfigSettings, _file: CniConfigFileSettings) -> None:
    """A root that needs the settings."""


class Held(QueueLock):
    """A queue that only records its lock."""

    def __init__(self) -> None:
        self.released = False

    def release(self) -> None:
        self.released = True


def cni_hive(tmp_path: Path, file: Path | None, queue: Held | None = None, **values: object) -> Hive:
    """The cell under test, everything before it being there already."""
    agent = AgentConfig(AgentSettings(state_dir=tmp_path / "run"), Lifecycle("test"), structlog.get_logger())
    return Hive(
        cell,
        replace(AgentConfig, agent),
        replace(QueueLock, queue or Held()),
        replace(CniServer, CniServer.__new__(CniServer)),
        replace(ApiServed, ApiServed()),
        settings={
            "write-cni-conf-when-ready": str(file or ""),
            **{name.replace("_", "-"): value for name, value in values.items()},
        },
    )


def health(hive: Hive) -> HealthStatus:
    """Health of the module."""
    return next(status for status in hive.health.snapshot() if status.module.endswith("cni-config"))


@pytest.mark.anyio
async def test_once_both_sockets_serve_the_queue_opens_and_the_file_is_there(tmp_path: Path) -> None:
    path, queue = tmp_path / "net.d" / "05-cilium.conflist", Held()
    hive = cni_hive(tmp_path, path, queue)
    async with hive.started():
        assert queue.released
        await eventually(path.exists)
        await eventually(lambda: health(hive).level == "ok")
        (plugin,) = json.loads(path.read_text())["plugins"]
        assert plugin["agent-socket"] == str(tmp_path / "run" / "cni.sock")
        assert health(hive).message == f"successfully wrote CNI configuration file to {path}"
    assert path.exists()


@pytest.mark.anyio
async def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    queue = Held()
    hive = cni_hive(tmp_path, None, queue)
    async with hive.started():
        assert queue.released
        assert (health(hive).level, health(hive).message) == ("ok", "CNI configuration management disabled")
    assert names(tmp_path) == []


@pytest.mark.anyio
async def test_a_file_that_cannot_be_written_degrades_health_until_it_can(tmp_path: Path) -> None:
    path = tmp_path / "05-cilium.conflist"
    path.mkdir()
    (path / "x").touch()
    hive = cni_hive(tmp_path, path, Held())
    async with hive.started():
        await eventually(lambda: health(hive).level == "degraded")
        assert f"failed to write CNI configuration file {path}: " in health(hive).message
        (path / "x").unlink()
        path.rmdir()
        await eventually(lambda: health(hive).level == "ok")
        assert path.is_file()


@pytest.mark.anyio
async def test_an_exclusive_file_is_put_back_and_others_are_renamed(tmp_path: Path) -> None:
    path = tmp_path / "net.d" / "05-cilium.conflist"
    hive = cni_hive(tmp_path, path, cni_exclusive=True)
    async with hive.started():
        await eventually(path.exists)
        wanted = path.read_bytes()
        path.unlink()
        await eventually(path.exists)
        path.write_text("edited")
        await eventually(lambda: path.read_bytes() == wanted)
        (path.parent / "00-flannel.conflist").write_text("{}")
        await eventually(lambda: names(path.parent) == ["00-flannel.conflist.cilium_bak", path.name])
        (path.parent / ".hidden.conf").write_text("{}")
        await eventually(lambda: ".hidden.conf.cilium_bak" in names(path.parent))
        for entry in path.parent.iterdir():
            entry.unlink()
        path.parent.rmdir()
        await eventually(path.exists)


@pytest.mark.anyio
async def test_a_file_that_is_not_exclusive_is_left_to_others(tmp_path: Path) -> None:
    path = tmp_path / "05-cilium.conflist"
    (tmp_path / "10-istio.conflist").write_text("{}")
    hive = cni_hive(tmp_path, path)
    async with hive.started():
        await eventually(lambda: health(hive).level == "ok")
        assert "10-istio.conflist" in names(tmp_path)


@pytest.mark.anyio
async def test_a_network_to_be_chained_to_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "05-cilium.conflist"
    hive = cni_hive(tmp_path, path, cni_chaining_target="ptp")
    async with hive.started():
        await eventually(lambda: health(hive).level == "degraded")
        assert "no matching CNI configurations found (will retry)" in health(hive).message
        (tmp_path / "10-ptp.conf").write_text('{"name": "ptp", "type": "ptp"}')
        await eventually(path.exists)
        assert [plugin["type"] for plugin in json.loads(path.read_text())["plugins"]] == ["ptp", "cilium-cni"]


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(entry.name for entry in folder.iterdir())
