"""The image's root filesystem, assembled as its Containerfile says, once for all tests."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.namespaces import need_root

PROJECT = Path(__file__).resolve().parents[3]
IMAGE = PROJECT / "configs" / "image"
SUITE = "bookworm"


def call(*command: str | Path) -> None:
    """Run a command; what it printed is the error."""
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Debian's base and the packages of the image, and our wheel on top."""
    need_root()
    folder = tmp_path_factory.mktemp("image")
    root, wheels = folder / "rootfs", folder / "wheels"
    lines = (IMAGE / "packages").read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    call("mmdebstrap", "--variant=essential", f"--include={','.join(packages)}", SUITE, root)
    call(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", wheels)
    (wheel,) = wheels.glob("*.whl")
    call(IMAGE / "install", sys.executable, wheel, root)
    yield root
    shutil.rmtree(folder)
