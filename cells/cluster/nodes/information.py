"""Waits at start until Kubernetes or the operator has assigned this node its pod ranges.

In:   this node's Node, or its CiliumNode if the operator assigns ranges.
Out:  AssignedPodCIDRs and AssignedPools for IPAM.
Source: Cilium 1.17, WaitForNodeInformation.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

import anyio

from cells.base.addresses import Family, IPNetwork
from cells.cluster.nodes.claim_validation import impossible_range
from cells.cluster.nodes.parse import (
    DECIDED_IN_CILIUM_NODES,
    NodeFault,
    NodeReader,
    NodeSettings,
    ParsedNode,
    parse_cidr,
    parse_cilium_node,
)
from cells.config import AgentConfig
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.objects.cilium_node import CILIUM_NODES, CiliumNode
from cells.kubernetes.objects.core import NODES, Node
from cells.kubernetes.resources import Resources
from cells.kubernetes.settings import ObjectSource
from cells.node.ipam.pools import PoolState
from cells.node.ipam.settings import PodAddressing, saved_ranges
from lifecycle import Health, HiveError, Hook, Lifecycle, Logger, ReadTable, UsageError

LIST_TIMEOUT: Final = 10.0
"""Seconds to wait for an object that is not required, if the API server is slow."""


class NodeInformation:
    """The ranges and pools assigned to this node; IPAM starts once they are known or not required.

    The wait is unlimited if a range is required: pods must not get addresses of a made-up range. A restarted
    agent continues with its previous range, and follows later changes.
    """

    def __init__(
        self,
        agent: AgentConfig,
        ipam: PodAddressing,
        settings: NodeSettings,
        source: ObjectSource,
        reader: NodeReader,
        api: KubernetesAPI,
        resources: Resources,
        *,
        lifecycle: Lifecycle,
        health: Health,
        log: Logger,
    ) -> None:
        self._agent = agent
        self._ipam = ipam
        self._settings = settings
        self._manifests = source is ObjectSource.MANIFESTS
        self._reader = reader
        self._api = api
        self._by_cilium = ipam.mode in DECIDED_IN_CILIUM_NODES
        self._kind = "CiliumNode" if self._by_cilium else "Node"
        nodes, cilium_nodes = resources.table(NODES), resources.table(CILIUM_NODES)
        self._table: ReadTable[tuple[str, str], CiliumNode] | ReadTable[tuple[str, str], Node] = (
            cilium_nodes if self._by_cilium else nodes
        )
        self._cilium_nodes = cilium_nodes
        self._health = health.child("node-information")
        self._log = log
        self._reported: set[NodeFault] = set()
        lifecycle.append(Hook("wait for node information", self._wait, start_timeout=math.inf))

    def current(self) -> Mapping[Family, tuple[IPNetwork, ...]]:
        """Return the assigned ranges of enabled families, the primary one first."""
        parsed = self._parse(self._table.get(self._own))
        return {family: tuple(parsed.cidrs[family]) for family in self._enabled if parsed.cidrs[family]}

    def pools(self) -> PoolState | None:
        """Return the pools in this node's CiliumNode; None without one."""
        row = self._cilium_nodes.get(self._own)
        if row is None:
            return None
        ranges = row.spec.ipam.pools
        requested = {
            one.pool: {Family.IPV4: one.needed.ipv4, Family.IPV6: one.needed.ipv6}
            for one in ranges.requested or ()
        }
        allocated = {one.pool: tuple(map(parse_cidr, one.cidrs or ())) for one in ranges.allocated or ()}
        return PoolState(
            requested,
            {
                pool: tuple(cidr for cidr in cidrs if cidr is not None and not impossible_range(cidr))
                for pool, cidrs in allocated.items()
            },
            row.status.ipam.operator_status.error,
        )

    async def changes(self) -> AsyncIterator[object]:
        """Yield on every change of this node's object."""
        seen = self._table.get(self._own)
        while True:
            seen = await self._table.wait_changed(self._own, seen)  # type: ignore[arg-type]  # of its own rows
            yield seen

    @property
    def _own(self) -> tuple[str, str]:
        return ("", self._agent.node_name)

    @property
    def _enabled(self) -> list[Family]:
        on = {Family.IPV6: self._agent.ipv6, Family.IPV4: self._agent.ipv4}
        return [family for family, enabled in on.items() if enabled]

    def required(self) -> list[Family]:
        """Return the families that need an assigned range; a configured range counts as assigned.

        In mode multi-pool IPAM itself waits for pools. Raises UsageError if no source could assign a range.
        """
        by_setting = {
            Family.IPV4: self._settings.k8s_require_ipv4_pod_cidr,
            Family.IPV6: self._settings.k8s_require_ipv6_pod_cidr,
        }
        found = [
            family
            for family in self._enabled
            if by_setting[family] or (self._externally_assigned() and family not in self._ipam.ranges)
        ]
        if self._pooled:
            if not (self._manifests or self._api.enabled):
                raise UsageError(
                    "ipam=multi-pool: no source for this node's pools; set manifests-dir or k8s-api-server"
                )
            return []
        if found and not (self._manifests or self._api.enabled):
            why = "ipam=kubernetes" if self._ipam.mode == "kubernetes" else f"k8s-require-{found[0]}-pod-cidr"
            raise UsageError(
                f"{why}: no source for this node's range; set manifests-dir or k8s-api-server, or"
                f" {found[0]}-range"
            )
        return found

    def _externally_assigned(self) -> bool:
        """Whether Kubernetes, or the operator through an API server, assigns the range."""
        return self._ipam.mode == "kubernetes" or (self._by_cilium and self._api.enabled)

    @property
    def _pooled(self) -> bool:
        return self._ipam.pooled

    async def _wait(self) -> None:
        required = self.required()
        if not (self._manifests or self._api.enabled):
            return
        restored = saved_ranges(self._agent.state_dir, self._log)
        if missing := [family for family in required if family not in restored.assigned]:
            await self._wait_assigned(missing)
        elif self._pooled or any(
            family not in self._ipam.ranges and family not in restored.primary for family in self._enabled
        ):
            await self._wait_listed()
        self._check()
        ranges = {
            f"{family}_pod_cidrs": [str(each) for each in cidrs] for family, cidrs in self.current().items()
        }
        if ranges:
            self._log.info(
                "Received own node information", node=self._agent.node_name, kind=self._kind, **ranges
            )
        self._health.ok("received")

    async def _wait_listed(self) -> None:
        """Wait until the objects are listed, the API server is unreachable, or LIST_TIMEOUT."""
        with anyio.move_on_after(LIST_TIMEOUT):
            async with anyio.create_task_group() as tasks:

                async def first(done: Callable[[], Awaitable[None]]) -> None:
                    await done()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(first, self._table.wait_initialized)
                if self._api.enabled:
                    tasks.start_soon(first, self._api.wait_lost)

    async def _wait_assigned(self, required: list[Family]) -> None:
        seen = self._table.get(self._own)
        while missing := self._missing(seen, required):
            name = self._agent.node_name
            self._health.degraded(f"waiting for {self._kind} {name}: {missing}")
            self._log.warning("Waiting for k8s node information", node=name, kind=self._kind, error=missing)
            seen = await self._table.wait_changed(self._own, seen)  # type: ignore[arg-type]  # of its own rows

    def _missing(self, seen: Node | CiliumNode | None, required: list[Family]) -> str:
        """Return what is missing in the object; empty if nothing."""
        if seen is None:
            return f"there is no {self._kind} object of this name"
        parsed = self._parse(seen)
        return next(
            (
                f"required {family.text} PodCIDR not available"
                for family in required
                if not parsed.cidrs[family]
            ),
            "",
        )

    def _parse(self, seen: Node | CiliumNode | None) -> ParsedNode:
        if seen is None:
            return ParsedNode()
        parsed = parse_cilium_node(seen) if isinstance(seen, CiliumNode) else self._reader.parse(seen)
        for family, cidrs in parsed.cidrs.items():
            for cidr in filter(impossible_range, cidrs):
                text = f"Refusing a range of this node: it {impossible_range(cidr)}"
                parsed.faults.append(NodeFault("error", text, str(cidr)))
            parsed.cidrs[family] = [cidr for cidr in cidrs if not impossible_range(cidr)]
        for fault in parsed.faults:
            if fault not in self._reported:
                self._reported.add(fault)
                log = self._log.error if fault.level == "error" else self._log.warning
                log(fault.text, node=seen.name, value=fault.value)
        return parsed

    def _check(self) -> None:
        """Raise HiveError if IPv6 is enabled and the node's object has no IPv6 address."""
        parsed = self._parse(self._table.get(self._own))
        shown = {Family.of(each.ip) for each in parsed.addresses}
        if self._agent.ipv6 and shown and Family.IPV6 not in shown:
            raise HiveError(
                f"{self._kind} {self._agent.node_name} does not have an IPv6 address, and enable-ipv6 is set:"
                " give the node one, or set enable-ipv6=false"
            )
