"""``hive config list`` and ``diff``."""

from pathlib import Path

import click
import pytest

from hive.config.command import render
from tests.support.command_line import hive
from tests.unit.hive.stub_agent import stub_agent

RUNNING = {
    "places": "/etc/hive",
    "settings": [
        {"name": "mtu", "value": "1400", "origin": "file /etc/hive/mtu"},
        {"name": "debug", "value": "false", "origin": "default"},
    ],
    "changes": [
        {"name": "mtu", "running": "1400", "configured": "1300", "origin": "file /etc/hive/mtu"},
    ],
}


def test_config_list_shows_the_settings_of_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mtu").write_text("1400\n")
    result = hive(capsys, "config", "list", f"--config-dir={tmp_path}", "--debug", "--set", "--origin")
    assert [line.split(maxsplit=2) for line in result.out.splitlines()] == [
        ["NAME", "VALUE", "ORIGIN"],
        ["debug", "true", "flag --debug"],
        ["mtu", "1400", f"file {tmp_path}/mtu"],
    ]
    assert hive(capsys, "config", "list", "--set").out == "no rows\n"
    everything = hive(capsys, "config", "list").out.splitlines()
    assert len(everything) > 50
    assert everything == [everything[0], *sorted(everything[1:])]


def test_all_wrong_settings_are_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("enable-bbr", "true"), ("mtu", "lots"), ("other-programs-key", "x")):
        (tmp_path / name).write_text(value)
    result = hive(capsys, "config", "list", f"--config-dir={tmp_path}")
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines() == [
        f"hive: {tmp_path}/mtu: 'lots': expected a whole number",
        f"hive: {tmp_path}/enable-bbr: 'true': not supported yet, expected false, or leave it unset",
    ]


def test_config_list_live_asks_the_running_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_agent(tmp_path, {"/hive/config": (200, RUNNING)}) as agent:
        result = hive(capsys, "config", "list", "--live", "-H", agent.socket)
        one = hive(
            capsys,
            "config",
            "list",
            "--live",
            "-H",
            agent.socket,
            "-o",
            "jsonpath={[?(@.name=='mtu')].value}",
        )
        both = hive(capsys, "config", "list", "--live", "--mtu=3", "-H", agent.socket)
    assert [line.split() for line in result.out.splitlines()] == [
        ["NAME", "VALUE"],
        ["debug", "false"],
        ["mtu", "1400"],
    ]
    assert one.out == "1400\n"
    assert both.code == 2


def test_a_difference_is_shown_and_is_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_agent(tmp_path, {"/hive/config": (200, RUNNING)}) as agent:
        result = hive(capsys, "config", "diff", "-H", agent.socket)
    assert result.code == 1
    assert [line.split(maxsplit=3) for line in result.out.splitlines()] == [
        ["NAME", "RUNNING", "CONFIGURED", "ORIGIN"],
        ["mtu", "1400", "1300", "file /etc/hive/mtu"],
    ]
    assert result.err == "A restart applies this.\n"


def test_config_diff_reports_values_that_would_be_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"name": "(refused)", "running": "", "configured": "/etc/hive/mtu: 'x': expected", "origin": ""}
    with stub_agent(tmp_path, {"/hive/config": (200, RUNNING | {"changes": [wrong]})}) as agent:
        result = hive(capsys, "config", "diff", "-H", agent.socket)
    assert (result.code, result.out) == (1, "")
    assert (
        result.err
        == "hive: /etc/hive/mtu: 'x': expected\nThe agent would not start again: correct this first.\n"
    )


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ("/etc/hive", "/etc/hive matches the running configuration."),
        ("", "The agent has no config-dir and no config file"),
    ],
)
def test_config_diff_without_differences_prints_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], places: str, text: str
) -> None:
    answer = RUNNING | {"changes": [], "places": places}
    with stub_agent(tmp_path, {"/hive/config": (200, answer)}) as agent:
        result = hive(capsys, "config", "diff", "-H", agent.socket)
    assert (result.code, result.out.startswith(text)) == (0, True)


def test_a_narrow_terminal_gets_what_does_not_fit_below() -> None:
    found = [
        {"name": "mtu", "value": "1400", "origin": "--mtu"},
        {
            "name": "write-cni-conf-when-ready",
            "value": "/etc/cni/net.d/05.conflist",
            "origin": "default",
        },
        {"name": "devices", "value": "", "origin": "default"},
    ]
    columns = ("name", "value", "origin")
    assert [click.unstyle(line) for line in render(found, 60, columns)] == [
        "mtu:                         1400   --mtu",
        "write-cni-conf-when-ready:   /etc/cni/net.d/05.conflist",
        "                             default",
        'devices:                     ""   default',
    ]
    assert click.unstyle(render(found, None, columns)[0]).split() == ["NAME", "VALUE", "ORIGIN"]
