"""Reconcile the IPsec objects of this node: XFRM states and policies, routes, and the maps of programs.

Input:  the tables ``nodes``, ``node-ids``, ``devices`` and ``ipsec-key``.
Output: XFRM states and policies (table ``ipsec``); routing table 200 and its rules (``ipsec-routes``); the
        SPI in ``cilium_encrypt_state``; the pod networks in ``hive_pod_networks``.
Why:    packets encrypted with the previous key are in flight while a key is replaced, so its states and
        policies are retained for a while.
Source: Cilium 1.17, pkg/datapath/linux/ipsec.

Without enable-ipsec, a hook removes the states, policies, rules and routes of an earlier agent at the start.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from cells.api import EncryptionStatus, StatusFacts, StatusSection
from cells.base.addresses import IPAddress, IPNetwork
from cells.base.metrics import Collector, MetricFamily, gauge
from cells.cluster.encryption import EncryptionKey, PublishedKey
from cells.cluster.node_ids import NodeAddressID
from cells.cluster.nodes.node import ClusterNode
from cells.datapath.settings import XfrmMarks
from cells.encryption.ipsec.active_key import NUMBER, ActiveIpsecKey, IpsecKeys, PodNetworkRow
from cells.encryption.ipsec.keys import (
    IpsecSettings,
)
from cells.encryption.ipsec.plan import (
    DECRYPT,
    FAMILIES,
    KIND,
    RULES,
    TABLE,
    IpsecMode,
    IpsecPlan,
    IpsecPlanner,
    IpsecRoutes,
    Refusals,
    XfrmEdge,
    XfrmKey,
    XfrmObject,
    XfrmTarget,
    wanted_routes,
)
from cells.maps.node_maps import Maps
from cells.maps.target import Codec, MapTarget
from cells.netlink.connection import message_filter, notifications, of_types
from cells.netlink.network import (
    FwmarkRuleRow,
    TableRoute,
    clear_table,
    delete_fwmark_rules,
    read_table,
    remove_rows,
    set_rows,
)
from cells.netlink.xfrm import (
    NETLINK_XFRM,
    XFRM_CHANGES,
    XFRM_REMOVALS,
    Direction,
    XfrmKernel,
    XfrmPolicy,
    XfrmState,
)
from cells.node.devices import Device
from cells.node.router import Router
from cells.tunnel.settings import RouteMtu
from lifecycle import (
    BatchError,
    Derived,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Member,
    ReadTable,
    Reconciler,
    Table,
    Tables,
    after,
    config,
    group,
    invoke,
    minutes,
    module,
    provide,
    provide_private,
)

__all__ = ["IpsecReconciler", "cell"]

SWEEP: Final = minutes(1)
INDEX: Final = Codec[int](
    lambda value: value.to_bytes(4, "little"), lambda data: int.from_bytes(data, "little")
)


# The kernel.


class KernelIpsec(XfrmKernel):
    """The XfrmEdge of this node's kernel."""

    async def rows(self) -> list[FwmarkRuleRow | TableRoute]:
        """List the rules for marked packets and the routes of table 200. Raises NetlinkError, OSError."""
        return await to_thread.run_sync(read_table, RULES.values(), FAMILIES.values())

    async def set_rows(self, rows: Collection[FwmarkRuleRow | TableRoute]) -> Refusals:
        """Add or replace routes and rules. Return those that the kernel rejected."""
        return await to_thread.run_sync(set_rows, rows, TABLE)

    async def remove_rows(self, rows: Collection[FwmarkRuleRow | TableRoute]) -> Refusals:
        """Remove routes and rules. Return those that the kernel rejected."""
        return await to_thread.run_sync(remove_rows, rows, TABLE)

    async def remove_routes(self) -> int:
        """Remove the rules for marked packets and flush table 200. Return the number of rules and routes.

        Without such a rule, table 200 belongs to another program and is not flushed. Raises NetlinkError,
        OSError.
        """
        return await to_thread.run_sync(_remove_routes)


