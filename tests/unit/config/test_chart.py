"""A ConfigMap of Cilium's chart, and its documentation in docs/operate/configuration.md."""

import re
from pathlib import Path

import pytest

from cells.agent import agent
from lifecycle import Hive, SettingsError, Sources
from lifecycle.graph.reference import sections
from tests.unit.config.rendered import CHART

PAGE = (Path(__file__).resolve().parents[3] / "docs/operate/configuration.md").read_text(encoding="utf-8")


def refused(directory: Path, values: dict[str, str]) -> list[str]:
    """The options that an agent refuses of a config-dir, in its order."""
    for name, value in values.items():
        (directory / name).write_text(value)
    try:
        Hive(agent, settings=Sources(config_dir=directory)).settings()
    except SettingsError as error:
        places = [fault.text.partition(": ")[0] for fault in error.faults]
        assert all(place.startswith(f"{directory}/") for place in places)
        return [Path(place).name for place in places]
    return []


def test_the_agent_takes_all_that_the_charts_default_asks_for(tmp_path: Path) -> None:
    assert refused(tmp_path, CHART) == []


def rows() -> list[tuple[str, str]]:
    """Option and default, of the page's table."""
    found = re.findall(r"^\| (`[^|]+) \| [^|]+ \| ([^|]+) \|", PAGE, re.MULTILINE)
    return [(name, default.strip("`")) for names, default in found for name in re.findall(r"`(.+?)`", names)]


@pytest.mark.parametrize(("name", "default"), rows())
def test_the_defaults_of_the_page_are_those_of_the_agent(name: str, default: str) -> None:
    options = {option.name: option for section in sections(agent) for option in section.options}
    assert default == (options[name].default_text or "nothing")


@pytest.mark.parametrize(
    ("earlier", "name"),
    [
        ("ct-global-max-entries-tcp", "bpf-ct-global-tcp-max"),
        ("ct-global-max-entries-other", "bpf-ct-global-any-max"),
        ("monitor-aggregation-level", "monitor-aggregation"),
    ],
)
def test_names_of_older_versions_count_with_a_warning(tmp_path: Path, earlier: str, name: str) -> None:
    (tmp_path / earlier).write_text("2000" if earlier.startswith("ct") else "low")
    hive = Hive(agent, settings=Sources(config_dir=tmp_path))
    (found,) = [one for one in hive.settings() if one.option.name == name]
    assert found.origin == f"file {tmp_path}/{earlier}"
    (warning,) = hive.warnings()
    assert warning.endswith(f"this setting is called {name} now; rename it")
    assert earlier in PAGE


def test_every_wrong_mac_setting_has_its_line(tmp_path: Path) -> None:
    wrong = {
        "cni-mac-addr-mode": "fixed",
        "cni-fixed-mac": "01:00:5e:00:00:01",
        "cni-prefix-mac-map": "{'a':",
    }
    assert refused(tmp_path, wrong) == list(wrong)
