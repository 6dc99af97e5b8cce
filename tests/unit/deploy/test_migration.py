"""docs/migrate-from-cilium.md: what is refused of what Cilium's chart makes by default."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from hive.main import cli
from tests.unit.deploy.test_chart import CONFIG, load

PAGE = Path(__file__).resolve().parents[3] / "docs" / "migrate-from-cilium.md"


def test_the_page_shows_all_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = load("default")["rendered"][CONFIG]
    recorded["data"] = {key: value or "" for key, value in recorded["data"].items()}
    Path("manifests").mkdir()
    Path("manifests/cilium-config.yaml").write_text(yaml.safe_dump(recorded))
    lines = [
        line
        for line in PAGE.read_text().splitlines()
        if line.startswith(("$ hive build-config", "$ hive config"))
    ]
    run = CliRunner()
    built = run.invoke(cli, lines[0].split()[2:])
    assert built.exit_code == 0, built.output
    listed = run.invoke(cli, lines[1].partition(";")[0].split()[2:])
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("hive: config/")]
    assert sorted(listed.output.splitlines()) == sorted(shown)
