"""Metrics and their text form. A cell contributes a Collector of metric families.

Source: Prometheus's data model (counter, gauge, histogram with cumulative buckets) and its text exposition
        format, version 0.0.4.
Why:    prometheus-client adds ``_total`` to every counter, even if its name differs; it takes 25 ms and
        1.7 MB to import.
"""

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, Literal

import msgspec

__all__ = [
    "BUCKETS",
    "CONTENT_TYPE",
    "Collector",
    "Family",
    "Histogram",
    "InconsistentError",
    "Kind",
    "Series",
    "Value",
    "counter",
    "exposition",
    "gauge",
    "histogram",
    "keyed",
    "number",
]

Kind = Literal["counter", "gauge", "histogram"]

BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Default upper bounds of buckets in seconds: those of Prometheus's client libraries."""


class Histogram:
    """Number of values in each bucket, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """One count for each bound; a value counts at the first bound that it does not exceed.

        The last count is for values above all bounds.
        """
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value: 0.3 µs."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)


Value = float | Histogram
Series = Mapping[Any, Value]
"""Values by label values, in the order of the family's labels: texts, or one text for one label."""


class Family(msgspec.Struct, frozen=True):
    """One metric: a value for each combination of labels."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    series: Mapping[tuple[str, ...], Value]
    """Keys have as many parts as there are labels."""


def counter(
    name: str,
    help: str,  # noqa: A002  # Prometheus's word
    value: float | Series,
    labels: str = "",
) -> Family:
    """A value that only grows.

    ``labels`` are names with blanks in between; without any, ``value`` is a number.
    """
    return Family(name, "counter", help, *keyed(value, labels))


def gauge(
    name: str,
    help: str,  # noqa: A002
    value: float | Series,
    labels: str = "",
) -> Family:
    """A value that grows and shrinks; as counter()."""
    return Family(name, "gauge", help, *keyed(value, labels))


def histogram(
    name: str,
    help: str,  # noqa: A002
    value: Histogram | Series,
    labels: str = "",
) -> Family:
    """A distribution of values; as counter(), of Histograms."""
    return Family(name, "histogram", help, *keyed(value, labels))


def keyed(value: Value | Series, labels: str) -> tuple[tuple[str, ...], dict[tuple[str, ...], Value]]:
    """Return the labels of a family and its series, in the form that a Family stores."""
    series: Series = value if isinstance(value, Mapping) else {(): value}
    return tuple(labels.split()), {
        (key,) if isinstance(key, str) else key: sample for key, sample in series.items()
    }


class Collector:
    """Returns the present families of one cell, on the event loop; long work belongs in a thread.

    An error is logged, and the cell's families are missing from that answer.
    """

    __slots__ = ("collect", "name")

    def __init__(self, name: str, collect: Callable[[], Awaitable[Iterable[Family]]]) -> None:
        self.name = name
        self.collect = collect


CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_IN_HELP: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})
_IN_LABEL: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class InconsistentError(Exception):
    """A series occurs twice, or one name has different labels or kinds."""


def exposition(families: Iterable[Family]) -> str:
    """Return all families with their series, sorted by name; those without series are left out.

    Several cells may contribute series of one family. Raises InconsistentError.
    """
    by_name: dict[str, Family] = {}
    for family in families:
        if any(len(values) != len(family.labels) for values in family.series):
            raise InconsistentError(f"{family.name} has series with other labels than {list(family.labels)}")
        existing = by_name.get(family.name)
        by_name[family.name] = family if existing is None else _joined(existing, family)
    return "".join(line for name in sorted(by_name) for line in _lines(by_name[name]))


def _joined(first: Family, second: Family) -> Family:
    if (first.kind, first.labels) != (second.kind, second.labels):
        raise InconsistentError(f"{first.name} is the name of two different metrics")
    if twice := first.series.keys() & second.series.keys():
        labels = dict(zip(first.labels, min(twice), strict=True))
        raise InconsistentError(f"{first.name} occurs twice for {labels}")
    return msgspec.structs.replace(first, series={**first.series, **second.series})


def _lines(family: Family) -> Iterator[str]:
    if not family.series:
        return
    name = family.name
    yield f"# HELP {name} {family.help.translate(_IN_HELP)}\n# TYPE {name} {family.kind}\n"
    for values, value in sorted(family.series.items()):
        labels = [
            f'{key}="{text.translate(_IN_LABEL)}"' for key, text in zip(family.labels, values, strict=True)
        ]
        if isinstance(value, Histogram):
            yield from _buckets(name, labels, value)
        else:
            yield f"{name}{_braced(labels)} {number(value)}\n"


def _buckets(name: str, labels: list[str], value: Histogram) -> Iterator[str]:
    for bound, reached in zip((*value.bounds, float("inf")), accumulate(value.counts), strict=True):
        within = f'le="{number(bound)}"'
        yield f"{name}_bucket{_braced([*labels, within])} {reached}\n"
    yield f"{name}_sum{_braced(labels)} {number(value.sum)}\n"
    yield f"{name}_count{_braced(labels)} {value.count}\n"


def _braced(labels: list[str]) -> str:
    return f"{{{','.join(labels)}}}" if labels else ""


def number(value: float) -> str:
    """Return a number in the exposition format: integers without a fraction, infinity as ``+Inf``."""
    if value in {float("inf"), float("-inf")}:
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
