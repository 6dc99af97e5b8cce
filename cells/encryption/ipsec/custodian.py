"""The custodian of IPsec's keys: keeps states and policies of present and replaced keys in the kernel.

Controller: the tables ``nodes``, ``node-ids`` and ``ipsec-key`` in, ``ipsec`` out: states and policies.
Reconciler: ``ipsec`` in, XFRM out; ``ipsec-routes`` in, routing table 200 and its rules out; the table
            ``encryption-key`` in, ``cilium_encrypt_state`` out; ``pod-networks`` in, ``hive_pod_networks``
            out.
Why:        a key is replaced while packets encrypted with the previous one are in flight: its states and
            policies stay for a while.
Source:     Cilium 1.17, its IPsec key custodian.

Without enable-ipsec, it removes the leftovers of an agent with it at the start: states, policies, rules,
routes.
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
from cells.encryption.ipsec.key_in_force import NUMBER, GuardedNetwork, IpsecKeys, KeyInForce
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

__all__ = ["IpsecCustodian", "cell"]

SWEEP: Final = minutes(1)
INDEX: Final = Codec[int](
    lambda value: value.to_bytes(4, "little"), lambda data: int.from_bytes(data, "little")
)


# The kernel.


class KernelIpsec(XfrmKernel):
    """This node's kernel: the real :class:`XfrmEdge`."""

    async def rows(self) -> list[FwmarkRuleRow | TableRoute]:
        """Routes of the table, and rules that send marked packets to it. Raises NetlinkError, OSError."""
        return await to_thread.run_sync(read_table, RULES.values(), FAMILIES.values())

    async def set_rows(self, rows: Collection[FwmarkRuleRow | TableRoute]) -> Refusals:
        """Replace routes and rules by difference. Returns what was refused."""
        return await to_thread.run_sync(set_rows, rows, TABLE)

    async def remove_rows(self, rows: Collection[FwmarkRuleRow | TableRoute]) -> Refusals:
        """Remove routes and rules. Returns what was refused."""
        return await to_thread.run_sync(remove_rows, rows, TABLE)

    async def remove_routes(self) -> int:
        """Remove rules for marked packets and their routing table. Returns the number of both.

        A table without such a rule belongs to another program. Raises NetlinkError, OSError.
        """
        return await to_thread.run_sync(_remove_routes)


def _remove_routes() -> int:
    families = tuple(FAMILIES.values())
    rules = sum(delete_fwmark_rules(marked, families) for marked in RULES.values())
    return rules + clear_table(TABLE, families) if rules else 0


# What there is to be in it.


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
        self.numbers = numbers
        self.devices = devices
        self.mtu = mtu
        self.router = router


class ShownXfrm(msgspec.Struct, frozen=True):
    """A row of the table ``ipsec``: a state or a policy, without its key."""

    object: str


_REMOVED: Final = message_filter((of_types(*XFRM_REMOVALS),))


