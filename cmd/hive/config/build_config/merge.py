"""Merges several sources of settings: later ones override earlier ones, as far as they may.

Source: Cilium 1.17, cilium-dbg build-config.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hive.config.build_config.sources import Found, Report


@dataclass(frozen=True, slots=True)
class Overrides:
    """The settings that sources after the first may set.

    None: no list. With both lists, only ``allow`` applies.
    """

    allow: frozenset[str] | None = None
    deny: frozenset[str] | None = None

    def permits(self, key: str) -> bool:
        """Whether a later source may set the key."""
        if self.allow is not None:
            return key in self.allow
        return self.deny is None or key not in self.deny


def merge(
    first: Sequence[Found], later: Sequence[Found], overrides: Overrides, report: Report
) -> dict[str, str]:
    """Return the merged settings, with their sources under ``config-sources`` and
    ``config-sources-overrides``.
    """
    values: dict[str, str] = {}
    for found in first:
        _put(values, found.values, found, report)
    for found in later:
        refused = sorted(key for key in found.values if not overrides.permits(key))
        for key in refused:
            report(f"warning: {found.source.title} has the non-overridable key {key}: not taken")
        allowed = {key: value for key, value in found.values.items() if key not in refused}
        _put(values, allowed, found, report)
    named = [found.source for found in (*first, *later) if found.values]
    values["config-sources"] = _json(
        [{"kind": one.kind, "namespace": one.namespace, "name": one.name} for one in named]
    )
    values["config-sources-overrides"] = _json(
        {"allowConfigKeys": _listed(overrides.allow), "denyConfigKeys": _listed(overrides.deny)}
    )
    return values


def _put(values: dict[str, str], more: Mapping[str, str], found: Found, report: Report) -> None:
    for key in sorted(more.keys() & values.keys()):
        report(f"{found.source.title} overrides {key}")
    values.update(more)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _listed(keys: frozenset[str] | None) -> list[str] | None:
    return None if keys is None else sorted(keys)
