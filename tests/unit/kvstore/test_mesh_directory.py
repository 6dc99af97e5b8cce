"""Recordings of Cilium's remote cluster directory, and of accepted ids and names."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from cells.cluster.identity.numbers import ClusterNumbers
from cells.clustermesh import ConfigDirectory, tables
from cells.clustermesh.keys import announcement_fault, read_announcement
from cells.clustermesh.tables import MeshTables
from cells.config import AgentConfig, AgentSettings
from lifecycle import Hive, Jobs, Lifecycle, invoke, supply
from lifecycle.testing import eventually
from tests.support.recordings import recordings

ALL = [json.loads(path.read_text()) for path in sorted(recordings("clustermesh").glob("*.json"))]
DIRECTORIES = [one for one in ALL if one["kind"] == "config_dir"]
VALIDATED = [one for one in ALL if one["kind"] == "validate"]


def act(folder: Path, operation: str, name: str, text: str) -> None:
    path = folder / name
    match operation:
        case "write":
            path.write_text(text)
        case "rename_over":
            fresh = folder.parent / "fresh"
            fresh.write_text(text)
            fresh.replace(path)
        case "remove":
            path.unlink()
        case "removeall":
            shutil.rmtree(path)
        case "mkdir":
            path.mkdir()
        case "symlink":
            path.symlink_to(text)
        case "rename":
            path.rename(folder / text)
        case _:
            raise AssertionError(operation)


def follow(mesh: MeshTables, lifecycle: Lifecycle, jobs: Jobs) -> None:
    assert mesh.directory is not None
    ConfigDirectory(mesh.directory, mesh, lifecycle=lifecycle, jobs=jobs)


def following(folder: Path) -> Hive:
    settings = AgentSettings(cluster_name="home", cluster_id=1)
    known = AgentConfig(settings, Lifecycle("test"), structlog.get_logger())
    return Hive(tables.cell, supply(known), invoke(follow), settings={"clustermesh-config": str(folder)})


def digests(mesh: MeshTables) -> dict[str, str]:
    return {row.name: row.digest for row in mesh.files.all() if row.name != "marker"}


async def seen(mesh: MeshTables, folder: Path, text: str) -> None:
    """Wait until all that has happened in the folder was taken in."""
    before = mesh.files.get("marker")
    (folder / "marker").write_text(f"endpoints: {text}")
    await eventually(lambda: mesh.files.get("marker") not in (before, None))


@pytest.mark.anyio
@pytest.mark.parametrize("recorded", DIRECTORIES, ids=[one["name"] for one in DIRECTORIES])
async def test_files_come_change_and_go_as_recorded(recorded: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "clustermesh"
    folder.mkdir()
    first, *steps = recorded["steps"]
    for action in first["do"] or ():
        act(folder, *action)
    hive = following(folder)
    async with hive.started():
        mesh = hive.get(MeshTables)
        await mesh.files.wait_initialized()
        before: dict[str, str] = {}
        for number, step in enumerate([{**first, "do": ()}, *steps]):
            for action in step["do"]:
                act(folder, *action)
            await seen(mesh, folder, str(number))
            now = digests(mesh)
            events = [
                {"cluster": name, "event": "add_or_reconnect", "file": name}
                for name in now
                if before.get(name) != now[name]
            ]
            events += [{"cluster": name, "event": "remove"} for name in before.keys() - now.keys()]
            assert sorted(events, key=lambda one: one["cluster"]) == step["events"]
            before = now


@pytest.mark.anyio
async def test_a_link_to_a_file_elsewhere_is_followed(tmp_path: Path) -> None:
    folder, target = tmp_path / "clustermesh", tmp_path / "east"
    folder.mkdir()
    target.write_text("endpoints: [http://a]")
    (folder / "east").symlink_to(target)
    hive = following(folder)
    async with hive.started():
        mesh = hive.get(MeshTables)
        await eventually(lambda: "east" in mesh.files)
        before = mesh.files.get("east")
        target.write_text("endpoints: [http://b]")
        await eventually(lambda: mesh.files.get("east") not in (before, None))
        target.unlink()
        await eventually(lambda: "east" not in mesh.files)


@pytest.mark.anyio
async def test_a_fifo_and_a_large_file_are_no_configurations(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    hive = following(tmp_path)
    async with hive.started():
        mesh = hive.get(MeshTables)
        await seen(mesh, tmp_path, "1")
        assert digests(mesh) == {}


@pytest.mark.parametrize("recorded", VALIDATED, ids=[one["name"] for one in VALIDATED])
def test_ids_and_names_are_taken_or_refused_as_recorded(recorded: dict[str, Any]) -> None:
    number, most = recorded["cluster-id"], recorded["max-connected-clusters"]
    settings = AgentSettings(
        cluster_name=recorded["cluster-name"], cluster_id=number, max_connected_clusters=most
    )
    wrong = recorded["init_error"] or recorded["local_error"]
    faults = list(settings.faults())
    assert len(faults) == (wrong is not None)
    assert all(wrong in fault for fault in faults)
    found = read_announcement(msgspec.json.encode(recorded["remote_config"]))
    assert announcement_fault(found, ClusterNumbers(number, most)) == (recorded["remote_error"] or "")


def test_other_sizes_of_a_mesh_are_refused_in_ciliums_words() -> None:
    (fault,) = AgentSettings(cluster_name="home", cluster_id=1, max_connected_clusters=300).faults()
    assert "--max-connected-clusters=300 is invalid; supported values are [255, 511]" in fault


@pytest.mark.parametrize("value", [b"x", b"", b"[]", b'{"id":"2"}', b'{"id":-1.5}'])
def test_an_announcement_that_cannot_be_read_is_an_error(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_announcement(value)
