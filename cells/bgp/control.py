"""The cell of the BGP control plane: watches resources, plans instances, runs speakers and reports sessions.

Input:  BGP resources, Secrets of one namespace, services, pools, the local node.
Output: the table ``bgp-plans``, a row per instance; derived from it ``bgp-instances``, ``bgp-peers``,
        ``bgp-policies`` and ``bgp-paths``, which are reconciled with speakers, and ``bgp-faults``; from
        plans and observed sessions ``bgp-node-status``, written to the status of this node's
        CiliumBGPNodeConfig.
Why:    without enable-bgp-control-plane, no resource is watched and most modules are not imported.
Source: Cilium 1.17, BGP control plane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cells.base.addresses import IPAddress, IPNetwork
from cells.base.metrics import Collector, features
from cells.bgp import FOLDER, BGPSettings, SpeakerSettings, rest
from cells.bgp.rest import BGPState, node_status
from cells.bgp.speaker_state import (
    AfiSafi,
    BGPFault,
    ListedRoute,
    ObservedPeer,
    RouteTable,
    WantedSpeakers,
    bgp_faults,
    instance_table,
    observed_peers,
    path_table,
    peer_table,
    policy_table,
)
from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig
from cells.config.shared import ServiceProxyName
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.objects.cilium_pools import CILIUM_POD_IP_POOLS, CiliumPodIPPool
from cells.kubernetes.objects.core import ENDPOINT_SLICES, SERVICES
from cells.kubernetes.objects.kind import Kind
from cells.kubernetes.resources import Resources
from cells.kubernetes.settings import ObjectSource
from cells.kubernetes.sink import SourceStatus
from cells.node.ipam import Ipam
from cells.node.ipam.ranges import PodRange
from cells.services.model.claims import RefusedAddress
from lifecycle import (
    Change,
    Derived,
    Health,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Member,
    ReadTable,
    Reconciler,
    Table,
    Tables,
    Target,
    UsageError,
    config,
    group,
    invoke,
    module,
    provide,
    provide_private,
    seconds,
)
from lifecycle.tables import BatchFailures, RateLimit

if TYPE_CHECKING:
    from cells.bgp.advertisements import AnnouncedService
    from cells.bgp.controller import BGPPassword, InstancePlan
    from cells.bgp.speaker import BGPSpeakers
    from cells.kubernetes.objects.cilium_bgp import (
        BGPNodeConfigStatus,
        CiliumBGPAdvertisement,
        CiliumBGPNodeConfig,
        CiliumBGPPeerConfig,
        CiliumBGPPeeringPolicy,
    )

__all__ = ["BGPControl", "cell"]

WITH_RANGES: Final = frozenset({"kubernetes", "cluster-pool"})
"""IPAM modes in which a node has pod CIDRs, which advertisements of type PodCIDR announce."""
WITH_POOLS: Final = "multi-pool"
STATUS_RATE: Final = RateLimit(1, per=2.0, burst=2)
"""Limits writes of the status, which changes with every route because it has route counts."""
STATUS_SWEEP: Final = seconds(60)


class BGPResources:
    """Tables of the BGP resources, watched if enable-bgp-control-plane is set."""

    def __init__(
        self,
        settings: BGPSettings,
        agent: AgentConfig,
        source: ObjectSource,
        resources: Resources,
        proxy: ServiceProxyName,
        refused: Table[tuple[str, str, str], RefusedAddress],
        *,
        lifecycle: Lifecycle,
    ) -> None:
        self.enabled = settings.enable_bgp_control_plane
        """Whether BGP is enabled; if not, only this attribute and ``agent`` are set."""
        self.agent = agent
        if not self.enabled:
            return
        from cells.bgp.advertisements import announced_services
        from cells.bgp.controller import SECRETS
        from cells.kubernetes.objects import cilium_bgp as kinds

        self.secrets_namespace = settings.bgp_secrets_namespace
        self.reports = settings.enable_bgp_control_plane_status_report and source is ObjectSource.API_SERVER
        """Whether to write the status of this node's CiliumBGPNodeConfig."""
        self.clears = source is ObjectSource.API_SERVER and not self.reports
        """Whether to remove a status that an earlier agent has written."""
        self.required: tuple[Kind[Any], ...] = (
            kinds.CILIUM_BGP_NODE_CONFIGS,
            kinds.CILIUM_BGP_PEER_CONFIGS,
            kinds.CILIUM_BGP_ADVERTISEMENTS,
        )
        """Resources that must be listed before speakers are changed."""
        self.configs: Table[tuple[str, str], CiliumBGPNodeConfig] = resources.follow(
            kinds.CILIUM_BGP_NODE_CONFIGS
        )
        self.peer_configs: Table[tuple[str, str], CiliumBGPPeerConfig] = resources.follow(
            kinds.CILIUM_BGP_PEER_CONFIGS
        )
        self.advertisements: Table[tuple[str, str], CiliumBGPAdvertisement] = resources.follow(
            kinds.CILIUM_BGP_ADVERTISEMENTS
        )
        self.legacy: Table[tuple[str, str], CiliumBGPPeeringPolicy] = resources.follow(
            kinds.CILIUM_BGP_PEERING_POLICIES
        )
        self.passwords: Table[tuple[str, str], BGPPassword] = (
            resources.follow(SECRETS, namespace=self.secrets_namespace)
            if self.secrets_namespace
            else Table("bgp-no-passwords", key=lambda row: row.key)
        )
        self.pools: Table[tuple[str, str], CiliumPodIPPool] = resources.table(CILIUM_POD_IP_POOLS)
        self.services: ReadTable[tuple[str, str], AnnouncedService] = announced_services(
            resources.table(SERVICES), resources.table(ENDPOINT_SLICES), refused, agent.node_name, proxy.name
        )
        """Addresses of services that may be announced."""
        if source is ObjectSource.NOWHERE:
            lifecycle.append(Hook("find the BGP resources", _no_source))


