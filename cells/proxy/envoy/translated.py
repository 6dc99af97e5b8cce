"""Connections that other rules of netfilter translate before Envoy gets them: node ports of kube-proxy.

Reconciler: the table ``http-redirects`` in, the table ``inet hive-proxy`` of nftables out, which is there
            while pods have rules for requests to them. What others remove or change comes back.
Why:        kube-proxy translates the destination in the node's stack, which passes the packet on to the pod's
            link. There the datapath gives it to Envoy by the stack again, under another port of the client
            (redirect_to_host_ingress() in bpf/proxy/redirect.h): conntrack already has the connection with
            its original destination.
Source:     nft(8); kernel net/netfilter/nf_conntrack_proto.c (SO_ORIGINAL_DST), net/ipv4/ip_input.c (early
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
"""Mark by which the datapath knows what was translated."""
_AGAIN: Final = 0x0201
"""Mark of packets to Envoy, the client's port in which is changed."""
_KIND: Final = 0x0F00
_RAW, _LAST = -300, 300  # NF_IP_PRI_RAW; after source translation
_PREROUTING, _OUTPUT, _POSTROUTING = 0, 3, 4  # NF_INET_*
_CHECKSUM: Final = 16
"""Where a TCP header has its checksum."""
_EVERY: Final = message_filter(())
"""The table's events come among others' in one message, of which a filter sees the beginning alone."""

CHAINS: Final = (
    NftablesChain(
        "to-envoy",
        _PREROUTING,
        _RAW,
        (
            NftablesRule(
                (
                    *nftables.match_input_link("cilium_net"),
                    *nftables.match_mark(_KIND | 0xFF, _AGAIN),
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
                    *nftables.change_destination_port(CHANGED_PORT, _CHECKSUM),
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
                    *nftables.match_mark(_KIND, 0),
                    *nftables.set_mark_bits(0, TRANSLATED),
                )
            ),
        ),
    ),
)


class TranslatedConnections:
    """Serves while its jobs run; the rules stay when the agent stops, as Envoy does."""

    def __init__(
        self, ports: RedirectPorts, redirects: Table[str, HTTPRedirect], *, jobs: Jobs, log: Logger
    ) -> None:
        self._redirects = redirects
        self._log = log
        self._written: list[tuple[bytes, bytes]] | None = None
        """The rules as the kernel showed them when they were written."""
        if not ports.serves:
            jobs.one_shot("remove rules", self._remove)
            return
        self._soon = jobs.timer("keep rules", self._keep, math.inf).trigger
        jobs.observe("follow redirects", self._changes, self._look)
        jobs.observe("watch rules", self._hints, self._look)

    async def _changes(self) -> AsyncIterator[None]:
        changes = self._redirects.changes()
        while True:
            changes.take()
            yield
            await changes.wait()

    async def _hints(self) -> AsyncIterator[None]:
        async for hint in notifications(nftables.GROUP, _EVERY, protocol=nftables.PROTOCOL):
            yield hint

    async def _look(self, _: object) -> None:
        self._soon()

    async def _keep(self) -> None:
        """Raises NetlinkError."""
        if any(one.direction == "ingress" for one in self._redirects.all()):
            await to_thread.run_sync(self._write)
        elif self._written is not None:
            await self._remove()
            self._written = None

    async def _remove(self) -> None:
        """Raises NetlinkError."""
        try:
            await to_thread.run_sync(nftables.remove_table, OWN_TABLE)
        except NetlinkError as error:
            if error.errno not in nftables.NOT_SUPPORTED:
                raise

    def _write(self) -> None:
        """Raises NetlinkError."""
        found = nftables.own_rules(OWN_TABLE)
        if found and found == self._written:
            return
        if self._written is not None:
            self._log.warning("rules of nftables were changed, restoring them", table=f"inet {OWN_TABLE}")
        nftables.replace_table(OWN_TABLE, CHAINS)
        self._written = nftables.own_rules(OWN_TABLE)
