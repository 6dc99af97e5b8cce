"""Computed entries as policy maps have them.

Source: the layout of ``cilium_policy_*``.
"""

from __future__ import annotations

from collections.abc import Mapping

from cells.maps import PolicyEntry, PolicyKey
from cells.policy.compute.entries import Entry, Key


def map_entries(ingress: Mapping[Key, Entry], egress: Mapping[Key, Entry]) -> dict[PolicyKey, PolicyEntry]:
    """Computed entries of both directions, as policy maps have them."""
    return {
        map_key(key, egress=out): map_entry(entry)
        for out, entries in ((False, ingress), (True, egress))
        for key, entry in entries.items()
    }


def map_key(key: Key, *, egress: bool) -> PolicyKey:
    """Where an entry stands in a policy map."""
    identity, ports = key
    return PolicyKey(identity, egress, *ports)  # protocol, port, bits


def map_entry(entry: Entry) -> PolicyEntry:
    """What stands there. A proxy of one port by which it knows what holds must not be passed by."""
    redirect = entry.redirect
    return PolicyEntry(
        deny=entry.deny,
        proxy_port=redirect.port if redirect is not None else 0,
        auth_type=0 if entry.deny else entry.auth_type,
        only_by_proxy=redirect is not None and redirect.said is not None,
    )
