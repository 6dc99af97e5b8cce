"""Samples of all metrics for two hours, and the shell commands ``metrics``, ``metrics/plot``,
``metrics/html``.

Collects all metrics every five minutes, enabled or not, and stores 24 samples of each series: to analyse an
agent that was never scraped.

Source: Cilium 1.17, pkg/metrics; ``cilium-dbg metrics list`` of 1.18.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

from cells.base.metrics import Histogram, MetricFamily
from cells.observe.metrics import Metrics
from lifecycle import Jobs, Logger, Member, module, provide, provide_private
from lifecycle.admin import Arguments, Command, CommandError, Commands, Flag, State

__all__ = ["Sampler", "Samples", "cell"]


# Quantiles of histograms, and numbers with unit prefixes.
#
# Source: Prometheus, histogram_quantile(): within a bucket values are taken to be spread evenly.

QUANTILES: Final = (0.5, 0.9, 0.99)
_UNITS: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SMALL_UNITS: Final = ((1e-9, "p", 1e12), (1e-6, "n", 1e9), (1e-3, "µ", 1e6), (1.0, "m", 1e3))


def quantile(bounds: Sequence[float], counts: Sequence[int], fraction: float) -> float:
    """Return the value that a ``fraction`` of the observations does not exceed; 0 without any.

    ``counts`` are per bucket, not cumulative. The last bucket has no upper bound; its lower bound is
    returned.
    """
    total = sum(counts)
    if total == 0 or not bounds:
        return 0.0
    wanted = fraction * total
    edges = pairwise((0.0, *bounds))
    for (low, high), reached, count in zip(edges, accumulate(counts), counts, strict=False):
        if reached >= wanted and count:
            return low + (high - low) * (wanted - (reached - count)) / count
    return bounds[-1]


def quantiles(bounds: Sequence[float], counts: Sequence[int]) -> tuple[float, float, float]:
    """Return the 50th, 90th and 99th percentile."""
    half, most, nearly_all = (quantile(bounds, counts, fraction) for fraction in QUANTILES)
    return half, most, nearly_all


def unit_of(value: float) -> tuple[str, float]:
    """Return the unit prefix for ``value``, and the factor to multiply it by."""
    size = abs(value)
    if size == 0.0:
        return "", 1.0
    for least, unit in _UNITS:
        if size > least:
            return unit, 1 / least
    for below, unit, factor in _SMALL_UNITS:
        if size < below:
            return unit, factor
    return "", 1.0


def pretty(value: float, suffix: str = "") -> str:
    """Format with four significant digits and a unit prefix: 1.5m, 23.4k."""
    unit, factor = unit_of(value)
    return f"{value * factor:.4g}{unit}{suffix}"


# The history of every metric: a ring of 24 samples, five minutes apart.

RETAINED: Final = 24
INTERVAL: Final = 300.0
"""Seconds between two samples."""
MAX_SERIES: Final = 2000
"""Maximum number of sampled series, to bound memory."""
IGNORED_PREFIXES: Final = ("cilium_event_ts", "cilium_feature_")
"""Prefixes of metrics that are not sampled, as in Cilium."""

MISSING: Final = math.nan


class Series:
    """Samples of one series: values of a counter or gauge, or percentiles of each interval of a histogram."""

    def __init__(self, name: str, labels: str, lines: int) -> None:
        self.name = name
        self.labels = labels
        self.rings = [array("f", [MISSING] * RETAINED) for _ in range(lines)]
        """One ring buffer of values; three for a histogram: 50th, 90th, 99th percentile. NaN: missing."""
        self.age = 0
        """Number of samples since it last existed."""
        self._counts: list[int] = []

    @property
    def is_histogram(self) -> bool:
        """Whether the samples are percentiles."""
        return len(self.rings) > 1

    def put(self, slot: int, value: float | Histogram) -> None:
        """Store the current sample; NaN for a histogram without new observations."""
        self.age = 0
        if not isinstance(value, Histogram):
            self.rings[0][slot] = value
            return
        before, self._counts = self._counts, list(value.counts)
        new = [now - then for now, then in zip(value.counts, before, strict=False)]
        if len(before) != len(value.counts) or min(new) < 0:  # the first sample, or the counter was reset
            new = self._counts
        found = quantiles(value.bounds, new) if any(new) else [MISSING] * len(self.rings)
        for ring, sample in zip(self.rings, found, strict=True):
            ring[slot] = sample

    def expire(self, slot: int) -> None:
        """Clear the oldest sample."""
        self.age += 1
        for ring in self.rings:
            ring[slot] = MISSING

    def format_samples(self, samples: Iterable[float]) -> str:
        """Format samples of one time for a table cell; 0 if missing."""
        suffix = "s" if self.is_histogram and "seconds" in self.name else ""
        return " / ".join(pretty(0.0 if math.isnan(one) else one, suffix) for one in samples)


class Samples:
    """All sampled series, and the position of the newest sample in their rings."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], Series] = {}
        self._latest = -1
        self.full = False
        """Whether there are more series than MAX_SERIES, so that some are not sampled."""

    def __iter__(self) -> Iterator[Series]:
        """Iterate over the series, by name and labels."""
        return iter(sorted(self._series.values(), key=lambda one: (one.name, one.labels)))

    def take(self, families: Iterable[MetricFamily]) -> None:
        """Store a sample of each series."""
        self._latest = (self._latest + 1) % RETAINED
        for series in self._series.values():
            series.expire(self._latest)
        for family in families:
            if not family.name.startswith(IGNORED_PREFIXES):
                self._take(family)
        self._series = {key: series for key, series in self._series.items() if series.age < RETAINED}

    def _take(self, family: MetricFamily) -> None:
        for values, value in family.series.items():
            key = family.name, labels_text(family, values)
            if (series := self._series.get(key)) is None:
                if len(self._series) >= MAX_SERIES:
                    self.full = True
                    return
                series = self._series[key] = Series(*key, 3 if isinstance(value, Histogram) else 1)
            series.put(self._latest, value)

    def newest_first(self, ring: Sequence[float]) -> list[float]:
        """Return the samples of a ring, newest first."""
        return [ring[(self._latest - back) % RETAINED] for back in range(RETAINED)]


