"""Runs the framework's command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
MAIN = """\
#!{python}
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from test_command import heart
from lifecycle import main
main(heart(), version="1.0")
"""


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """Run the command as installed: an executable in PATH."""
    path = tmp_path / "bin" / "heart"
    path.parent.mkdir()
    path.write_text(MAIN.format(python=sys.executable, root=str(ROOT), tests=str(Path(__file__).parent)))
    path.chmod(0o755)
    return path
