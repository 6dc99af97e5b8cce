"""``hive inspect --live`` and ``--timeline``: drawings of a running agent's responses."""

import json
from pathlib import Path

import click
import pytest
from msgspec import structs

from hive.inspect.timeline import chart
from lifecycle.graph import Graph, Span, Timeline
from tests.support.command_line import hive
from tests.unit.hive.inspected import finished
from tests.unit.hive.stub_agent import stub_agent


def graph() -> Graph:
    return finished.graph()


def timeline(*, started: int = 3) -> Timeline:
    """The cellar takes 10 ms, the press 20, the stall 10."""
    cellar, press, stall = (hook.id for hook in graph().hooks)
    starts = [
        Span(cellar, "start", 0.005, 0.010),
        Span(press, "start", 0.015, 0.020),
        Span(stall, "start", 0.035, 0.010),
    ]
    built = [
        Span("honey.cellar/Cellar", "construct", 0.001, 0.002),
        Span("honey.press/Press", "construct", 0.003, 0.001),
    ]
    return Timeline(name="hive", spans=(*built, *starts[:started]))


HEALTHY = {"module-id": "honey.cellar", "level": "OK", "message": "cool"}
DEGRADED = {"module-id": "honey.press.turn", "level": "Degraded", "message": "the screw is stuck"}


def answers(**more: object) -> dict[str, tuple[int, object]]:
    both = {
        "/hive/graph": (200, json.loads(graph().json())),
        "/hive/timeline": (200, json.loads(timeline().json())),
        "/v1/healthz": (200, {"modules": [HEALTHY, DEGRADED]}),
    }
    return {**both, **more}  # type: ignore[dict-item]


def test_the_chart_shows_waiting_starting_and_what_all_waited_for() -> None:
    lines = [line.rstrip() for line in chart(graph(), timeline())]
    plain = [click.unstyle(line) for line in lines]
    assert plain[0] == "3 of 3 hooks started in 40 ms, each when all it waits for had."
    assert plain[2].split() == ["0", "20", "ms", "40", "ms"]
    cellar, press, stall = plain[3:6]
    assert cellar.startswith("  1 open the cellar (cellar) ██████")
    assert "10 ms" in cellar
    assert "<" not in cellar
    assert press.endswith("20 ms <1")
    assert stall.endswith("10 ms <2")
    assert press.index("█") < stall.index("█")
    assert plain[7] == "2 constructed and invoked in 3.0 ms; the slowest:"
    assert plain[8].startswith("  Cellar (cellar)")
    assert max(map(len, plain)) <= 80


def test_hooks_that_have_not_started_are_shown() -> None:
    lines = chart(graph(), timeline(started=2))
    assert "2 of 3 hooks started" in lines[0]
    assert lines[5].endswith("not started yet")
    assert chart(graph(), timeline(started=0))[0] == "No hook has started yet."


def test_what_the_hive_counts_together_is_drawn_below() -> None:
    with_sums = structs.replace(timeline(), sums={"overall": 0.4, "mapsInit": 0.1})
    overall, maps = (line.split() for line in chart(graph(), with_sums)[-2:])
    assert (overall[:3], maps[:3]) == (["overall", "400", "ms"], ["mapsInit", "100", "ms"])
    assert overall[3].count("▒") == 4 * maps[3].count("▒") > 4
    assert chart(graph(), with_sums, "press") == chart(graph(), timeline(), "press")


def test_the_timeline_of_a_running_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_agent(tmp_path, answers()) as agent:
        result = hive(capsys, "inspect", "--timeline", "--socket", agent.socket)
        as_json = hive(capsys, "inspect", "--timeline", "--format=json", "--socket", agent.socket)
        part = hive(capsys, "inspect", "--timeline", "--module", "press", "--socket", agent.socket)
    assert (result.code, result.err) == (0, "")
    assert "\x1b" not in result.out
    assert "open the cellar" in result.out
    assert json.loads(as_json.out) == json.loads(timeline().json())
    assert "oil the press" in part.out
    assert "open the cellar" not in part.out


def test_every_view_of_a_running_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_agent(tmp_path, answers()) as agent:
        tree = hive(capsys, "inspect", "--live", "--socket", agent.socket)
        settings = hive(capsys, "inspect", "--live", "--settings", "--socket", agent.socket)
        page = hive(capsys, "inspect", "--live", "--format", "html", "--socket", agent.socket)
    assert tree.out == graph().tree()
    assert settings.out == "honey.cellar\n  jars = 12  (default)\n"
    assert '"critical":["honey.cellar/Cellar:0","honey.press/Press:0","honey.market/stall:0"]' in page.out
    assert '"honey.press.turn":["degraded","the screw is stuck"]' in page.out


def test_faults_of_the_agent_are_one_line_and_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = hive(capsys, "inspect", "--live", "--socket", tmp_path / "none.sock")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"hive: no agent answers at {tmp_path}/none.sock")
    with stub_agent(tmp_path, answers(**{"/hive/graph": (200, {"version": 8})})) as agent:
        newer = hive(capsys, "inspect", "--live", "--socket", agent.socket)
    assert newer.code == 1
    assert newer.err == (
        "hive: the agent's answer to GET /hive/graph: it is of version 8 of the graph's JSON; "
        "this hive reads version 1\n"
    )


def test_settings_are_those_of_the_running_agent(capsys: pytest.CaptureFixture[str]) -> None:
    result = hive(capsys, "inspect", "--live", "--mtu=1500")
    assert result.code == 2
    assert result.err.startswith("hive: settings: not with --live; the running agent has its own")
