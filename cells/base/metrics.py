"""What a metric is: a cell shows what it counts by contributing a Collector of Family values.

Source: Prometheus's data model (counter, gauge, histogram with cumulative buckets).
"""

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

__all__ = [
    "BUCKETS",
    "Collector",
    "Family",
    "Histogram",
    "Kind",
    "Series",
    "Value",
    "counter",
    "gauge",
    "histogram",
    "one_of",
]

Kind = Literal["counter", "gauge", "histogram"]

BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds in seconds where a metric has none of its own; those of Prometheus's client libraries."""


class Histogram:
    """How often a value was within which bound, and all values together."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """One for each bound, a value counted at the first it does not exceed; last those above all."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value: 0.3 µs."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)


Value = float | Histogram
Series = Mapping[Any, Value]
"""Values by what their labels say, in the order of the family's labels: texts, or one text for one label."""


class Family(msgspec.Struct, frozen=True):
    """One metric: a value for each combination of labels."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    series: Mapping[tuple[str, ...], Value]
    """Every key has as many parts as there are labels."""
    on: bool = True
    """Whether it is served if the setting ``metrics`` does not name it."""
    fixed: bool = False
    """Told whatever the setting says: Cilium's own collectors of these ask no one either."""


def counter(
    name: str,
    help: str,  # noqa: A002  # Prometheus's word
    value: float | Series,
    labels: str = "",
    *,
    on: bool = True,
    fixed: bool = False,
) -> Family:
    """What only grows. ``labels`` are names with blanks between; without any, ``value`` is a number."""
    return _family(name, "counter", help, value, labels, on=on, fixed=fixed)


def gauge(
    name: str,
    help: str,  # noqa: A002
    value: float | Series,
    labels: str = "",
    *,
    on: bool = True,
    fixed: bool = False,
) -> Family:
    """What goes up and down; as counter()."""
    return _family(name, "gauge", help, value, labels, on=on, fixed=fixed)


def histogram(
    name: str,
    help: str,  # noqa: A002
    value: Histogram | Series,
    labels: str = "",
    *,
    on: bool = True,
    fixed: bool = False,
) -> Family:
    """How values are spread; as counter(), of Histograms."""
    return _family(name, "histogram", help, value, labels, on=on, fixed=fixed)


def one_of(name: str, help: str, label: str, known: Iterable[str], chosen: str) -> Family:  # noqa: A002
    """What is in force out of several: a series for each, 1 for the chosen one, 0 for the others."""
    return gauge(name, help, {each: float(each == chosen) for each in (*known, chosen)}, label)


def _family(
    name: str,
    kind: Kind,
    help: str,  # noqa: A002
    value: Value | Series,
    labels: str,
    *,
    on: bool,
    fixed: bool,
) -> Family:
    found: Series = value if isinstance(value, Mapping) else {(): value}
    series = {(key,) if isinstance(key, str) else key: each for key, each in found.items()}
    return Family(name, kind, help, tuple(labels.split()), series, on, fixed)


class Collector:
    """Tells the families of one cell as they are now, on the event loop; what takes long it does in a thread.

    An error is logged, and the cell's families are left out of that answer.
    """

    __slots__ = ("collect", "name")

    def __init__(self, name: str, collect: Callable[[], Awaitable[Iterable[Family]]]) -> None:
        self.name = name
        self.collect = collect
