"""hive cni install and uninstall, and the image's scripts around them."""

import json
import os
import runpy
import subprocess
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hive.init import cni
from hive.main import cli

SCRIPTS = Path(__file__).resolve().parents[3] / "configs" / "image" / "scripts"


def run(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(cli, ["cni", *arguments], env=env)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The image's plugins; the directory of the node is ``host`` beside them."""
    for name in ("cilium-cni", "loopback"):
        (tmp_path / name).write_text(f"new {name}")
    monkeypatch.setattr(cni, "PLUGIN", tmp_path / "cilium-cni")
    monkeypatch.setattr(cni, "LOOPBACK", tmp_path / "loopback")
    return tmp_path / "host" / "opt" / "cni" / "bin"


def test_both_plugins_are_installed_and_an_existing_loopback_stays(plugins: Path, tmp_path: Path) -> None:
    prefix = str(tmp_path / "host")
    result = run("install", HOST_PREFIX=prefix)
    assert result.exit_code == 0
    assert result.output.splitlines()[-2:] == [
        f"Installing cilium-cni to {plugins} ...",
        f"Wrote {plugins / 'cilium-cni'}",
    ]
    assert sorted(path.name for path in plugins.iterdir()) == ["cilium-cni", "loopback"]
    assert (plugins / "cilium-cni").stat().st_mode & 0o777 == 0o755

    for name in ("cilium-cni", "loopback"):
        (plugins / name).write_text("old")
    run("install", HOST_PREFIX=prefix)
    assert (plugins / "cilium-cni").read_text() == "new cilium-cni"
    assert (plugins / "loopback").read_text() == "old"
    run("install", HOST_PREFIX=prefix, OVERWRITE_LOOPBACK="true", OVERWRITE_CILIUM="false")
    assert (plugins / "loopback").read_text() == "new loopback"


@pytest.mark.parametrize(
    ("env", "directory"),
    [
        ({}, "/opt/cni/bin"),
        ({"HOST_PREFIX": "/host"}, "/host/opt/cni/bin"),
        ({"CNI_DIR": "/cni"}, "/cni/bin"),
    ],
)
def test_the_plugin_goes_where_the_node_s_runtime_looks(
    env: dict[str, str], directory: str, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del plugins
    written: list[str] = []
    monkeypatch.delenv("HOST_PREFIX", raising=False)
    monkeypatch.setattr(cni, "put", lambda _, to, **how: written.append(f"{to} {sorted(how)}"))
    assert run("install", **env).exit_code == 0
    assert written == [f"{directory}/{name} ['overwrite']" for name in ("loopback", "cilium-cni")]


def test_containers_of_the_image_have_the_node_s_files_below_host(tmp_path: Path) -> None:
    build = runpy.run_path(str(SCRIPTS.parent / "build.py"))
    assert list(build["archive_of"]([], tmp_path / "image.tar", "hive:test", 0)) == []
    with tarfile.open(tmp_path / "image.tar") as archive:
        bodies = [json.load(content) for one in archive if (content := archive.extractfile(one))]
    (config,) = [one["config"] for one in bodies if "rootfs" in one]
    assert "HOST_PREFIX=/host" in config["Env"]


def test_a_plugin_that_runs_can_be_replaced(plugins: Path, tmp_path: Path) -> None:
    plugins.mkdir(parents=True)
    (plugins / "cilium-cni").write_bytes(Path("/bin/sleep").read_bytes())
    (plugins / "cilium-cni").chmod(0o755)
    busy = subprocess.Popen([plugins / "cilium-cni", "60"])
    try:
        assert run("install", HOST_PREFIX=str(tmp_path / "host")).exit_code == 0
        assert busy.poll() is None
    finally:
        busy.kill()
        busy.wait()


def test_a_plugin_that_cannot_be_written_fails(plugins: Path, tmp_path: Path) -> None:
    plugins.mkdir(parents=True)
    (plugins / "cilium-cni").mkdir()
    result = run("install", f"--host-prefix={tmp_path / 'host'}")
    assert result.exit_code == 1
    assert "cilium-cni not installed: " in result.output
    assert [path.name for path in plugins.iterdir() if path.name.startswith(".")] == []


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node with CNI configurations of several owners."""
    directory = tmp_path / "host" / "etc" / "cni" / "net.d"
    directory.mkdir(parents=True)
    for name in ("05-cilium.conflist", "10-cilium-old.conf", "10-x.conflist.cilium_bak", "20-flannel.conf"):
        (directory / name).touch()
    return directory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def uninstall(tmp_path: Path, setting: str | None, **env: str) -> Result:
    (tmp_path / "config").mkdir()
    if setting is not None:
        (tmp_path / "config" / "cni-uninstall").write_text(setting)
    return run("uninstall", f"--config-dir={tmp_path / 'config'}", HOST_PREFIX=str(tmp_path / "host"), **env)


@pytest.mark.parametrize("setting", [None, "false", "TRUE", "true x"])
def test_nothing_is_removed_unless_it_is_asked_for(node: Path, tmp_path: Path, setting: str | None) -> None:
    before = names(node)
    result = uninstall(tmp_path, setting)
    assert (result.exit_code, result.output) == (
        0,
        "cni-uninstall disabled, not removing CNI configuration\n",
    )
    assert names(node) == before


def test_only_our_configurations_are_removed(node: Path, tmp_path: Path) -> None:
    assert uninstall(tmp_path, "true\n").exit_code == 0
    assert names(node) == ["10-x.conflist.cilium_bak", "20-flannel.conf"]


def test_a_custom_configuration_stays(node: Path, tmp_path: Path) -> None:
    before = names(node)
    assert uninstall(tmp_path, "true", CILIUM_CUSTOM_CNI_CONF="true").exit_code == 0
    assert names(node) == before


@pytest.mark.parametrize(
    ("script", "env", "called"),
    [
        ("install-plugin.sh", {}, ["cni install"]),
        ("cni-uninstall.sh", {}, ["cni uninstall"]),
        ("init-container.sh", {}, []),
        ("init-container.sh", {"CLEAN_CILIUM_BPF_STATE": "true"}, ["cleanup --force --bpf-state"]),
        (
            "init-container.sh",
            {"CILIUM_BPF_STATE": "true", "CLEAN_CILIUM_STATE": "true"},
            ["cleanup --force --bpf-state", "cleanup --force --all-state"],
        ),
    ],
)
def test_the_image_scripts_only_call_hive(
    tmp_path: Path, script: str, env: dict[str, str], called: list[str]
) -> None:
    (tmp_path / "hive").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    (tmp_path / "hive").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run([SCRIPTS / script], env={"PATH": path, **env}, check=True)
    log = tmp_path / "called"
    assert (log.read_text().splitlines() if log.exists() else []) == called