def _remove_routes() -> int:
    families = tuple(FAMILIES.values())
    rules = sum(delete_fwmark_rules(marked, families) for marked in RULES.values())
    return rules + clear_table(TABLE, families) if rules else 0


# Reconciliation.


class IpsecSources:
    """The tables from which states, policies and routes are computed."""

    def __init__(
        self,
        nodes: ReadTable[str, ClusterNode],
        numbers: ReadTable[IPAddress, NodeAddressID],
        devices: Table[int, Device],
        mtu: RouteMtu,
        router: Router,
    ) -> None:
        self.nodes = nodes
        self.node_ids = numbers
        self.devices = devices
        self.mtu = mtu
        self.router = router


class XfrmRow(msgspec.Struct, frozen=True):
    """A row of the table ``ipsec``: the text of a state or policy, without its key."""

    object: str


_REMOVED: Final = message_filter((of_types(*XFRM_REMOVALS),))


@after(IpsecKeys)
class IpsecReconciler:
    """Reconciles states, policies and routes for all nodes, also after another program removes them.

    All objects remain when the agent stops.

    On a key rotation, states of the new key are added first. After an attempt to add each of them, the SPI is
    published to other nodes and written to the map that programs read. States of the previous key are removed
    after ipsec-key-rotation-duration.
    """

    def __init__(
        self,
        keys: IpsecKeys,
        sources: IpsecSources,
        kernel: XfrmEdge,
        maps: Maps,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        log: Logger,
    ) -> None:
        self.keys = keys
        self.kernel = kernel
        self._sources = sources
        self._log = log
        self._latest = IpsecPlan((), ())
        if not keys.enabled:
            lifecycle.append(Hook("remove leftovers of IPsec", self._remove_leftovers))
            return
        self._endpoint_routes = sources.router.endpoint_routes
        mode = IpsecMode(
            families=keys.families, tunnel=sources.mtu.tunnelled, endpoint_routes=self._endpoint_routes
        )
        self._planner = IpsecPlanner(mode)
        self.objects: Derived[XfrmKey, XfrmObject] = Derived(
            "ipsec-objects", self._plan, sources.nodes, sources.node_ids, keys.table
        )
        routes: Derived[XfrmKey, FwmarkRuleRow | TableRoute] = Derived(
            "ipsec-routes", self._routes, sources.nodes, sources.devices
        )
        target = XfrmTarget(kernel, keys.ring, self._current_plan)
        self._reconciler = Reconciler(self.objects, target, full_every=SWEEP, name="ipsec", put_early=True)
        route_reconciler = Reconciler(routes, IpsecRoutes(kernel), full_every=SWEEP, put_early=True)
        numbers = keys.published.table.rekey(lambda _: 0, name="ipsec-key-number")
        number = MapTarget[int, EncryptionKey, int](
            lambda: (maps.encrypt_state,), INDEX, NUMBER, lambda row: row.number
        )
        number_reconciler = Reconciler(numbers, number, full_every=SWEEP)
        networks: Derived[IPNetwork, PodNetworkRow] = Derived("pod-networks", self._networks, sources.nodes)
        network_reconciler = Reconciler(networks, keys.pod_network_target, full_every=SWEEP, put_early=True)
        tables.add(self.objects.map(lambda one: XfrmRow(str(one)), name="ipsec"), routes, networks)
        reconcilers = (self._reconciler, route_reconciler, number_reconciler, network_reconciler)
        tables.add(*(one.statuses for one in reconcilers))
        jobs.observe("reconcile states and policies", self._reconciler)
        jobs.observe("reconcile routes", route_reconciler)
        jobs.observe("write the number of the key", number_reconciler)
        jobs.observe("write the networks of pods", network_reconciler)
        jobs.observe(
            "publish a key with states", self._reconciler.statuses.changes, self._publish_when_written
        )
        jobs.observe("watch the key", keys.table.changes, self._publish_when_written)
        jobs.observe("expire replaced keys", keys.table.changes, self._expire_keys)
        jobs.observe("watch removals of states and policies", self._external_removals, self._trigger)

    def _plan(
        self, nodes: list[ClusterNode], numbers: list[NodeAddressID], keys: list[ActiveIpsecKey]
    ) -> dict[XfrmKey, XfrmObject]:
        del keys  # the table has no key material; the ring has the key
        local = next((node for node in nodes if node.local), None)
        by_name = {row.node: row.id for row in numbers}
        self._latest = self._planner.plan(local, nodes, by_name, self.keys.ring.current)
        return {one.key: one for one in self._latest.objects}

    def _current_plan(self) -> IpsecPlan:
        """Return the plan of the current rows of its source tables."""
        self.objects.revision  # noqa: B018  # reading it recomputes the plan if a source has changed
        return self._latest

    def _routes(
        self, nodes: list[ClusterNode], devices: list[Device]
    ) -> dict[XfrmKey, FwmarkRuleRow | TableRoute]:
        families, mtu = self.keys.families, self._sources.mtu
        return wanted_routes(nodes, devices, families, mtu, endpoint_routes=self._endpoint_routes)

    def _networks(self, nodes: list[ClusterNode]) -> dict[IPNetwork, PodNetworkRow]:
        known = {each: PodNetworkRow(each, not node.local) for node in nodes for each in node.all_cidrs()}
        return self.keys.networks | known

    async def _external_removals(self) -> AsyncIterator[None]:
        async for hint in notifications(XFRM_CHANGES, _REMOVED, protocol=NETLINK_XFRM):
            yield hint

    async def _trigger(self, _: None) -> None:
        self._reconciler.trigger()

    async def _publish_when_written(self, _: object) -> None:
        """Publish the active key once no state or policy is pending."""
        if self.keys.published.number == self.keys.ring.spi:
            return
        statuses = self._reconciler.statuses
        waits = (statuses.get(key) for key in self.objects.keys())  # noqa: SIM118  # a table, not a dict
        if not any(status is None or status.state == "pending" for status in waits):
            self.keys.publish()

    async def _expire_keys(self, _: object) -> None:
        """Trigger the reconciler whenever the retention of a replaced key ends."""
        while (left := self.keys.ring.next_expiry()) is not None:
            await anyio.sleep(left)
            self._reconciler.trigger()

    async def _remove_leftovers(self) -> None:
        """Remove the objects of an earlier agent. Failures are logged, as no packet uses these objects."""
        target = XfrmTarget(self.kernel, self.keys.ring, lambda: IpsecPlan((), ()))
        try:
            if leftovers := await target.observe():
                await target.drop(list(leftovers))
            routes = await self.kernel.remove_routes()
        except (OSError, BatchError) as error:
            if not isinstance(error, OSError) or error.errno not in _XFRM_UNSUPPORTED:
                self._log.warning("failed to remove leftovers of IPsec", error=str(error))
            return
        if leftovers or routes:
            self._log.info(
                "removed what was left of IPsec", states_and_policies=len(leftovers), routes=routes
            )


