"""The shell's commands over metrics: as they are now, and as they were.

Needs: Sampler.   Gives: metrics_commands().
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

from cells.observe.metrics import Family, Histogram
from cells.observe.samples.quantiles import pretty, quantiles
from cells.observe.samples.samples import INTERVAL, KEPT, Sampler, Samples, Series, labels_of, labels_text
from lifecycle import Member
from lifecycle.admin import Arguments, Command, CommandError, Commands, Flag, State

BACK = {"5min": 0, "30min": KEPT // 4 - 1, "60min": KEPT // 2 - 1, "120min": KEPT - 1}
"""The columns of samples: how many samples ago."""

_FILE = Flag("out", "Write to this file of the script instead", short="o")
_FORMAT = Flag("format", "table, json or yaml", default="table", choices=("table", "json", "yaml"))


def metrics_commands(sampler: Sampler) -> Member[Commands]:
    """The shell's commands for metrics."""

    async def show(state: State, given: Arguments) -> None:
        matches = _pattern(given.words)
        form = given.flags["format"]
        if given.flags["sampled"]:
            told = _sampled(sampler.samples, matches, form)
        else:
            told = _current(await sampler.metrics.families(), matches, form)
        await _tell(state, given, told)

    async def plot(state: State, given: Arguments) -> None:
        matches = _pattern(given.words)
        series = next((one for one in sampler.samples if matches.search(one.name + one.labels)), None)
        if series is None:
            raise CommandError(f"no sample of a metric matches {given.words[0]!r}; see: metrics --sampled")
        await _tell(state, given, _plotted(sampler.samples, series, rate=bool(given.flags["rate"])))

    async def html(state: State, given: Arguments) -> None:
        from cells.observe.samples.page import page

        await _tell(state, given, page(sampler.samples))

    return Commands(
        Command(
            "metrics",
            "List metrics, as served to Prometheus",
            show,
            "[match regex]",
            (
                Flag(
                    "sampled", "What was sampled in the last two hours, of all metrics", "switch", short="s"
                ),
                _FORMAT,
                _FILE,
            ),
            "The expression is looked for in the name and the labels: regen.*scope=total. Of a histogram\n"
            "the 50th, 90th and 99th percentile are shown; of samples those of the five minutes before.",
            most=1,
        ),
        Command(
            "metrics/plot",
            "Plot a sampled metric as a line graph",
            plot,
            "match regex",
            (Flag("rate", "How fast it grows, a second", "switch"), _FILE),
            "The first of the metrics whose name and labels match; `metrics --sampled` shows all of them.",
            least=1,
            most=1,
        ),
        Command("metrics/html", "All samples as a page for a browser", html, "", (_FILE,), most=0),
    )


def _pattern(words: Sequence[str]) -> re.Pattern[str]:
    try:
        return re.compile(words[0] if words else "")
    except re.error as error:
        raise CommandError(f"regex: {words[0]!r}: {error}") from None


async def _tell(state: State, given: Arguments, text: str) -> None:
    if name := given.flags["out"]:
        state.path(name).write_text(text, encoding="utf-8")  # of a script, which waits for nothing else
    else:
        await state.print(text)


def _current(families: Sequence[Family], matches: re.Pattern[str], form: str) -> str:
    found = [
        (family, values, value)
        for family in families
        for values, value in family.series.items()
        if matches.search(family.name + labels_text(family, values))
    ]
    found.sort(key=lambda one: (one[0].name, labels_text(*one[:2])))
    if form == "table":
        rows = [
            (family.name, labels_text(family, values), _value(family.name, value))
            for family, values, value in found
        ]
        return _columns([("Metric", "Labels", "Value"), *rows])
    return _document(
        [
            {
                "labels": labels_of(family, values),
                "name": family.name,
                "value": quantiles(value.bounds, value.counts)[1] if isinstance(value, Histogram) else value,
            }
            for family, values, value in found
        ],
        form,
    )


def _value(name: str, value: float | Histogram) -> str:
    if not isinstance(value, Histogram):
        return f"{value:f}"
    suffix = "s" if name.endswith("seconds") else ""
    return " / ".join(pretty(one, suffix) for one in quantiles(value.bounds, value.counts))


def _sampled(samples: Samples, matches: re.Pattern[str], form: str) -> str:
    found = [one for one in samples if matches.search(one.name + one.labels)]
    if form != "table":
        dump = {
            "num_samples": KEPT,
            "interval_seconds": int(INTERVAL),
            "samples": [_dumped(samples, one) for one in found],
        }
        return _document(dump, form)
    rows = [("Metric", "Labels", *BACK)]
    for one in found:
        rings = [samples.newest_first(ring) for ring in one.rings]
        rows.append(
            (one.name, one.labels, *(one.told(ring[back] for ring in rings) for back in BACK.values()))
        )
    return _columns(rows)


def _dumped(samples: Samples, series: Series) -> Mapping[str, object]:
    rings = [[0.0 if math.isnan(one) else one for one in samples.newest_first(ring)] for ring in series.rings]
    kind, values = (
        ("histogram", dict(zip(("p50", "p90", "p99"), rings, strict=True)))
        if series.is_histogram
        else ("gauge_or_counter", {"samples": rings[0]})
    )
    latest = series.told(ring[0] for ring in rings)
    return {"name": series.name, "labels": series.labels, kind: values, "latest": latest}


def _plotted(samples: Samples, series: Series, *, rate: bool) -> str:
    from cells.observe.samples.plot import per_second, plot

    titles = [f" (p{share})" for share in (50, 90, 99)] if series.is_histogram else [""]
    suffix = "s" if "seconds" in series.name else ""
    graphs = []
    for ring, title in zip(series.rings, titles, strict=True):
        values = samples.newest_first(ring)[::-1]
        if rate:
            values = per_second(values, INTERVAL)
        whole = f"{series.name}{title}{' (rate per second)' if rate else ''}"
        graphs.append("\n".join(plot(whole, series.labels, values, KEPT * INTERVAL / 60, suffix)))
    return "\n\n".join(graphs)


def _document(value: object, form: str) -> str:
    if form == "json":
        return json.dumps(value, indent=2)
    import yaml  # few ask for it

    return str(yaml.safe_dump(value, sort_keys=False))


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