async def _no_source() -> None:
    raise UsageError(
        "enable-bgp-control-plane=true: what is announced is decided by CiliumBGPNodeConfigs, and there is no"
        " source of objects; set k8s-api-server, k8s-kubeconfig-path or manifests-dir, or leave it out"
    )


class BGPControl:
    """The plans of this node's instances, as tables; empty if BGP is disabled."""

    def __init__(
        self,
        resources: BGPResources,
        nodes: ReadTable[str, ClusterNode],
        ranges: Table[IPNetwork, PodRange],
        ipam: Ipam,
        statuses: Table[str, SourceStatus],
        *,
        jobs: Jobs,
        tables: Tables,
    ) -> None:
        self.wanted = WantedSpeakers(instance_table(), peer_table(), policy_table(), path_table())
        """The configuration that speakers are made equal to."""
        self.faults: ReadTable[tuple[str, str, str], BGPFault] = bgp_faults()
        """Parts of resources that cannot be applied."""
        if not resources.enabled:
            return
        self._resources = resources
        self._mode = ipam.mode
        self._statuses = statuses
        self._known: Table[str, str] = Table("bgp-definitions", key=str)
        """A table without rows; it is initialized once the BGP resources are listed."""
        self._first = self._known.initializer("definitions of BGP")
        self.plans: ReadTable[str, InstancePlan] = Derived(
            "bgp-plans",
            self._plans,
            self._known,
            nodes.filter(lambda node: node.local, name="bgp-node"),
            resources.configs,
            resources.peer_configs,
            resources.advertisements,
            ranges,
            resources.pools,
            resources.services,
            resources.passwords,
            resources.legacy,
        )
        """The plan of each instance by name; the plan with an empty name has faults of advertisements."""
        self.wanted = WantedSpeakers(
            self.plans.flat_map(
                lambda plan: () if plan.instance is None else (plan.instance,),
                key=lambda row: row.name,
                name="bgp-instances",
            ),
            self.plans.flat_map(lambda plan: plan.peers, key=lambda row: row.key, name="bgp-peers"),
            self.plans.flat_map(lambda plan: plan.policies, key=lambda row: row.key, name="bgp-policies"),
            self.plans.flat_map(lambda plan: plan.paths, key=lambda row: row.key, name="bgp-paths"),
        )
        """The desired state of speakers."""
        self.faults = self.plans.flat_map(
            lambda plan: plan.faults, key=lambda row: row.key, name="bgp-faults"
        )
        """Parts of resources that cannot be applied."""
        tables.add(self.plans, *self.wanted, self.faults, resources.services)
        jobs.one_shot("wait for the BGP definitions", self._wait_definitions)

    async def _wait_definitions(self) -> None:
        """Delay plans until the BGP resources are listed, so that missing objects withdraw no routes."""
        for kind in self._resources.required:
            await self._statuses.wait_for(kind.qualified, lambda status: status.synced)
        self._first.done()

    def _plans(
        self,
        known: list[str],
        nodes: list[ClusterNode],
        configs: list[CiliumBGPNodeConfig],
        peer_configs: list[CiliumBGPPeerConfig],
        advertisements: list[CiliumBGPAdvertisement],
        ranges: list[PodRange],
        pools: list[CiliumPodIPPool],
        services: list[AnnouncedService],
        passwords: list[BGPPassword],
        legacy: list[CiliumBGPPeeringPolicy],
    ) -> Mapping[str, InstancePlan]:
        from cells.bgp.advertisements import announced_pools
        from cells.bgp.controller import BGPFacts, plans

        del known
        if not nodes:
            return {}
        own = self._resources.agent.node_name
        withheld = nodes[0].unannounced
        announced = [one for one in ranges if one.state != "retired" and one.network not in withheld]
        facts = BGPFacts(
            nodes[0],
            next((one for one in configs if one.name == own), None),
            peer_configs,
            advertisements,
            [one.network for one in announced] if self._mode in WITH_RANGES else (),
            list(announced_pools(pools, announced)) if self._mode == WITH_POOLS else (),
            services,
            passwords,
            self._resources.secrets_namespace,
            legacy,
        )
        return plans(facts)