_XFRM_UNSUPPORTED: Final = frozenset((errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT))
"""Errors of a kernel without XFRM, which has no objects to remove."""


# Metrics and status.
#
# Source: Cilium 1.17, cilium_ipsec_*; Linux, Documentation/networking/xfrm/xfrm_proc.rst.

STATISTICS: Final = Path("/proc/net/xfrm_stat")
ERRORS: Final = {
    "XfrmInError": ("inbound", "other"),
    "XfrmInBufferError": ("inbound", "no_buffer"),
    "XfrmInHdrError": ("inbound", "header"),
    "XfrmInNoStates": ("inbound", "no_state"),
    "XfrmInStateProtoError": ("inbound", "state_protocol"),
    "XfrmInStateModeError": ("inbound", "state_mode"),
    "XfrmInStateSeqError": ("inbound", "state_sequence"),
    "XfrmInStateExpired": ("inbound", "state_expired"),
    "XfrmInStateMismatch": ("inbound", "state_mismatched"),
    "XfrmInStateInvalid": ("inbound", "state_invalid"),
    "XfrmInTmplMismatch": ("inbound", "template_mismatched"),
    "XfrmInNoPols": ("inbound", "no_policy"),
    "XfrmInPolBlock": ("inbound", "policy_blocked"),
    "XfrmInPolError": ("inbound", "policy"),
    "XfrmAcquireError": ("inbound", "acquire"),
    "XfrmFwdHdrError": ("inbound", "forward_header"),
    "XfrmOutError": ("outbound", "other"),
    "XfrmOutBundleGenError": ("outbound", "bundle_generation"),
    "XfrmOutBundleCheckError": ("outbound", "bundle_check"),
    "XfrmOutNoStates": ("outbound", "no_state"),
    "XfrmOutStateProtoError": ("outbound", "state_protocol"),
    "XfrmOutStateModeError": ("outbound", "state_mode"),
    "XfrmOutStateSeqError": ("outbound", "state_sequence"),
    "XfrmOutStateExpired": ("outbound", "state_expired"),
    "XfrmOutPolBlock": ("outbound", "policy_blocked"),
    "XfrmOutPolDead": ("outbound", "policy_dead"),
    "XfrmOutPolError": ("outbound", "policy"),
    "XfrmOutStateInvalid": ("outbound", "state_invalid"),
}


