"""Keeps this node's events while the agent runs, if enable-hubble is true."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cells.cluster.identity.identities import Identity
from cells.cluster.ipcache import Ipcache
from cells.config import AgentConfig
from cells.endpoint import Endpoint
from cells.hubble.settings import HubbleSettings
from cells.kubernetes.objects.core import Node, Pod
from cells.observe.events import Events
from cells.policy.control import PolicyObject, PolicyView
from cells.policy.maps import RealizedPolicy
from cells.proxy.dns import NameStore
from cells.services import FrontendKey
from cells.services.control import ServedFrontend
from lifecycle import Jobs, Table

if TYPE_CHECKING:
    from cells.hubble.ring import FlowObserver
    from cells.hubble.sources import EventSources


class KnownNames(msgspec.Struct, frozen=True):
    """The agent's tables that flows get their names from."""

    endpoints: Table[int, Endpoint]
    identities: Table[int, Identity]
    ipcache: Ipcache
    pods: Table[tuple[str, str], Pod]
    names: NameStore
    policies: PolicyView | None


class FollowedTables(msgspec.Struct, frozen=True):
    """The agent's tables; their changes become agent events."""

    endpoints: Table[int, Endpoint]
    realized: Table[int, RealizedPolicy]
    ipcache: Ipcache
    services: Table[FrontendKey, ServedFrontend]
    policies: Table[tuple[str, str, str], PolicyObject] | None
    nodes: Table[tuple[str, str], Node]


def known_names(
    endpoints: Table[int, Endpoint],
    identities: Table[int, Identity],
    ipcache: Ipcache,
    pods: Table[tuple[str, str], Pod],
    names: NameStore,
    policies: PolicyView | None,
) -> KnownNames:
    """This agent's."""
    return KnownNames(endpoints, identities, ipcache, pods, names, policies)


def followed_tables(
    endpoints: Table[int, Endpoint],
    realized: Table[int, RealizedPolicy],
    ipcache: Ipcache,
    services: Table[FrontendKey, ServedFrontend],
    policies: Table[tuple[str, str, str], PolicyObject] | None,
    nodes: Table[tuple[str, str], Node],
) -> FollowedTables:
    """This agent's."""
    return FollowedTables(endpoints, realized, ipcache, services, policies, nodes)


class Hubble:
    """Keeps this node's events while the agent runs, if enable-hubble is true."""

    def __init__(
        self,
        settings: HubbleSettings,
        agent: AgentConfig,
        events: Events,
        known: KnownNames,
        followed: FollowedTables,
        *,
        jobs: Jobs,
    ) -> None:
        self._sources: EventSources | None = None
        if not settings.enable_hubble:
            return
        from cells.hubble.sources import EventSources, origin_of, queue_size

        sources = self._sources = EventSources(settings, known, origin_of(agent))
        self._events = events
        self._queue_size = queue_size(settings)
        jobs.one_shot("take in events", self._take)
        jobs.observe("services", followed.services.changes, sources.frontends)
        jobs.observe("endpoints", followed.endpoints.changes, sources.endpoints)
        jobs.observe("policies of endpoints", followed.realized.changes, sources.realized)
        jobs.observe("ipcache", followed.ipcache.table.changes, sources.prefixes)
        jobs.observe("labels of the node", followed.nodes.changes, sources.nodes)
        if followed.policies is not None:
            jobs.observe("policies", followed.policies.changes, sources.policies)

    @property
    def observer(self) -> FlowObserver | None:
        """Answers queries; None without enable-hubble."""
        return self._sources.observer if self._sources is not None else None

    async def _take(self) -> None:
        """Take in events until the agent stops. Raises HiveError if the kernel gives no buffers."""
        if self._sources is not None:
            await self._sources.run(self._events, self._queue_size)
