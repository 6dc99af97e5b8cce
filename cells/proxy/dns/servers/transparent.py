"""Who sends from this node with the addresses of pods: what answers comes by devices, which must know of it.

For:    DNSProxy, native devices.   Needs: nothing.   Gives: TransparentProxy, transparent_proxies().
"""

from __future__ import annotations

import msgspec

from lifecycle import Table


class TransparentProxy(msgspec.Struct, frozen=True):
    """A row of the table ``transparent-proxies``: a proxy that has sent in a pod's name."""

    name: str


def transparent_proxies() -> Table[TransparentProxy]:
    """The ``transparent-proxies`` table, by name."""
    return Table("transparent-proxies", key=lambda row: row.name)
