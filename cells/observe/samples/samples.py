"""What is kept of every metric: a ring of 24 samples, five minutes apart.

Needs: Metrics, Jobs.   Gives: Sampler, which fills Samples; Series.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from cells.observe.metrics import Family, Histogram, Metrics
from cells.observe.samples.quantiles import pretty, quantiles
from lifecycle import Jobs, Logger

KEPT: Final = 24
INTERVAL: Final = 300.0
"""Seconds from one sample to the next: two hours in all."""
MOST: Final = 2000
"""Series that are kept; more would cost more memory than they are worth."""
LEFT_OUT: Final = ("cilium_event_ts", "cilium_feature_")
"""Beginnings of the names of metrics that say nothing by their course, as Cilium has it."""

NOTHING: Final = math.nan


class Series:
    """One series: of a counter or gauge its values, of a histogram the percentiles of each interval."""

    def __init__(self, name: str, labels: str, lines: int) -> None:
        self.name = name
        self.labels = labels
        self.rings = [array("f", [NOTHING] * KEPT) for _ in range(lines)]
        """One ring of values; of a histogram three: 50th, 90th, 99th percentile. Not a number: not there."""
        self.age = 0
        """How many samples ago it occurred last."""
        self._counts: Sequence[int] = ()

    @property
    def is_histogram(self) -> bool:
        """Whether what is kept are percentiles."""
        return len(self.rings) > 1

    def put(self, slot: int, value: float | Histogram) -> None:
        """The sample of this moment. A histogram that has seen nothing since the last one has none."""
        self.age = 0
        if not isinstance(value, Histogram):
            self.rings[0][slot] = value
            return
        before = self._counts or [0] * len(value.counts)
        new = [now - then for now, then in zip(value.counts, before, strict=True)]
        self._counts = list(value.counts)
        found = quantiles(value.bounds, new) if any(new) else [NOTHING] * len(self.rings)
        for ring, sample in zip(self.rings, found, strict=True):
            ring[slot] = sample

    def forget(self, slot: int) -> None:
        """What was two hours ago is over."""
        self.age += 1
        for ring in self.rings:
            ring[slot] = NOTHING

    def told(self, samples: Iterable[float]) -> str:
        """Values of one moment, in a cell of a table; 0 for what is not there."""
        suffix = "s" if self.is_histogram and "seconds" in self.name else ""
        return " / ".join(pretty(0.0 if math.isnan(one) else one, suffix) for one in samples)


class Samples:
    """All series, and where in their rings the latest sample is."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], Series] = {}
        self._latest = -1
        self.full = False
        """Whether there are series that are not kept, for there are too many."""

    def __iter__(self) -> Iterator[Series]:
        """By name and labels."""
        return iter(sorted(self._series.values(), key=lambda one: (one.name, one.labels)))

    def take(self, families: Iterable[Family]) -> None:
        """A sample of each series, of now."""
        self._latest = (self._latest + 1) % KEPT
        for series in self._series.values():
            series.forget(self._latest)
        for family in families:
            if not family.name.startswith(LEFT_OUT):
                self._take(family)
        self._series = {key: series for key, series in self._series.items() if series.age < KEPT}

    def _take(self, family: Family) -> None:
        for values, value in family.series.items():
            key = family.name, labels_text(family, values)
            if (series := self._series.get(key)) is None:
                if len(self._series) >= MOST:
                    self.full = True
                    return
                series = self._series[key] = Series(*key, 3 if isinstance(value, Histogram) else 1)
            series.put(self._latest, value)

    def newest_first(self, ring: Sequence[float]) -> list[float]:
        """The samples of a ring, from now to two hours ago."""
        return [ring[(self._latest - back) % KEPT] for back in range(KEPT)]


def labels_text(family: Family, values: Sequence[str]) -> str:
    """The labels of a series as the shell shows them, and as patterns match them, sorted by name."""
    return " ".join(f"{name}={value}" for name, value in labels_of(family, values).items())


def labels_of(family: Family, values: Sequence[str]) -> dict[str, str]:
    """The labels of a series, sorted by name."""
    return dict(sorted(zip(family.labels, values, strict=True)))


class Sampler:
    """Takes the samples, the first one interval after the start."""

    def __init__(self, metrics: Metrics, jobs: Jobs, log: Logger) -> None:
        self.metrics = metrics
        self.samples = Samples()
        self._log = log
        jobs.timer("collect", self._collect, INTERVAL)

    async def _collect(self) -> None:
        was_full = self.samples.full
        self.samples.take(await self.metrics.every())
        if self.samples.full and not was_full:
            self._log.warning("too many series: only some are sampled", kept=MOST)