class BGPFaults:
    """Logs each fault once, and reports faults as health."""

    def __init__(
        self, resources: BGPResources, control: BGPControl, *, jobs: Jobs, health: Health, log: Logger
    ) -> None:
        if not resources.enabled:
            return
        self._faults = control.faults
        self._health = health.child("resources")
        self._log = log
        self._health.ok("all BGP resources are in force")
        jobs.observe("faults", control.faults.changes, self._report)

    async def _report(self, changes: Iterable[Change[tuple[str, str, str], BGPFault]]) -> None:
        for change in changes:
            if change.row is not None:
                row = change.row
                self._log.warning("BGP: resource cannot be applied", subject=row.subject, error=row.error)
        found = sorted(self._faults.all(), key=lambda row: row.key)
        if not found:
            self._health.ok("all BGP resources are in force")
            return
        more = f", and {len(found) - 1} more: hive db show bgp-faults" if len(found) > 1 else ""
        self._health.degraded(f"{found[0].subject}: {found[0].error}{more}")


class BGPSessions:
    """Logs state changes of sessions, and reports sessions that are down as health."""

    def __init__(
        self,
        settings: BGPSettings,
        observed: Table[tuple[str, IPAddress], ObservedPeer],
        *,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        if not settings.enable_bgp_control_plane:
            return
        self._observed = observed
        self._health = health.child("sessions")
        self._log = log
        self._health.ok("none has ended")
        jobs.observe("report sessions", observed.changes, self._report)

    async def _report(self, changes: Iterable[Change[tuple[str, IPAddress], ObservedPeer]]) -> None:
        for change in changes:
            row, old = change.row, change.old
            if row is None:
                continue
            about = {"instance": row.instance, "peer": str(row.address)}
            if row.established and not (old is not None and old.established):
                self._log.info("BGP session is established", **about)
            elif not row.established and row.error and (old is None or old.error != row.error):
                self._log.warning("BGP session is down", **about, error=row.error)
        down = [row for row in self._observed.all() if row.error and not row.established]
        if not down:
            self._health.ok("none has ended")
            return
        more = f", and {len(down) - 1} more: hive bgp peers" if len(down) > 1 else ""
        self._health.degraded(f"{down[0].instance}: {down[0].address}: {down[0].error}{more}")


# The status of this node's CiliumBGPNodeConfig.


class _StatusTarget(Target[str, "BGPNodeConfigStatus", "BGPNodeConfigStatus"]):
    """Reconciler target for the status of this node's CiliumBGPNodeConfig."""

    def __init__(self, resources: BGPResources, api: KubernetesAPI) -> None:
        self._resources = resources
        self._api = api

    async def observe(self) -> Mapping[str, BGPNodeConfigStatus]:
        """Return the status as last watched."""
        own = self._resources.agent.node_name
        return {row.name: row.status for row in self._resources.configs.all() if row.name == own}

    async def put(self, batch: Mapping[str, BGPNodeConfigStatus]) -> None:
        """Patch the status. Raises BatchError."""
        from cells.kubernetes.client.errors import KubernetesError, NotFoundError

        with BatchFailures(KubernetesError) as failures:
            for name, status in batch.items():
                with failures.of(name):
                    await self._api.reachable()
                    body = {"status": {"bgpInstances": msgspec.to_builtins(status).get("bgpInstances")}}
                    try:
                        await self._api.client.patch(
                            self._resources.required[0], name, body, subresource="status"
                        )
                    except NotFoundError:  # deleted meanwhile: its row goes, too
                        continue

    async def drop(self, batch: Collection[str]) -> None:
        """Do nothing, as the object was deleted."""


class BGPNodeStatus:
    """Reconciles the status of this node's CiliumBGPNodeConfig, or clears it if reports are disabled."""

    def __init__(
        self,
        resources: BGPResources,
        control: BGPControl,
        observed: Table[tuple[str, IPAddress], ObservedPeer],
        api: KubernetesAPI,
        *,
        jobs: Jobs,
        tables: Tables,
    ) -> None:
        if not (resources.enabled and (resources.reports or resources.clears)):
            return
        own, reports = resources.agent.node_name, resources.reports

        def statuses(
            configs: list[CiliumBGPNodeConfig], plans: list[InstancePlan], sessions: list[ObservedPeer]
        ) -> Mapping[str, BGPNodeConfigStatus]:
            from cells.kubernetes.objects.cilium_bgp import BGPNodeConfigStatus

            return {
                row.name: node_status(row, plans, sessions) if reports else BGPNodeConfigStatus()
                for row in configs
                if row.name == own
            }

        self.wanted: ReadTable[str, BGPNodeConfigStatus] = Derived(
            "bgp-node-status", statuses, resources.configs, control.plans, observed
        )
        """The desired status by node name."""
        self._reconciler: Reconciler[str, BGPNodeConfigStatus] = Reconciler(
            self.wanted, _StatusTarget(resources, api), full_every=STATUS_SWEEP, rate_limit=STATUS_RATE
        )
        tables.add(self.wanted, self._reconciler.statuses)
        jobs.observe("report", self._reconciler)


# Speakers.


class BGPSpeaking:
    """Runs speakers if BGP is enabled; otherwise withdraws routes of an earlier agent's and stops them."""

    def __init__(
        self,
        settings: SpeakerSettings,
        resources: BGPResources,
        control: BGPControl,
        observed: Table[tuple[str, IPAddress], ObservedPeer],
        *,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self._speakers: BGPSpeakers | None = None
        self._agent, self._settings, self._log = resources.agent, settings, log
        if resources.enabled:
            from cells.bgp.speaker import BGPSpeakers

            self._speakers = BGPSpeakers(
                settings, self._agent, control.wanted, observed, jobs=jobs, tables=tables, log=log
            )
        else:
            jobs.one_shot("stop BGP speakers of an earlier agent", self._end_earlier)

    async def _end_earlier(self) -> None:
        """Stop speakers of an earlier agent. Raises BatchError, after which the job is repeated."""
        if not any((self._agent.state_dir / FOLDER).glob("*.json")):
            return
        from cells.bgp.speaker_processes import Speakers
        from cells.bgp.speaker_target import SpeakerTarget

        speakers = Speakers(self._settings, self._agent.state_dir, self._log)
        await SpeakerTarget(speakers).drop(list(speakers.running()))

    async def listed_routes(
        self, instance: str, table: RouteTable, family: AfiSafi, peer: IPAddress | None = None
    ) -> list[ListedRoute]:
        """List the routes of a RIB; of an Adj-RIB, those of a peer. Raises HiveError."""
        if self._speakers is None:
            return []
        return await self._speakers.listed_routes(instance, table, family, peer)


def bgp_state(
    resources: BGPResources,
    control: BGPControl,
    observed: Table[tuple[str, IPAddress], ObservedPeer],
    listing: BGPSpeaking,
) -> BGPState:
    """Return the tables that the API and metrics read."""
    return BGPState(resources.enabled, control.wanted, observed, listing)


def bgp_features(resources: BGPResources) -> Member[Collector]:
    """Report the feature metric of BGP."""
    return features("bgp-features", lambda: {"adv_connect_and_lb_bgp_enabled": resources.enabled})


cell = group(
    module(
        "bgp",
        "Routes announced by BGP",
        config(BGPSettings, SpeakerSettings),
        provide(BGPControl, observed_peers, bgp_state, bgp_features),
        provide_private(BGPResources, BGPFaults, BGPSessions, BGPNodeStatus, BGPSpeaking),
        invoke(BGPFaults, BGPSessions, BGPNodeStatus, BGPSpeaking),
    ),
    rest.cell,
)
