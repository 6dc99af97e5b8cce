"""Two successive builds of the image in separate folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.machine import outside

pytestmark = pytest.mark.timeout(600)

BUILD = Path(__file__).resolve().parents[2] / "configs" / "image" / "build.py"


def test_the_same_sources_give_the_same_bytes(tmp_path: Path) -> None:
    archives = [tmp_path / name for name in ("first.tar", "second.tar")]
    for archive in archives:
        subprocess.run(outside(sys.executable, BUILD, archive), check=True)
    assert archives[0].read_bytes() == archives[1].read_bytes()
