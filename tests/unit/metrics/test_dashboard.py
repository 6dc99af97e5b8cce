"""The Grafana dashboard and the alerts ask for metrics and labels that agents have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.metrics_table import PAGE

DASHBOARD = PAGE.parents[2] / "configs" / "grafana" / "hive-agent.json"
ALERTS = PAGE.parents[2] / "configs" / "grafana" / "alerts.yaml"
KEYWORDS = {
    "by",
    "without",
    "and",
    "or",
    "unless",
    "offset",
    "on",
    "ignoring",
    "bool",
    "group_left",
    "group_right",
}
ADDED = {"instance", "le"}
"""Labels that the scrape and the kind of the metric add."""


def panels() -> list[dict[str, Any]]:
    """The panels that show something."""
    found = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def queries() -> Iterator[str]:
    """Every query of every panel, and of the variables."""
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])


def names_in(query: str) -> set[str]:
    """Names of metrics in a PromQL expression: what is neither function, keyword, label, text nor number."""
    bare = re.sub(r'"[^"]*"', "", query)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\boffset \w+", "", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", bare)
    words = re.findall(r"[a-zA-Z_:][\w:]*(?!\w)(?!\s*\()", bare)
    return {word for word in words if word not in KEYWORDS}


def labels_in(query: str) -> set[str]:
    """Labels the query groups by or asks for."""
    groups = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", query)
    matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query)
    return {label.strip() for group in groups for label in group.split(",")} | set(matched)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ('sum by (le, path) (rate(a_bucket{x="rate(b)"}[5m])) / c', {"a_bucket", "c"}),
        ("time() - max(d) > bool 302", {"d"}),
        ("topk(3, e) and on (x) group_left (y) f", {"e", "f"}),
    ],
)
def test_names_are_found_in_queries(query: str, names: set[str]) -> None:
    assert names_in(query) == names


def labels_of_metrics() -> dict[str, set[str]]:
    """Labels by series name: as documented, and with what histograms add to their names."""
    found = {}
    for row in PAGE.read_text(encoding="utf-8").splitlines():
        if row.startswith("| `"):
            name, kind, labels = (cell.strip() for cell in row.split("|")[1:4])
            ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            for end in ends:
                found[name.strip("`") + end] = set(re.findall(r"`(\w+)`", labels)) | ADDED
    return found


def alerts() -> dict[str, dict[str, Any]]:
    """The alert rules by name."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_every_alert_stands_on_the_page_and_shows_labels_it_has() -> None:
    page = (PAGE.parent / "alerts.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(Hive\w+)`", page, re.MULTILINE)) == alerts().keys()
    for rule in alerts().values():
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        groups = re.findall(r"\bby\s*\(([^)]*)\)", rule["expr"])
        assert groups, rule["alert"]
        assert all(shown <= {label.strip() for label in group.split(",")} for group in groups), rule["alert"]


@pytest.mark.parametrize("query", [*queries(), *(rule["expr"] for rule in alerts().values())])
def test_every_query_names_metrics_and_labels_that_there_are(query: str) -> None:
    known, names = labels_of_metrics(), names_in(query)
    assert names
    assert names <= known.keys()
    for name in names:
        assert labels_in(query) <= known[name]


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_a_legend_shows_labels_that_are_left(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        groups = re.findall(r"\bby\s*\(([^)]*)\)", target["expr"])
        retained = (
            {label.strip() for group in groups[:1] for label in group.split(",")} if groups else {"instance"}
        )
        assert shown <= retained


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
