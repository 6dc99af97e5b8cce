"""Rules and identities to map entries.

Pure values and caches; no cell.
Gives: Repository, SelectorCache, ComputedPolicies, DirectionPolicy, and the entries they make.
"""

from cells.policy.compute.endpoint_policy import DirectionPolicy
from cells.policy.compute.entries import Entry, Key, PortKey, Redirect, Said
from cells.policy.compute.filters import Filter
from cells.policy.compute.lookup import Match, lookup
from cells.policy.compute.map_entries import map_entries, map_entry, map_key
from cells.policy.compute.policies import (
    DIRECTIONS,
    ChangedEntries,
    ComputedPolicies,
    Difference,
    NamedPort,
    PolicyKey,
)
from cells.policy.compute.repository import Changed, Repository, Resolved
from cells.policy.compute.selector_cache import SelectorCache
from cells.policy.compute.selector_policy import PolicyConflictError, SelectorPolicy
from cells.policy.compute.steps import in_slices

__all__ = [
    "DIRECTIONS",
    "Changed",
    "ChangedEntries",
    "ComputedPolicies",
    "Difference",
    "DirectionPolicy",
    "Entry",
    "Filter",
    "Key",
    "Match",
    "NamedPort",
    "PolicyConflictError",
    "PolicyKey",
    "PortKey",
    "Redirect",
    "Repository",
    "Resolved",
    "Said",
    "SelectorCache",
    "SelectorPolicy",
    "in_slices",
    "lookup",
    "map_entries",
    "map_entry",
    "map_key",
]
