"""Generates the table of docs/operate/metrics.md from the metrics of an agent."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cells.base.metrics import MetricFamily

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate" / "metrics.md"
HEAD = "| metric | type | labels | | |\n|---|---|---|---|---|\n"


def page(families: Iterable[MetricFamily]) -> str:
    """Return the page with the table of these families."""
    by_name = {family.name: family for family in families}
    text = PAGE.read_text(encoding="utf-8").partition(HEAD)[0]
    return text + HEAD + "".join(_row(by_name[name]) for name in sorted(by_name))


def _row(family: MetricFamily) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    served = "always" if family.fixed else "on" if family.on else "off"
    return f"| `{family.name}` | {family.kind} | {labels} | {served} | {family.help} |\n"
