"""Validates saved endpoints, and removes stale state: map entries, policy maps, directories, links.

``restored`` calls both. State of restored endpoints, and of the node itself, is not touched.

Source: Cilium 1.17, validateEndpoint, clearCiliumVeths and the sweep of stale maps.
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
from cells.endpoint.restore.interfaces import LxcRow, RestoreLinks, StaleMaps
from cells.maps.records.cluster import IpcacheValue
from cells.netlink.rows import LinkInfo
from lifecycle import HiveError, Logger

# Validation of a saved endpoint: its link exists and is its own.
#
# Source: Cilium 1.17, validation of old endpoints and clearCiliumVeths.

_ALIAS: Final = re.compile(r"hive endpoint ([0-9]+)")
_POD_LINK: Final = re.compile(r"lxc[0-9a-f]{12}")


def alias_owner(alias: str) -> int | None:
    """Return the endpoint id in a link's alias; None if the alias is not ours."""
    found = _ALIAS.fullmatch(alias)
    return int(found[1]) if found else None


def validation_error(endpoint: Endpoint, links: Mapping[str, LinkInfo]) -> str | None:
    """Return why the endpoint cannot be restored; None if it can.

    A link that is up and has no alias was created by Cilium's plugin. A link without alias that is down was
    never completed: the requester got no answer. The latter does not apply to links of other plugins.
    """
    link = links.get(endpoint.ifname)
    if link is None:
        return f"interface {endpoint.ifname} could not be found"
    if link.ifindex != endpoint.ifindex:
        return (
            f"interface {endpoint.ifname} has index {link.ifindex}, not {endpoint.ifindex}: it was recreated"
        )
    owner = alias_owner(link.alias)
    if owner is not None and owner != endpoint.id:
        return f"interface {endpoint.ifname} belongs to endpoint {owner}, by its alias"
    if not link.alias and not link.up and not endpoint.datapath.is_chained:
        return f"interface {endpoint.ifname} was never set up: the CNI ADD was interrupted"
    return None


def orphaned_links(
    links: Iterable[LinkInfo], live: Collection[int], undecided: Collection[int]
) -> list[LinkInfo]:
    """Return the links of pods without an endpoint.

    ``live``: link indexes of the restored endpoints; ``undecided``: ids with unreadable state. A link that is
    up and has no alias may be that of Cilium's plugin: it is not an orphan, unless both ends of the pair are
    in this namespace.
    """
    everything = {link.ifindex: link for link in links}
    return [
        link
        for link in everything.values()
        if link.kind == "veth"
        and link.ifindex not in live
        and (_is_unowned(link, undecided) or _is_half_made_pair(link, everything, live))
    ]


def _is_unowned(link: LinkInfo, undecided: Collection[int]) -> bool:
    if not _POD_LINK.fullmatch(link.name):
        return False
    owner = alias_owner(link.alias)
    if owner is None:
        return not link.alias and not link.up
    return owner not in undecided


def _is_half_made_pair(link: LinkInfo, links: Mapping[int, LinkInfo], live: Collection[int]) -> bool:
    peer = None if link.link_netnsid is not None else links.get(link.peer_ifindex)
    return (
        peer is not None
        and peer.peer_ifindex == link.ifindex
        and peer.link_netnsid is None
        and peer.ifindex not in live
        and bool(_POD_LINK.fullmatch(peer.name) or _POD_LINK.fullmatch(link.name))
    )


class RetainedState(msgspec.Struct, frozen=True):
    """State that must not be removed."""

    addresses: frozenset[IPAddress]
    links: frozenset[int]
    """Link indexes of the endpoints."""
    undecided: frozenset[int]
    """Ids of endpoints that are neither restored nor removed: links with these ids stay."""


def stale_ipcache_entries(leftovers: Mapping[Prefix, IpcacheValue]) -> list[Prefix]:
    """Return unclaimed entries of cilium_ipcache for addresses of removed endpoints of this node."""
    return [
        prefix
        for prefix, row in leftovers.items()
        if prefix.endswith("/128" if ":" in prefix else "/32")
        and row.tunnel_endpoint.is_unspecified
        and (row.identity == INIT or scope_of(row.identity) is Scope.CLUSTER)
    ]


class StaleStateCleanup:
    """Removes stale state; a failed step does not stop the next ones."""

    def __init__(
        self,
        ipcache: Ipcache,
        stale_maps: StaleMaps,
        links: RestoreLinks,
        files: StateFiles,
        log: Logger,
    ) -> None:
        self._ipcache = ipcache
        self._stale_maps = stale_maps
        self._links = links
        self._files = files
        self._log = log
        self._errors: list[str] = []

    async def run(
        self, live: RetainedState, rows: Sequence[LxcRow], links: Sequence[LinkInfo], failed: Collection[int]
    ) -> list[str]:
        """Remove unclaimed ``rows`` of cilium_lxc, orphaned ``links`` and the ``failed`` endpoints.

        Returns one line for each failed step. The order is that of deleting an endpoint: it becomes
        unreachable first.
        """
        self._errors = []
        dead = [row for row in rows if not row.is_host and row.ip not in live.addresses]
        async with self._step("cilium_lxc"):
            for row in dead:
                self._stale_maps.drop_address(row.ip, row.endpoint_id)
        stale = stale_ipcache_entries(self._ipcache.leftovers)
        async with self._step("cilium_ipcache"):
            self._ipcache.discard(stale)
        configs = []
        async with self._step("hive_endpoints"):
            configs = [ifindex for ifindex in self._stale_maps.configs() if ifindex not in live.links]
            for ifindex in configs:
                self._stale_maps.drop_config(ifindex)
        async with self._step("policy maps"):
            await self._stale_maps.sweep_policies()
        for number in failed:
            async with self._step(f"state of endpoint {number}"):
                self._files.remove(number)
        orphans = orphaned_links(links, live.links, live.undecided)
        if orphans:
            async with self._step("links"):
                await self._links.reap([link.ifindex for link in orphans])
        if dead or stale or configs or orphans:
            self._log.info(
                "stale endpoint state removed",
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
            self._log.warning("stale endpoint state not removed", what=what, error=str(error))
            self._errors.append(f"{what}: {error}")
