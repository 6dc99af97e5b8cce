"""Which metrics are served: the usual ones, as changed by the setting ``metrics``.

For:    Metrics. Needs: nothing. Gives: Choice.
Source: Cilium 1.17, the option metrics: a name that is not known, or without a sign, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cells.observe.metrics.family import Family

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
        self._said: dict[str, bool] = {}
        self.unsigned: list[str] = []
        """Words that say neither + nor -, and so nothing."""
        for word in words:
            sign, name = word[:1], word[1:]
            if sign not in {"+", "-"}:
                self.unsigned.append(word)
                continue
            self._said[_ALSO_CALLED.get(name, name)] = sign == "+"

    def tells(self, family: Family) -> bool:
        """Whether this family is served."""
        if family.fixed and family.name not in _CAN_BE_LEFT_OUT:
            return True
        return self._said.get(family.name, family.on)
