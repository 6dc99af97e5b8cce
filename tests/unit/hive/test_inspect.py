"""``hive inspect``: formats, views and errors, for the agent's cells and another hive."""

import json
from pathlib import Path

import click
import jsonschema_rs
import pytest

from hive.inspect import text as inspect_text
from lifecycle import invoke, module
from lifecycle.graph import graph_schema, timeline_schema
from tests.support.command_line import hive
from tests.unit.hive.inspected import finished

HERE = "tests.unit.hive.inspected"


nothing = 5


def needs_jars(jars: bytes) -> None: ...


faulty = module("faulty", "Lacks jars", invoke(needs_jars))


def inspect(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    result = hive(capsys, "inspect", "--of", f"{HERE}:honey", *arguments)
    assert (result.code, result.err) == (0, "")
    return result.out


def test_every_format_of_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(capsys).startswith("hive\n  honey  Makes honey\n    cellar  Where jars stand\n")
    assert inspect(capsys, "--format", "tree") == inspect(capsys)
    assert inspect(capsys, "--format", "dot").startswith('digraph "hive" {')
    assert inspect(capsys, "--format", "mermaid").startswith("flowchart LR")
    jsonschema_rs.validate(graph_schema(), json.loads(inspect(capsys, "--format", "json")))
    assert inspect(capsys, "--format", "html").startswith("<!doctype html>")


def test_the_page_asks_the_network_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    page = inspect(capsys, "--format", "html")
    assert "default-src 'none'" in page
    for remote in ('src="', "@import", "fetch(", "XMLHttpRequest", "https://"):
        assert remote not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")  # a name, never asked for


def test_module_shows_one_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(capsys, "--module", "cellar").splitlines() == [
        "honey.cellar  Where jars stand",
        "  · set     1 setting",
        "  · provide Cellar <- HoneySettings",
        "  · hook    open the cellar",
    ]
    part = json.loads(inspect(capsys, "--module", "honey.cellar", "--format", "json"))
    assert {one["name"] for one in part["constructors"]} == {"HoneySettings", "Cellar", "Press", "Ladle"}
    assert [one["name"] for one in part["invokes"]] == ["stall"]


def test_why_prints_the_chain_with_every_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    lines = inspect(capsys, "--why", "HoneySettings").splitlines()
    assert lines[0].startswith("HoneySettings (honey.cellar) at tests/unit/hive/inspected.py:")
    assert lines[1:] == [
        "  1. invoked stall (honey.market)",
        "     needs Cellar (honey.cellar) as cellar",
        "     needs HoneySettings (honey.cellar) as settings",
    ]
    (report,) = json.loads(inspect(capsys, "--why", "Cellar", "--format", "json"))
    assert report["constructor"]["id"] == "honey.cellar/Cellar"
    assert [[edge["parameter"] for edge in chain] for chain in report["chains"]] == [["cellar"]]


def test_why_reports_that_nothing_invoked_needs_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "  Nothing invoked needs it." in inspect(capsys, "--why", "Ladle").splitlines()


def test_unused_lists_unused_constructors(capsys: pytest.CaptureFixture[str]) -> None:
    module_line, ladle = inspect(capsys, "--unused").splitlines()
    assert module_line == "honey.press"
    assert ladle.startswith("  Ladle (private)  tests/unit/hive/inspected.py:")
    assert [one["name"] for one in json.loads(inspect(capsys, "--unused", "--format", "json"))] == ["Ladle"]
    assert inspect(capsys, "--unused", "--module", "cellar") == "Everything that is provided is needed.\n"


def test_settings_are_listed_with_their_origins(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(capsys, "--settings") == "honey.cellar\n  jars = 12  (default)\n"
    assert inspect(capsys, "--settings", "--jars=3") == "honey.cellar\n  jars = 3  (flag --jars)\n"
    (jars,) = json.loads(inspect(capsys, "--settings", "--format=json"))
    assert (jars["value"], jars["help"]) == ("12", "How many jars there are.")
    assert inspect(capsys, "--settings", "--module", "market") == "There are no settings.\n"


def test_hooks_are_listed_in_order_with_dependencies(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(capsys, "--hooks").splitlines() == [
        "  1  open the cellar  honey.cellar",
        "  2  oil the press  honey.press",
        "     after 1 open the cellar",
        "  3  open the stall  honey.market",
        "     after 2 oil the press",
    ]
    last = json.loads(inspect(capsys, "--hooks", "--module", "market", "--format", "json"))[0]
    assert (last["name"], last["after"]) == (
        "open the stall",
        ["honey.cellar/Cellar:0", "honey.press/Press:0"],
    )


def test_differences_are_printed_and_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(inspect(capsys, "--format", "json"))
    after.write_text(inspect(capsys, "--format", "json", "--jars=13").replace("Sells it", "Sells well"))
    same = hive(capsys, "inspect", "--diff", before, before)
    assert (same.code, same.out) == (0, "No differences.\n")
    result = hive(capsys, "inspect", "--diff", before, after)
    assert (result.code, result.err) == (1, "")
    assert result.out.splitlines() == [
        "modules",
        "  ~ honey.market",
        "      title: Sells it -> Sells well",
        "settings",
        "  ~ jars",
        "      value: 12 -> 13",
        "      origin: default -> flag --jars",
    ]
    changes = json.loads(hive(capsys, "inspect", "--diff", before, after, "--format", "json").out)
    assert [(one["kind"], one["what"]) for one in changes] == [
        ("modules", "changed"),
        ("settings", "changed"),
    ]


def test_a_hive_may_be_given_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert hive(capsys, "inspect", "--of", f"{HERE}:finished").out.startswith("hive\n  honey  Makes honey")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--why", "Celler"], "type Celler: nothing in hive provides it; did you mean Cellar?"),
        (["--module", "presss"], "module presss: no such module; did you mean press?"),
        (["--hooks", "--unused"], "--hooks and --unused: choose one"),
        (["--hooks", "--format", "dot"], "--hooks has no --format dot: expected json"),
        (["--timeline", "--format", "dot"], "--timeline has no --format dot: expected html or json"),
        (["--why", "Cellar", "--module", "press"], "--module: --why is about the whole graph"),
        (["--live"], f"{HERE}:honey: not with --live; the running agent has its own"),
        (["--jars=many"], "--jars=many: expected a whole number"),
    ],
)
def test_an_unavailable_view_is_one_line_and_exit_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = hive(capsys, "inspect", "--of", f"{HERE}:honey", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.removeprefix("hive: ").removesuffix("\n").startswith(line)
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("honey", "--of honey: expected package.module:name"),
        ("no.such:cell", "--of no.such:cell: No module named 'no'"),
        (f"{HERE}:mead", f"--of {HERE}:mead: {HERE} has no mead"),
        (
            f"{__name__}:nothing",
            f"--of {__name__}:nothing: expected package.module:name, which names a Hive, a Cell,",
        ),
    ],
)
def test_an_invalid_hive_is_one_line_and_exit_2(
    source: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = hive(capsys, "inspect", "--of", source)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"hive: {line}")
    assert result.err.endswith(" (see: hive inspect --help)\n")
    assert result.err.count("\n") == 1


