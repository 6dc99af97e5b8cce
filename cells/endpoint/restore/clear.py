"""Removes stale state without an endpoint: map entries, policy maps, state directories, links.

Source: Cilium 1.17, clean-up after restore, and its sweep of stale maps.

Entries of restored endpoints, and of the node itself, are not touched.
"""

import re
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from cells.cluster.identity.numbers import INIT, Scope, scope_of
from cells.cluster.ipcache import Ipcache
from cells.cluster.ipcache.rows import Prefix
from cells.endpoint import Endpoint, IPAddress, StateFiles
from cells.endpoint.restore.edges import LxcRow, RestoreLinks, StaleMaps
from cells.maps.records.cluster import IpcacheValue
from cells.netlink.rows import LinkInfo
from lifecycle import HiveError, Logger

# Validation of a saved endpoint: its link exists and is its own.
#
# Source: Cilium 1.17, validation of old endpoints and clearCiliumVeths.

_ALIAS: Final = re.compile(r"hive endpoint ([0-9]+)")
_POD_LINK: Final = re.compile(r"lxc[0-9a-f]{12}")


def alias_owner(alias: str) -> int | None:
    """The endpoint id in a link's alias; None if the alias is not ours."""
    found = _ALIAS.fullmatch(alias)
    return int(found[1]) if found else None


def fault_of(endpoint: Endpoint, links: Mapping[str, LinkInfo]) -> str | None:
    """Why the endpoint cannot be restored; None if it can.

    Cilium's own plugin made a link that is up and has no alias. A link without alias that is down was never
    completed: its requester got no answer. This does not apply to links of other plugins.
    """
    link = links.get(endpoint.ifname)
    if link is None:
        return f"interface {endpoint.ifname} could not be found"
    if link.ifindex != endpoint.ifindex:
        return (
            f"interface {endpoint.ifname} is another one: its index is {link.ifindex}, not {endpoint.ifindex}"
        )
    owner = alias_owner(link.alias)
    if owner is not None and owner != endpoint.id:
        return f"interface {endpoint.ifname} is endpoint {owner}'s, by its alias"
    if not link.alias and not link.up and not endpoint.datapath.on_anothers_link:
        return f"interface {endpoint.ifname} was never brought up: adding the pod was interrupted"
    return None


def abandoned(links: Iterable[LinkInfo], live: Collection[int], unsure: Collection[int]) -> list[LinkInfo]:
    """Links of pods without an endpoint.

    ``live``: link indexes of the restored endpoints; ``unsure``: ids with unreadable state. A link that is up
    and has no alias may be Cilium's own plugin's: it is never abandoned, unless both ends of the pair are in
    this namespace.
    """
    everything = {link.ifindex: link for link in links}
    return [
        link
        for link in everything.values()
        if link.kind == "veth"
        and link.ifindex not in live
        and (_is_unowned(link, unsure) or _is_half_made_pair(link, everything, live))
    ]


def _is_unowned(link: LinkInfo, unsure: Collection[int]) -> bool:
    if not _POD_LINK.fullmatch(link.name):
        return False
    owner = alias_owner(link.alias)
    if owner is None:
        return not link.alias and not link.up
    return owner not in unsure


def _is_half_made_pair(link: LinkInfo, links: Mapping[int, LinkInfo], live: Collection[int]) -> bool:
    peer = None if link.link_netnsid is not None else links.get(link.peer_ifindex)
    return (
        peer is not None
        and peer.peer_ifindex == link.ifindex
        and peer.link_netnsid is None
        and peer.ifindex not in live
        and bool(_POD_LINK.fullmatch(peer.name) or _POD_LINK.fullmatch(link.name))
    )


class Live(msgspec.Struct, frozen=True):
    """State that must not be removed."""

    addresses: frozenset[IPAddress]
    links: frozenset[int]
    """Link indexes of the endpoints."""
    unsure: frozenset[int]
    """Ids of endpoints that are neither restored nor removed: links with these ids stay."""


def stale_rows(leftovers: Mapping[Prefix, IpcacheValue]) -> list[Prefix]:
    """Unclaimed entries of cilium_ipcache for addresses that endpoints of this node had."""
    return [
        prefix
        for prefix, row in leftovers.items()
        if prefix.endswith("/128" if ":" in prefix else "/32")
        and row.tunnel_endpoint.is_unspecified
        and (row.identity == INIT or scope_of(row.identity) is Scope.CLUSTER)
    ]


class Clearing:
    """Removes stale state; a failed step does not stop the next ones."""

    def __init__(
        self,
        ipcache: Ipcache,
        left: StaleMaps,
        links: RestoreLinks,
        files: StateFiles,
        log: Logger,
    ) -> None:
        self._ipcache = ipcache
        self._left = left
        self._links = links
        self._files = files
        self._log = log
        self._errors: list[str] = []

    async def run(
        self, live: Live, rows: Sequence[LxcRow], links: Sequence[LinkInfo], failed: Collection[int]
    ) -> list[str]:
        """Remove unclaimed ``rows`` (of cilium_lxc) and ``links``, and the ``failed`` endpoints.

        Returns one line for each failed step. The order is that of deleting an endpoint: it becomes
        unreachable first.
        """
        self._errors = []
        dead = [row for row in rows if not row.is_host and row.ip not in live.addresses]
        async with self._step("cilium_lxc"):
            for row in dead:
                self._left.drop_address(row.ip, row.endpoint_id)
        stale = stale_rows(self._ipcache.leftovers)
        async with self._step("cilium_ipcache"):
            self._ipcache.discard(stale)
        configs = []
        async with self._step("hive_endpoints"):
            configs = [ifindex for ifindex in self._left.configs() if ifindex not in live.links]
            for ifindex in configs:
                self._left.drop_config(ifindex)
        async with self._step("policy maps"):
            await self._left.sweep_policies()
        for number in failed:
            async with self._step(f"state of endpoint {number}"):
                self._files.remove(number)
        orphans = abandoned(links, live.links, live.unsure)
        if orphans:
            async with self._step("links"):
                await self._links.reap([link.ifindex for link in orphans])
        if dead or stale or configs or orphans:
            self._log.info(
                "left-overs of endpoints removed",
                addresses=len(dead),
                identities=len(stale),
                configs=len(configs),
                links=", ".join(link.name for link in orphans),
            )
        return self._errors

    @asynccontextmanager
    async def _step(self, what: str) -> AsyncIterator[None]:
        try:
            yield
        except (OSError, HiveError) as error:
            self._log.warning("left-over of an endpoint not removed", what=what, error=str(error))
            self._errors.append(f"{what}: {error}")
