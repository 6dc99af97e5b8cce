"""The series of one metric of flows, with exemplars, and their text in OpenMetrics's form.

Needs:  families of cells.observe.metrics.
Gives:  FlowSeries, openmetrics().
Source: OpenMetrics 1.0, as Prometheus's Go client writes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cells.base.metrics import Family, Histogram, counter, histogram
from cells.hubble.metrics.contexts import Contexts


class FlowSeries:
    """The series of one metric, by their labels in alphabetical order."""

    def __init__(self, name: str, text: str, contexts: Contexts, *labels: str, buckets: bool = False) -> None:
        self.name = name
        self.text = text
        self.labels = tuple(sorted((*contexts.names, *labels)))
        self.series: dict[tuple[str, ...], Any] = {}
        self.exemplars: dict[tuple[str, ...], dict[int, tuple[str, float, float]]] = {}
        """Of each series, by bucket: trace, value, and when."""
        self._buckets = buckets

    def count(self, labels: Mapping[str, str], trace: str = "") -> None:
        """One more."""
        key = tuple(labels[name] for name in self.labels)
        self.series[key] = self.series.get(key, 0) + 1
        if trace:
            self.exemplars.setdefault(key, {})[0] = (trace, 1.0, time.time())

    def observe(self, labels: Mapping[str, str], value: float, trace: str = "") -> None:
        """One more value of a histogram."""
        key = tuple(labels[name] for name in self.labels)
        found = self.series.get(key)
        if found is None:
            found = self.series[key] = Histogram()
        before = list(found.counts)
        found.observe(value)
        if trace:
            bucket = next(place for place, one in enumerate(found.counts) if one != before[place])
            self.exemplars.setdefault(key, {})[bucket] = (trace, value, time.time())

    def remove(self, wanted: Callable[[Mapping[str, str]], bool]) -> None:
        """Remove the series whose labels are wanted."""
        for key in [one for one in self.series if wanted(dict(zip(self.labels, one, strict=True)))]:
            del self.series[key]
            self.exemplars.pop(key, None)

    def family(self) -> Family:
        """All series as they are now."""
        make = histogram if self._buckets else counter
        return make(self.name, self.text, dict(self.series), " ".join(self.labels))


def openmetrics(metrics: Sequence[FlowSeries], others: Sequence[Family] = ()) -> str:
    """Metrics in OpenMetrics's text form, with exemplars; other families without."""
    exemplars = {metric.name: metric.exemplars for metric in metrics}
    families = [*(metric.family() for metric in metrics), *others]
    lines: list[str] = []
    for family in sorted((one for one in families if one.series), key=lambda one: one.name):
        name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        for key, value in sorted(family.series.items()):
            pairs = [f'{label}="{_escaped(text)}"' for label, text in zip(family.labels, key, strict=True)]
            examples = exemplars.get(family.name, {}).get(key, {})
            if isinstance(value, Histogram):
                lines += _histogram_lines(name, pairs, value, examples)
            else:
                labels = f"{{{','.join(pairs)}}}" if pairs else ""
                lines.append(f"{family.name}{labels} {float(value)}{_exemplar(examples.get(0))}")
    return "\n".join([*lines, "# EOF", ""])


def _histogram_lines(
    name: str, pairs: list[str], value: Histogram, exemplars: Mapping[int, tuple[str, float, float]]
) -> Iterator[str]:
    total = 0
    for place, count in enumerate(value.counts):
        total += count
        bound = str(float(value.bounds[place])) if place < len(value.bounds) else "+Inf"
        within = ",".join([*pairs, f'le="{bound}"'])
        yield f"{name}_bucket{{{within}}} {total}{_exemplar(exemplars.get(place))}"
    labels = f"{{{','.join(pairs)}}}" if pairs else ""
    yield f"{name}_sum{labels} {value.sum}"
    yield f"{name}_count{labels} {value.count}"


def _exemplar(found: tuple[str, float, float] | None) -> str:
    if found is None:
        return ""
    trace, value, when = found
    return f' # {{traceID="{_escaped(trace)}"}} {value} {when}'


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
