"""Fixtures: the image, built once for all tests."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machine import outside
from tests.support.namespaces import need_root
from tests.support.points import EVERY

# Building it takes half a minute: left to a soak (make soak).
collect_ignore = [] if EVERY else ["test_image.py", "test_envoy.py", "test_bgp.py", "test_upgraded_chart.py"]
PROJECT = Path(__file__).resolve().parents[3]


def call(*command: str | Path) -> str:
    """Run a command that may download packages; its output is the error message."""
    done = subprocess.run(outside(*command), cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")
    return done.stdout


@pytest.fixture(scope="session")
def image(wheel: Path) -> Path:
    """Build the archive of configs/image/build.py."""
    archive = wheel.parent / "hive-agent.tar"
    call(sys.executable, "configs/image/build.py", archive, "--wheel", wheel)
    return archive


@pytest.fixture(scope="session")
def envoy_image(wheel: Path) -> Path:
    """Build the one with Envoy."""
    archive = wheel.parent / "hive-envoy.tar"
    tag = "localhost/hive-agent:0.1.0-envoy"
    call(sys.executable, "configs/image/build.py", archive, "--wheel", wheel, "--envoy", "--tag", tag)
    return archive


@pytest.fixture(scope="session")
def bgp_image(wheel: Path) -> Path:
    """Build the one with gobgpd."""
    archive = wheel.parent / "hive-bgp.tar"
    tag = "localhost/hive-agent:0.1.0-bgp"
    call(sys.executable, "configs/image/build.py", archive, "--wheel", wheel, "--bgp", "--tag", tag)
    return archive


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Build our package in a temporary folder."""
    need_root()
    folder = tmp_path_factory.mktemp("image")
    call(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder / "wheels")
    (made,) = (folder / "wheels").glob("*.whl")
    yield made
    shutil.rmtree(folder)