def test_a_graph_with_faults_is_drawn_and_all_faults_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for form, shown in {
        "tree": "  · invoke  needs_jars <- bytes (missing)",
        "dot": '"missing bytes" [label="bytes\\nmissing"',
        "mermaid": '[/"bytes<br>missing"/]:::fault',
        "html": '"lacks":"bytes"',
        "json": '"lacks": "bytes"',
    }.items():
        result = hive(capsys, "inspect", "--of", f"{__name__}:faulty", "--format", form)
        assert result.code == 1
        assert shown in result.out
        assert "missing: nothing provides bytes\n    needed by needs_jars (faulty) at" in result.err


def test_a_hive_that_has_its_settings_takes_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    result = hive(capsys, "inspect", "--of", f"{HERE}:finished", "--jars=3")
    assert result.code == 2
    assert f"--jars=3: {HERE}:finished has its settings already: no flags are read" in result.err


def test_files_that_are_no_graphs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, other = tmp_path / "a.json", tmp_path / "b.json"
    broken.write_text("{}")
    other.write_text('{"version": 9}')
    assert f"{broken}: it is not a graph" in hive(capsys, "inspect", "--diff", broken, other).err
    assert hive(capsys, "inspect", "--diff", other, broken).err.startswith(
        f"hive: {other}: it is of version 9"
    )
    assert hive(capsys, "inspect", "--diff", tmp_path / "c.json", broken).code == 2


def test_schemas_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(hive(capsys, "inspect", "--schema").out) == json.loads(json.dumps(graph_schema()))
    assert json.loads(hive(capsys, "inspect", "--timeline", "--schema").out) == timeline_schema()


def test_the_graph_of_the_agent_matches_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    output = hive(capsys, "inspect", "--format", "json").out
    jsonschema_rs.validate(graph_schema(), json.loads(output))


def test_the_tree_is_coloured_for_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    tree = finished.graph().tree()
    assert click.unstyle(inspect_text.coloured(tree)) == tree.rstrip("\n")
    assert inspect_text.coloured(tree) != tree
    assert "\x1b" not in inspect(capsys)


def test_everything_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    for view in ([], ["--hooks"], ["--settings"], ["--unused"]):
        out = hive(capsys, "inspect", *view).out
        assert [line for line in out.splitlines() if len(line) > 80 and " = " not in line] == []
