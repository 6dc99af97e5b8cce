"""Which metrics are served, by the setting ``metrics``, and Prometheus's text form of them.

Source: Cilium 1.17, the option metrics: a name that is not known, or without a sign, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final

from msgspec import structs

from cells.base.metrics import Family, Histogram

__all__ = ["CONTENT_TYPE", "Choice", "InconsistentError", "exposition", "number"]

_ALSO_CALLED: Final = {
    "hive_health_status_levels": "cilium_hive_status",
    "ciliumcidrgroups_referenced": "cilium_cidrgroups_referenced",
    "-cilium_bpf_map_pressure": "cilium_bpf_map_pressure",  # after its sign: two of them, as upstream wants
}
"""Names under which Cilium's option knows a metric, beside its own."""

_CAN_BE_LEFT_OUT: Final = {"cilium_bpf_map_pressure"}
"""Fixed ones that can be taken out after all."""


class Choice:
    """The selection of metric families."""

    def __init__(self, words: Iterable[str]) -> None:
        self._chosen: dict[str, bool] = {}
        self.unsigned: list[str] = []
        """Words that say neither + nor -, and so nothing."""
        for word in words:
            sign, name = word[:1], word[1:]
            if sign not in {"+", "-"}:
                self.unsigned.append(word)
                continue
            self._chosen[_ALSO_CALLED.get(name, name)] = sign == "+"

    def serves(self, family: Family) -> bool:
        """Whether this family is served."""
        if family.fixed and family.name not in _CAN_BE_LEFT_OUT:
            return True
        return self._chosen.get(family.name, family.on)


# Families in Prometheus's text exposition format, version 0.0.4.
#
# Why: prometheus-client adds ``_total`` to every counter, and several of Cilium's have other names; it also
#      takes 25 ms and 1.7 MB to import.

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_IN_HELP: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})
_IN_LABEL: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class InconsistentError(Exception):
    """Raised when a series occurs twice, or one name has different labels or kinds."""


def exposition(families: Iterable[Family]) -> str:
    """All families with their series, sorted by name; those without series are left out.

    Several cells may tell series of one family. Raises InconsistentError.
    """
    by_name: dict[str, Family] = {}
    for family in families:
        if any(len(values) != len(family.labels) for values in family.series):
            raise InconsistentError(f"{family.name} has series with other labels than {list(family.labels)}")
        known = by_name.get(family.name)
        by_name[family.name] = family if known is None else _joined(known, family)
    return "".join(line for name in sorted(by_name) for line in _lines(by_name[name]))


def _joined(one: Family, other: Family) -> Family:
    if (one.kind, one.labels) != (other.kind, other.labels):
        raise InconsistentError(f"{one.name} is the name of two different metrics")
    if twice := one.series.keys() & other.series.keys():
        which = dict(zip(one.labels, min(twice), strict=True))
        raise InconsistentError(f"{one.name} occurs twice for {which}")
    return structs.replace(one, series={**one.series, **other.series})


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
