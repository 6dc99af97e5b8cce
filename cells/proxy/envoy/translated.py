"""nftables rules for redirected connections that netfilter translates first, such as kube-proxy's.

kube-proxy translates the destination in the node's stack, which forwards the packet to the pod's link. There
the datapath passes it to Envoy through the stack again, with a changed client port
(redirect_to_host_ingress() in bpf/proxy/redirect.h), because conntrack already has the connection with its
original destination.

A reconciler: the table ``http-redirects`` comes in; the nftables table ``inet hive-proxy`` goes out. It
exists while any redirect is for ingress, and is restored after external changes.

Source: nft(8); kernel net/netfilter/nf_conntrack_proto.c (SO_ORIGINAL_DST), net/ipv4/ip_input.c (early
demux).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Final

from anyio import to_thread

from cells.netlink import nftables
from cells.netlink.connection import NetlinkError, message_filter, notifications
from cells.netlink.nftables import OWN_TABLE, NftablesChain, NftablesRule
from cells.policy.control import HTTPRedirect
from cells.proxy.envoy.ports import RedirectPorts
from cells.proxy.envoy.resources import TRANSLATED_ANSWER
from lifecycle import Jobs, Logger, Table

CHANGED_PORT: Final = 0x8000
"""The bit of the client's port that the datapath flips."""
TRANSLATED: Final = 0x0100
"""Mark by which the datapath recognizes translated packets."""
_REINJECTED: Final = 0x0201
"""Mark of packets to Envoy with a changed client port."""
_MARK_MASK: Final = 0x0F00
_RAW, _LAST = -300, 300  # NF_IP_PRI_RAW; after NF_IP_PRI_NAT_SRC
_PREROUTING, _OUTPUT, _POSTROUTING = 0, 3, 4  # NF_INET_*
_CHECKSUM_OFFSET: Final = 16
"""Offset of the checksum in the TCP header."""
_ANY_MESSAGE: Final = message_filter(())
"""Matches all messages: a filter sees only the start of a message, which may contain several tables' events.
"""

CHAINS: Final = (
    NftablesChain(
        "to-envoy",
        _PREROUTING,
        _RAW,
        (
            NftablesRule(
                (
                    *nftables.match_input_link("cilium_net"),
                    *nftables.match_mark(_MARK_MASK | 0xFF, _REINJECTED),
                    nftables.notrack(),
                )
            ),
        ),
    ),
    NftablesChain(
        "from-envoy",
        _OUTPUT,
        _RAW,
        (
            NftablesRule(
                (
                    *nftables.match_mark(0xFFFFFFFF, TRANSLATED_ANSWER),
                    *nftables.change_destination_port(CHANGED_PORT, _CHECKSUM_OFFSET),
                    *nftables.set_mark_bits(0xFFFFFFFF, 0),
                )
            ),
        ),
    ),
    NftablesChain(
        "translated",
        _POSTROUTING,
        _LAST,
        (
            NftablesRule(
                (
                    *nftables.match_conntrack(direction=nftables.ORIGINAL, status=nftables.TRANSLATED),
                    *nftables.match_mark(_MARK_MASK, 0),
                    *nftables.set_mark_bits(0, TRANSLATED),
                )
            ),
        ),
    ),
)


class TranslatedConnections:
    """Reconciles the nftables table; the rules stay when the agent stops, as Envoy does."""

    def __init__(
        self, ports: RedirectPorts, redirects: Table[str, HTTPRedirect], *, jobs: Jobs, log: Logger
    ) -> None:
        self._redirects = redirects
        self._log = log
        self._written: list[tuple[bytes, bytes]] | None = None
        """The rules as read from the kernel after the last write."""
        if not ports.serves:
            jobs.one_shot("remove rules", self._remove)
            return
        self._reconcile_soon = jobs.timer("keep rules", self._reconcile, math.inf).trigger
        jobs.observe("follow redirects", self._changes, self._trigger)
        jobs.observe("watch rules", self._table_events, self._trigger)

    async def _changes(self) -> AsyncIterator[None]:
        changes = self._redirects.changes()
        while True:
            changes.take()
            yield
            await changes.wait()

    async def _table_events(self) -> AsyncIterator[None]:
        async for hint in notifications(nftables.GROUP, _ANY_MESSAGE, protocol=nftables.PROTOCOL):
            yield hint

    async def _trigger(self, _: object) -> None:
        self._reconcile_soon()

    async def _reconcile(self) -> None:
        """Write or remove the table as needed. Raises NetlinkError."""
        if any(one.direction == "ingress" for one in self._redirects.all()):
            await to_thread.run_sync(self._write)
        elif self._written is not None:
            await self._remove()
            self._written = None

    async def _remove(self) -> None:
        """Remove the table, unless nftables is not supported. Raises NetlinkError."""
        try:
            await to_thread.run_sync(nftables.remove_table, OWN_TABLE)
        except NetlinkError as error:
            if error.errno not in nftables.NOT_SUPPORTED:
                raise

    def _write(self) -> None:
        """Write the table, unless the kernel's rules are unchanged. Raises NetlinkError."""
        found = nftables.own_rules(OWN_TABLE)
        if found and found == self._written:
            return
        if self._written is not None:
            self._log.warning("rules of nftables were changed, restoring them", table=f"inet {OWN_TABLE}")
        nftables.replace_table(OWN_TABLE, CHAINS)
        self._written = nftables.own_rules(OWN_TABLE)
