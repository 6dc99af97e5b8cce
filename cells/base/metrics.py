"""The agent's metrics: Families that the setting ``metrics`` may leave out, as Cilium's may.

A cell shows what it counts by contributing a Collector of them.
"""

from collections.abc import Iterable

from lifecycle.process import BUCKETS, Collector, Histogram, Kind, Series, Value, keyed
from lifecycle.process import Family as PlainFamily

__all__ = [
    "BUCKETS",
    "Collector",
    "Histogram",
    "Kind",
    "MetricFamily",
    "Series",
    "Value",
    "counter",
    "gauge",
    "histogram",
    "one_of",
]


class MetricFamily(PlainFamily, frozen=True):
    """One metric: a value for each combination of labels."""

    on: bool = True
    """Whether it is served if the setting ``metrics`` does not name it."""
    fixed: bool = False
    """Served whatever the setting names: Cilium's own collectors of these ask no one either."""

    @classmethod
    def of(cls, family: PlainFamily) -> "MetricFamily":
        """A family of the framework as one of the agent: served unless the setting leaves it out."""
        if isinstance(family, cls):
            return family
        return cls(family.name, family.kind, family.help, family.labels, family.series)


def counter(
    name: str,
    help: str,  # noqa: A002  # Prometheus's word
    value: float | Series,
    labels: str = "",
    *,
    on: bool = True,
    fixed: bool = False,
) -> MetricFamily:
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
) -> MetricFamily:
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
) -> MetricFamily:
    """How values are spread; as counter(), of Histograms."""
    return _family(name, "histogram", help, value, labels, on=on, fixed=fixed)


def one_of(name: str, help: str, label: str, known: Iterable[str], chosen: str) -> MetricFamily:  # noqa: A002
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
) -> MetricFamily:
    return MetricFamily(name, kind, help, *keyed(value, labels), on, fixed)
