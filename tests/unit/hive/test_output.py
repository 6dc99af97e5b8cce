"""Output formats common to all commands."""

from pathlib import Path

import click
import pytest
import yaml

from hive.output import detailed, document, fact_lines, fitted, table
from tests.support.command_line import hive
from tests.unit.hive.answers import HEALTHY
from tests.unit.hive.stub_agent import stub_agent

VALUE = {"cilium": {"state": "Ok"}, "items": [{"id": 1, "name": "a b"}, {"id": 2, "name": "é"}], "none": None}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{.cilium.state}", "Ok"),
        ("{$.cilium.state}", "Ok"),
        ("{.items[*].id}", "1 2"),
        ("{.items[0].name}={.items[0].id}\n", "a b=1\n"),
        ("{.items[?(@.id==2)].name}", "é"),
        ("{.cilium}", '{"state": "Ok"}'),
        ("{.none}", "null"),
        ("{.missing}", ""),
    ],
)
def test_a_jsonpath_prints_what_it_finds(template: str, text: str) -> None:
    assert document(VALUE, f"jsonpath={template}") == text


def test_yaml_is_the_same_value() -> None:
    assert yaml.safe_load(document(VALUE, "yaml") or "") == VALUE


def test_a_table_is_the_commands_own() -> None:
    assert document(VALUE, "table") is None


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("xml", "'xml': expected table, wide, json, yaml or jsonpath='{.path}'"),
        ("jsonpath=", "expected a path in braces, such as {.cilium.state}"),
        ("jsonpath={.a[}", "{.a[} is not a path such as {.cilium.state}: "),
        (
            "jsonpath={range .items[*]}{.id}{end}",
            "range is not supported: name the items as in {.items[*].name}",
        ),
    ],
)
def test_a_wrong_form_ends_with_one_line(
    capsys: pytest.CaptureFixture[str], form: str, expected: str
) -> None:
    ended = hive(capsys, "status", "-o", form)
    assert (ended.code, expected in ended.err, ended.err.count("\n")) == (2, True, 1)


def test_every_form_works_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_agent(tmp_path, {"/v1/healthz": (200, HEALTHY)}) as agent:
        assert hive(capsys, "status", "-H", agent.socket, "-o", "jsonpath={.cilium.state}").out == "Ok\n"
        assert yaml.safe_load(hive(capsys, "status", "-H", agent.socket, "-o", "yaml").out) == HEALTHY


def test_control_characters_in_tables_are_escaped_and_styles_stay() -> None:
    rows = [("NODE", "STATE"), ("n1\x1b]0;x\x07\r", click.style("ok", fg="green"))]
    assert table(rows)[1] == "n1^[]0;x\\u0007\\r   \x1b[32mok\x1b[0m"
    assert table(rows)[0] == click.style("NODE               STATE", bold=True)


def test_hidden_columns_are_named() -> None:
    rows = [{"name": "one", "text": "x" * 60, "on": True, "empty": ""}]
    assert [click.unstyle(line) for line in fitted(rows, 40, "--wide")] == [
        "NAME   ON",
        "one    yes",
        "not shown: text (--wide)",
    ]
    assert len(fitted(rows, None, "--wide")) == 2
    assert [click.unstyle(line) for line in fitted([], 40, "--wide")] == ["no rows"]


def test_important_columns_are_shown_before_narrow_ones() -> None:
    rows = [{"name": "kube-system/coredns-668d6bf9bc-x2v4k", "on": True, "direction": "ingress", "id": 12}]
    shown = [click.unstyle(line) for line in fitted(rows, 40, "-o wide", first=("name", "direction"))]
    assert shown == [
        "NAME                           DIRECTION",
        "kube-system/co…d6bf9bc-x2v4k   ingress",
        "not shown: on, id (-o wide)",
    ]


def test_names_of_columns_are_cut_last() -> None:
    rows = [{"pod": "default/web-0", "peer": "app=web", "port/protocol": "80/TCP"}]
    first = ("pod", "peer", "port/protocol")
    shown = [click.unstyle(line) for line in fitted(rows, 36, "-o wide", first=first)]
    assert shown[0].split() == ["POD", "PEER", "PORT/PROTOCOL"]
    assert max(map(len, shown)) == 36


def test_words_of_the_last_column_go_on_below() -> None:
    rows = [{"state": "ready", "message": "Completed endpoint regeneration with no pending requests"}]
    assert [click.unstyle(line) for line in fitted(rows, 40, "-o wide", first=("state", "message"))] == [
        "STATE   MESSAGE",
        "ready   Completed endpoint regeneration",
        "        with no pending requests",
    ]
    wide = [click.unstyle(line) for line in fitted(rows, None, "-o wide", first=("state", "message"))]
    assert len(wide) == 2


def test_details_stand_below_where_they_do_not_fit_beside() -> None:
    header, rows = ("ID", "POD", "LABELS"), [(("1", "default/web"), ["k8s:app=web", "k8s:tier=front"])]
    assert [click.unstyle(line) for line in detailed(header, rows, 40)] == [
        "ID   POD           LABELS",
        "1    default/web   k8s:app=web",
        "                   k8s:tier=front",
    ]
    assert [click.unstyle(line) for line in detailed(header, rows, 30)] == [
        "ID   POD",
        "1    default/web",
        "    k8s:app=web",
        "    k8s:tier=front",
    ]
    assert [click.unstyle(line) for line in detailed(header, rows, 12, below=["POD"])] == [
        "ID",
        "1",
        "    default/web",
        "    k8s:app=web",
        "    k8s:tier=front",
    ]


def test_texts_go_on_below_where_a_terminal_is_narrow() -> None:
    long = click.style("Ok", fg="green") + "   written to /run/05-cilium.conflist"
    facts = [("File:", long), ("Jobs:", "2"), ("  a job with a very long name:", "failed and failed again")]
    assert [click.unstyle(line) for line in fact_lines(facts, 40)] == [
        "File:   Ok   written to",
        "        /run/05-cilium.conflist",
        "Jobs:   2",
        "  a job with a very long name:",
        "      failed and failed again",
    ]
    assert [click.unstyle(line) for line in fact_lines([("File:", "at /run/" + "x" * 30)], 40)] == [
        "File:",
        "      at",
        "      /run/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    ]
    assert [click.unstyle(line) for line in fact_lines(facts, None)] == [
        "File:   Ok   written to /run/05-cilium.conflist",
        "Jobs:   2",
        "  a job with a very long name:   failed and failed again",
    ]
