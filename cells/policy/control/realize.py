"""Waiting until the policy maps have what policies became.

For:    PolicyWatch, NamedAddresses. Needs: EndpointPolicies. Gives: realize().
"""

from __future__ import annotations

from collections.abc import Iterable

from cells.policy.maps import EndpointPolicies, EndpointPolicy


async def realize(policies: EndpointPolicies, rows: Iterable[EndpointPolicy], reason: str) -> None:
    """Have the maps follow, and wait until they have, or a map says why it cannot. Raises PolicyMapError."""
    latest = {row.endpoint_id: row for row in rows}
    if not latest:
        return
    policies.change(latest.values(), reason)
    await policies.apply()
    for endpoint_id, row in latest.items():
        seen = policies.realized.get(endpoint_id)
        while seen is not None and not seen.error and seen.written < row.revision:
            seen = await policies.realized.wait_changed(endpoint_id, seen)