@after(IpsecKeys)
class IpsecCustodian:
    """Keeps states, policies and routes of all nodes, and restores what others remove.

    All remain at the stop.

    States of a new key are created first; once each was tried, the key is published and written where
    programs read its number. Those of the previous key are removed after ipsec-key-rotation-duration. Without
    enable-ipsec, its hook removes leftovers.
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
            lifecycle.append(Hook("remove what is left of IPsec", self._remove))
            return
        self._endpoint_routes = sources.router.endpoint_routes
        mode = IpsecMode(
            families=keys.families, tunnel=sources.mtu.tunnelled, endpoint_routes=self._endpoint_routes
        )
        self._planner = IpsecPlanner(mode)
        self.objects: Derived[XfrmKey, XfrmObject] = Derived(
            "ipsec-objects", self._plan, sources.nodes, sources.numbers, keys.table
        )
        routes: Derived[XfrmKey, FwmarkRuleRow | TableRoute] = Derived(
            "ipsec-routes", self._routes, sources.nodes, sources.devices
        )
        target = XfrmTarget(kernel, keys.ring, self._planned)
        self._reconciler = Reconciler(self.objects, target, full_every=SWEEP, name="ipsec", put_early=True)
        route_reconciler = Reconciler(routes, IpsecRoutes(kernel), full_every=SWEEP, put_early=True)
        numbers = keys.published.table.rekey(lambda _: 0, name="ipsec-key-number")
        number = MapTarget[int, EncryptionKey, int](
            lambda: (maps.encrypt_state,), INDEX, NUMBER, lambda row: row.number
        )
        number_reconciler = Reconciler(numbers, number, full_every=SWEEP)
        networks: Derived[IPNetwork, GuardedNetwork] = Derived("pod-networks", self._networks, sources.nodes)
        guard = Reconciler(networks, keys.guard, full_every=SWEEP, put_early=True)
        tables.add(self.objects.map(lambda one: ShownXfrm(str(one)), name="ipsec"), routes, networks)
        reconcilers = (self._reconciler, route_reconciler, number_reconciler, guard)
        tables.add(*(one.statuses for one in reconcilers))
        jobs.observe("reconcile states and policies", self._reconciler)
        jobs.observe("reconcile routes", route_reconciler)
        jobs.observe("write the number of the key", number_reconciler)
        jobs.observe("write where pods are", guard)
        jobs.observe("look for states of a new key", self._reconciler.statuses.changes, self._use)
        jobs.observe("watch the key", keys.table.changes, self._use)
        jobs.observe("wait for the end of replaced keys", keys.table.changes, self._retire)
        jobs.observe("watch removals of states and policies", self._removals, self._look)

    def _plan(
        self, nodes: list[ClusterNode], numbers: list[NodeAddressID], keys: list[KeyInForce]
    ) -> dict[XfrmKey, XfrmObject]:
        del keys  # the ring has the key itself
        local = next((node for node in nodes if node.local), None)
        by_name = {row.node: row.id for row in numbers}
        self._latest = self._planner.plan(local, nodes, by_name, self.keys.ring.current)
        return {one.key: one for one in self._latest.objects}

    def _planned(self) -> IpsecPlan:
        """The plan from the present rows of its sources."""
        self.objects.revision  # noqa: B018  # has it made anew if they have changed
        return self._latest

    def _routes(
        self, nodes: list[ClusterNode], devices: list[Device]
    ) -> dict[XfrmKey, FwmarkRuleRow | TableRoute]:
        families, mtu = self.keys.families, self._sources.mtu
        return wanted_routes(nodes, devices, families, mtu, endpoint_routes=self._endpoint_routes)

    def _networks(self, nodes: list[ClusterNode]) -> dict[IPNetwork, GuardedNetwork]:
        known = {each: GuardedNetwork(each, not node.local) for node in nodes for each in node.all_cidrs()}
        return self.keys.networks | known

    async def _removals(self) -> AsyncIterator[None]:
        async for hint in notifications(XFRM_CHANGES, _REMOVED, protocol=NETLINK_XFRM):
            yield hint

    async def _look(self, _: None) -> None:
        self._reconciler.trigger()

    async def _use(self, _: object) -> None:
        """Publish the key in force after all its states were tried."""
        if self.keys.published.number == self.keys.ring.spi:
            return
        statuses = self._reconciler.statuses
        waits = (statuses.get(key) for key in self.objects.keys())  # noqa: SIM118  # a table, not a dict
        if not any(status is None or status.state == "pending" for status in waits):
            self.keys.publish()

    async def _retire(self, _: object) -> None:
        """Remove states and policies of replaced keys when they expire."""
        while (left := self.keys.ring.next_end()) is not None:
            await anyio.sleep(left)
            self._reconciler.trigger()

    async def _remove(self) -> None:
        """Remove leftovers of an agent with IPsec; what cannot be removed is logged, as nothing uses it."""
        target = XfrmTarget(self.kernel, self.keys.ring, lambda: IpsecPlan((), ()))
        try:
            if there := await target.observe():
                await target.drop(list(there))
            routes = await self.kernel.remove_routes()
        except (OSError, BatchError) as error:
            if not isinstance(error, OSError) or error.errno not in _NO_XFRM:
                self._log.warning("failed to remove what is left of IPsec", error=str(error))
            return
        if there or routes:
            self._log.info("removed what was left of IPsec", states_and_policies=len(there), routes=routes)


_NO_XFRM: Final = frozenset((errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT))
"""Errors of a kernel without XFRM, which has nothing to remove."""


# What it shows.
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


def families_of(
    states: Collection[XfrmState], policies: Collection[XfrmPolicy], statistics: str
) -> Iterator[MetricFamily]:
    """Metrics of states and policies in the kernel; ``statistics``: the text of /proc/net/xfrm_stat."""
    counts = dict(line.split() for line in statistics.splitlines())
    errors: dict[tuple[str, ...], float] = {
        labels: float(counts[name]) for name, labels in ERRORS.items() if name in counts
    }
    ways: dict[tuple[str, ...], float] = {("in",): 0, ("out",): 0}
    for state in states:
        ways[("in" if state.mark.value & KIND == DECRYPT else "out",)] += 1
    directions: dict[tuple[str, ...], float] = {(one.name.lower(),): 0 for one in Direction}
    for policy in policies:
        directions[(policy.direction.name.lower(),)] += 1
    keys = {(one.aead, one.auth, one.crypt) for one in states}
    yield gauge("cilium_ipsec_xfrm_error", "Total number of xfrm errors", errors, "type error")
    yield gauge("cilium_ipsec_keys", "Number of IPsec keys in use", len(keys))
    yield gauge("cilium_ipsec_xfrm_states", "Number of XFRM states", ways, "direction")
    yield gauge("cilium_ipsec_xfrm_policies", "Number of XFRM policies", directions, "direction")


def ipsec_metrics(custodian: IpsecCustodian) -> Member[Collector]:
    """States, policies and errors of the kernel, as metrics."""

    async def collect() -> Iterable[MetricFamily]:
        if not custodian.keys.enabled:
            return ()
        states, policies = await custodian.kernel.states(), await custodian.kernel.policies()
        statistics = await to_thread.run_sync(STATISTICS.read_text, "ascii")
        return list(families_of(states, policies, statistics))

    return Collector("ipsec", collect)


def ipsec_status(keys: IpsecKeys) -> Member[StatusSection]:
    """That IPsec is enabled; clients read more from the kernel, as with Cilium."""

    def fill(facts: StatusFacts) -> None:
        if keys.enabled:
            facts.encryption = EncryptionStatus(mode="IPsec")

    return StatusSection(fill)


def kernel() -> XfrmEdge:
    """This node's kernel."""
    return KernelIpsec()


@after(IpsecKeys)
def xfrm_marks(settings: IpsecSettings) -> XfrmMarks:
    """Whether the datapath's programs mark packets: not before the kernel blocks marked packets without a
    state.
    """
    return XfrmMarks(settings.enable_ipsec)


@after(IpsecCustodian)
def keep() -> None:
    """Start the custodian although no other cell depends on it."""


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
        provide(IpsecCustodian, ipsec_metrics),
        provide_private(IpsecSources),
        invoke(keep),
    ),
)
