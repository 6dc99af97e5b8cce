"""The wire types of what the API has beside Cilium's document: the agent's tables, settings and event loop.

Needs: Model.   Gives: one Struct per answer of /hive and /statedb, but for the rows of /statedb/query.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import field

from cells.api.models.v1 import Model
from cells.config.drift import Change
from lifecycle.admin import TableChange, TableInfo, TableRow

__all__ = [
    "Failure",
    "LoopLoad",
    "Query",
    "Setting",
    "Settings",
    "TableChange",
    "TableInfo",
    "TableRow",
]


class Failure(Model, frozen=True):
    """Why there is no other answer."""

    err: str


# --- tables ----------------------------------------------------------------------------------------


class Query(msgspec.Struct, frozen=True):
    """What is asked of a table: the rows of one key, or all from it on."""

    table: str
    index: str
    key: str = ""
    """In base64."""
    lowerbound: bool = False


# --- the hive --------------------------------------------------------------------------------------


class LoopLoad(Model, frozen=True):
    """How long the event loop was busy at a stretch, in seconds, since the agent started.

    ``counts[i]`` stretches took at most ``bounds[i]``, the last of them longer than every bound; a
    share that is null is among these.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    longest: float
    p99: float | None
    p99_9: float | None = field(name="p99.9")


class Setting(Model, frozen=True):
    """A setting in force, its value as text, and where that is from."""

    name: str
    value: str
    origin: str


class Settings(Model, frozen=True):
    """Every setting, where they are read from, and what a restart would change."""

    places: str
    settings: Sequence[Setting]
    changes: Sequence[Change]


# --- policies --------------------------------------------------------------------------------------


class DecidingRule(Model, frozen=True, omit_defaults=False):
    """A rule in words, and its labels."""

    rule: str
    labels: Sequence[str]


class VerdictRules(Model, frozen=True, omit_defaults=False):
    """The rules that decide on a packet of an endpoint; none where no rule speaks of it.

    ``verdict`` is ``unknown`` of an endpoint that has no policy by rules here.
    """

    verdict: str
    rules: Sequence[DecidingRule]


class Reached(Model, frozen=True, omit_defaults=False):
    """How a pod reaches another, and which directions deny it."""

    source: str = field(name="from")
    destination: str = field(name="to")
    port: str
    """Empty where several fare differently."""
    verdict: str
    headline: str
    denied: str
