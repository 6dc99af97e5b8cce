"""``hive config reference``: the agent's settings as a page and as a schema."""

import json
from pathlib import Path

import jsonschema_rs
import pytest

from tests.support.command_line import hive


@pytest.mark.parametrize("of", ["agent", "operator"])
def test_the_page_has_every_setting(of: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = hive(capsys, "config", "reference", "--of", of)
    assert (result.code, result.err) == (0, "")
    schema = json.loads(hive(capsys, "config", "reference", "--of", of, "--format", "schema").out)
    assert len(schema["properties"]) > 100
    assert [name for name in schema["properties"] if f"`{name}`" not in result.out] == []


def test_the_page_names_nothing_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert str(Path.cwd()) not in hive(capsys, "config", "reference").out


def test_the_schema_takes_what_the_agent_takes(capsys: pytest.CaptureFixture[str]) -> None:
    text = hive(capsys, "config", "reference", "--format", "schema").out
    valid = jsonschema_rs.validator_for(json.loads(text)).is_valid
    assert valid({"mtu": 1400, "bpf-ct-timeout-regular-any": "1m", "ct-global-max-entries-tcp": 2000})
    assert not valid({"mtu": "big"})
    assert not valid({"no-such-option": 1})


def test_the_old_names_of_conntrack_sizes_still_count(tmp_path: Path) -> None:
    from cells.maps.specs import MapSettings
    from lifecycle import Sources
    from lifecycle.settings.sources import load

    (tmp_path / "ct-global-max-entries-tcp").write_text("2000\n")
    (tmp_path / "ct-global-max-entries-other").write_text("3000\n")
    (tmp_path / "bpf-ct-global-any-max").write_text("4000\n")
    loaded = load([MapSettings], Sources(config_dir=tmp_path))
    assert loaded.structs[MapSettings] == MapSettings(bpf_ct_global_tcp_max=2000, bpf_ct_global_any_max=4000)
    assert len(loaded.warnings) == 1


def test_unknown_formats_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert hive(capsys, "config", "reference", "--format", "html").code == 2