def labels_text(family: MetricFamily, values: Sequence[str]) -> str:
    """Return the labels of a series in one line, sorted by name, as shown and matched by the shell."""
    return " ".join(f"{name}={value}" for name, value in labels_of(family, values).items())


def labels_of(family: MetricFamily, values: Sequence[str]) -> dict[str, str]:
    """Return the labels of a series, sorted by name."""
    return dict(sorted(zip(family.labels, values, strict=True)))


class Sampler:
    """Takes samples periodically, the first one interval after the start."""

    def __init__(self, metrics: Metrics, jobs: Jobs, log: Logger) -> None:
        self.metrics = metrics
        self.samples = Samples()
        self._log = log
        jobs.timer("collect", self._collect, INTERVAL)

    async def _collect(self) -> None:
        was_full = self.samples.full
        self.samples.take(await self.metrics.all_families())
        if self.samples.full and not was_full:
            self._log.warning("too many series, only some are sampled", maximum=MAX_SERIES)


# Shell commands for current and sampled metrics.

COLUMNS = {"5min": 0, "30min": RETAINED // 4 - 1, "60min": RETAINED // 2 - 1, "120min": RETAINED - 1}
"""The columns of the table, and the number of samples before the newest."""

_FILE = Flag("out", "Write to this file of the script instead", short="o")
_FORMAT = Flag("format", "table, json or yaml", default="table", choices=("table", "json", "yaml"))


def metrics_commands(sampler: Sampler) -> Member[Commands]:
    """Provide the shell commands for metrics."""

    async def show(state: State, given: Arguments) -> None:
        matches = _pattern(given.words)
        form = given.flags["format"]
        width = None if given.flags["out"] else state.width
        if given.flags["sampled"]:
            shown = _sampled(sampler.samples, matches, form, width)
        else:
            shown = _current(await sampler.metrics.families(), matches, form, width)
        await _print(state, given, shown)

    async def plot(state: State, given: Arguments) -> None:
        matches = _pattern(given.words)
        series = next((one for one in sampler.samples if matches.search(one.name + one.labels)), None)
        if series is None:
            raise CommandError(f"no sample of a metric matches {given.words[0]!r}; see: metrics --sampled")
        await _print(state, given, _plotted(sampler.samples, series, rate=bool(given.flags["rate"])))

    async def html(state: State, given: Arguments) -> None:
        from cells.observe.samples.graphs import page

        await _print(state, given, page(sampler.samples))

    return Commands(
        Command(
            "metrics",
            "List metrics, as served to Prometheus",
            show,
            "[regex]",
            (
                Flag("sampled", "Show samples of the last two hours, of all metrics", "switch", short="s"),
                _FORMAT,
                _FILE,
            ),
            "The expression is looked for in the name and the labels: regen.*scope=total. Of a histogram\n"
            "the 50th, 90th and 99th percentile are shown; of samples those of the five minutes before.",
        ),
        Command(
            "metrics/plot",
            "Plot a sampled metric as a line graph",
            plot,
            "regex",
            (Flag("rate", "Show the rate per second", "switch"), _FILE),
            "The first of the metrics that match by name and labels; `metrics --sampled` shows all of them.",
        ),
        Command("metrics/html", "All samples as a page for a browser", html, "", (_FILE,)),
    )


def _pattern(words: Sequence[str]) -> re.Pattern[str]:
    try:
        return re.compile(words[0] if words else "")
    except re.error as error:
        raise CommandError(f"regex: {words[0]!r}: {error}") from None


async def _print(state: State, given: Arguments, text: str) -> None:
    if name := given.flags["out"]:
        state.path(name).write_text(text, encoding="utf-8")  # only in scripts, so a blocking write is fine
    else:
        await state.print(text)


def _current(families: Sequence[MetricFamily], matches: re.Pattern[str], form: str, width: int | None) -> str:
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
        return _columns([("Metric", "Labels", "Value"), *rows], width)
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


def _sampled(samples: Samples, matches: re.Pattern[str], form: str, width: int | None) -> str:
    found = [one for one in samples if matches.search(one.name + one.labels)]
    if form != "table":
        dump = {
            "num_samples": RETAINED,
            "interval_seconds": int(INTERVAL),
            "samples": [_dumped(samples, one) for one in found],
        }
        return _document(dump, form)
    rows = [("Metric", "Labels", *COLUMNS)]
    for one in found:
        rings = [samples.newest_first(ring) for ring in one.rings]
        rows.append(
            (
                one.name,
                one.labels,
                *(one.format_samples(ring[back] for ring in rings) for back in COLUMNS.values()),
            )
        )
    return _columns(rows, width)


def _dumped(samples: Samples, series: Series) -> Mapping[str, object]:
    rings = [[0.0 if math.isnan(one) else one for one in samples.newest_first(ring)] for ring in series.rings]
    kind, values = (
        ("histogram", dict(zip(("p50", "p90", "p99"), rings, strict=True)))
        if series.is_histogram
        else ("gauge_or_counter", {"samples": rings[0]})
    )
    latest = series.format_samples(ring[0] for ring in rings)
    return {"name": series.name, "labels": series.labels, kind: values, "latest": latest}


def _plotted(samples: Samples, series: Series, *, rate: bool) -> str:
    from cells.observe.samples.graphs import per_second, plot

    titles = [f" (p{percent})" for percent in (50, 90, 99)] if series.is_histogram else [""]
    suffix = "s" if "seconds" in series.name else ""
    graphs = []
    for ring, title in zip(series.rings, titles, strict=True):
        values = samples.newest_first(ring)[::-1]
        if rate:
            values = per_second(values)
        whole = f"{series.name}{title}{' (rate per second)' if rate else ''}"
        graphs.append("\n".join(plot(whole, series.labels, values, RETAINED * INTERVAL / 60, suffix)))
    return "\n\n".join(graphs)


def _document(value: object, form: str) -> str:
    if form == "json":
        return json.dumps(value, indent=2)
    import yaml  # rarely needed

    return str(yaml.safe_dump(value, sort_keys=False))


def _columns(rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Format rows as a table; beyond ``width``, labels and long values go below the name."""
    lines = _aligned(rows)
    if width is None or max(map(len, lines)) <= width:
        return "\n".join(lines)
    (_, _, *titles), *body = rows
    shown = []
    for name, labels, *values in body:
        beside = "   ".join((name, *values))
        fits = len(beside) <= width
        shown.append(beside if fits else name)
        named = zip(titles, values, strict=True)
        below = [labels] if fits else [labels, ", ".join(f"{title}: {value}" for title, value in named)]
        for text in below:
            shown += textwrap.wrap(
                text, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
            )
    return "\n".join(shown)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_line(row, widths) for row in rows]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


cell = module(
    "metrics-samples",
    "Two hours of every metric",
    provide_private(Sampler),
    provide(metrics_commands),
)
