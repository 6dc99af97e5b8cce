"""What the tunnel is in the kernel, as rows of the table ``tunnel``.

For:    Tunnel, TunnelKernel.   Needs: nothing.   Gives: TunnelObject and its kinds, wanted().
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address

import msgspec

from cells.datapath import TUNNEL_LINK
from cells.tunnel.settings import TunnelSettings

NO_SOURCE = IPv4Address(0)


class TunnelDevice(msgspec.Struct, frozen=True):
    """The device, in collect-metadata mode: it has no other end of its own."""

    port: int
    source_ports: tuple[int, int]
    mtu: int
    """The underlay's: routes say how much less fits inside."""

    @property
    def key(self) -> str:
        """Of its row."""
        return f"device {TUNNEL_LINK}"


class TunnelPrograms(msgspec.Struct, frozen=True):
    """The programs on the device."""

    @property
    def key(self) -> str:
        """Of its row."""
        return "programs"


class TunnelFacts(msgspec.Struct, frozen=True):
    """What the programs of pods know of the tunnel; once they do, they use it."""

    mtu: int
    """Of the packets inside."""
    port: int
    source: IPv4Address = NO_SOURCE
    """The address packets are sent from; 0.0.0.0: whichever routing chooses."""
    own_identities: bool = False
    """Whether nodes give their pods numbers by themselves: then another node's say nothing here."""

    @property
    def key(self) -> str:
        """Of its row."""
        return "facts"


TunnelObject = TunnelDevice | TunnelPrograms | TunnelFacts
ORDER = (TunnelDevice, TunnelPrograms, TunnelFacts)
"""In which they are made; each needs those before it. They go the other way round."""


def wanted(
    settings: TunnelSettings,
    mtu: int,
    route_mtu: int,
    own: IPv4Address | None,
    local: Iterable[IPv4Address],
    *,
    own_identities: bool = False,
) -> dict[str, TunnelObject]:
    """All of them by key; none in native mode.

    ``own``: the address other nodes know this one by. It counts if it is one of ``local``, those on devices:
    the kernel sends from no other.
    """
    if not settings.tunnelled:
        return {}
    source = own if own is not None and own in set(local) else NO_SOURCE
    found: list[TunnelObject] = [
        TunnelDevice(settings.port, settings.source_ports, mtu),
        TunnelPrograms(),
        TunnelFacts(route_mtu, settings.port, source, own_identities),
    ]
    return {each.key: each for each in found}
