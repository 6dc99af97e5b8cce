"""The examples of the documentation: their own tests, run as their first lines say."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'docs/examples'}:{ROOT}", "COLUMNS": "80"}


def test_the_examples_pass_their_own_tests() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "docs/examples"],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_example_finder_prints_its_help(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "finder", "inspect", "--look-every=5s"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    ).stdout
    assert ", 1 given" in shown
    assert "· provide Table[str, Note] from notes <- FolderSettings, Files" in shown
    assert "· hook    serve the socket" in shown