def ipsec_families(
    states: Collection[XfrmState], policies: Collection[XfrmPolicy], statistics: str
) -> Iterator[MetricFamily]:
    """Yield the metrics of states, policies and errors; ``statistics`` is the text of /proc/net/xfrm_stat."""
    counts = dict(line.split() for line in statistics.splitlines())
    errors: dict[tuple[str, ...], float] = {
        labels: float(counts[name]) for name, labels in ERRORS.items() if name in counts
    }
    by_direction: dict[tuple[str, ...], float] = {("in",): 0, ("out",): 0}
    for state in states:
        by_direction[("in" if state.mark.value & KIND == DECRYPT else "out",)] += 1
    directions: dict[tuple[str, ...], float] = {(one.name.lower(),): 0 for one in Direction}
    for policy in policies:
        directions[(policy.direction.name.lower(),)] += 1
    keys = {(one.aead, one.auth, one.crypt) for one in states}
    yield gauge("cilium_ipsec_xfrm_error", "Total number of xfrm errors", errors, "type error")
    yield gauge("cilium_ipsec_keys", "Number of IPsec keys in use", len(keys))
    yield gauge("cilium_ipsec_xfrm_states", "Number of XFRM states", by_direction, "direction")
    yield gauge("cilium_ipsec_xfrm_policies", "Number of XFRM policies", directions, "direction")


def ipsec_metrics(reconciler: IpsecReconciler) -> Member[Collector]:
    """Collect XFRM states, policies and errors of the kernel."""

    async def collect() -> Iterable[MetricFamily]:
        if not reconciler.keys.enabled:
            return ()
        states, policies = await reconciler.kernel.states(), await reconciler.kernel.policies()
        statistics = await to_thread.run_sync(STATISTICS.read_text, "ascii")
        return list(ipsec_families(states, policies, statistics))

    return Collector("ipsec", collect)


def ipsec_status(keys: IpsecKeys) -> Member[StatusSection]:
    """Report the mode IPsec in the agent's status; clients read details from the kernel, as with Cilium."""

    def fill(facts: StatusFacts) -> None:
        if keys.enabled:
            facts.encryption = EncryptionStatus(mode="IPsec")

    return StatusSection(fill)


def kernel() -> XfrmEdge:
    return KernelIpsec()


@after(IpsecKeys)
def xfrm_marks(settings: IpsecSettings) -> XfrmMarks:
    """Return whether programs mark packets, once the kernel blocks marked packets that have no state."""
    return XfrmMarks(settings.enable_ipsec)


cell = group(
    module(
        "ipsec-keys",
        "Keys of IPsec, and the key that this node publishes",
        config(IpsecSettings),
        provide(IpsecKeys, PublishedKey, xfrm_marks, ipsec_status, kernel),
    ),
    module(
        "ipsec",
        "Encryption between nodes, by IPsec",
        provide(IpsecReconciler, ipsec_metrics),
        provide_private(IpsecSources),
        invoke(IpsecReconciler),
    ),
)
