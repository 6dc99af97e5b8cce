"""Families in Prometheus's text exposition format, version 0.0.4.

For:    the server. Needs: Family. Gives: exposition(), CONTENT_TYPE, InconsistentError.
Why:    prometheus-client adds ``_total`` to every counter, and several of Cilium's have other names; it also
        takes 25 ms and 1.7 MB to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final

from cells.metrics.family import Family, Histogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_IN_HELP: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})
_IN_LABEL: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class InconsistentError(Exception):
    """Raised when two families have one name, or series other labels than their family has."""


def exposition(families: Iterable[Family]) -> str:
    """All families with their series, sorted by name; those without series are left out.

    Raises InconsistentError.
    """
    by_name: dict[str, Family] = {}
    for family in families:
        if family.name in by_name:
            raise InconsistentError(f"{family.name} was collected twice")
        if any(len(values) != len(family.labels) for values in family.series):
            raise InconsistentError(f"{family.name} has series with other labels than {list(family.labels)}")
        by_name[family.name] = family
    return "".join(line for name in sorted(by_name) for line in _lines(by_name[name]))


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
    """A number as the format has it: whole ones without a fraction, infinity as ``+Inf``."""
    if value in {float("inf"), float("-inf")}:
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
