"""The custodian of IPsec's keys: the key in force, those it has replaced, and what the kernel has of them.

Controller: the tables ``nodes``, ``node-ids`` and ``ipsec-key`` in, ``ipsec`` out: states and policies.
Reconciler: ``ipsec`` in, XFRM out; ``ipsec-routes`` in, routing table 200 and its rules out; the table
            ``encryption-key`` in, ``cilium_encrypt_state`` out; ``pod-networks`` in, ``hive_pod_networks``
            out.
Why:        a key is replaced while packets encrypted with the one before are on their way: what it made stays
            for a while. Source: Cilium 1.17, its IPsec key custodian.

Without enable-ipsec it removes at the start what an agent with it has left: states, policies, rules, routes.
"""

from __future__ import annotations

import errno
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from cells.api import EncryptionStatus, StatusFacts, StatusSection
from cells.base.addresses import Family, IPAddress, IPNetwork
from cells.base.metrics import Collector, MetricFamily, gauge
from cells.cluster.encryption import EncryptionKey, PublishedKey
from cells.cluster.node_ids import NodeAddressID
from cells.cluster.nodes.local import read_boot_id
from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig
from cells.config.drift import directory_changes
from cells.datapath.settings import XfrmMarks
from cells.encryption.ipsec.keys import (
    EXPECTED,
    IpsecKey,
    IpsecSettings,
    KeyRing,
    networks_of_pods,
    read_keys,
    refused_beside,
    wrong_file,
)
from cells.encryption.ipsec.plan import (
    DECRYPT,
    ENCRYPT,
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
    blocks,
    wanted_routes,
)
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import IpcacheKey
from cells.maps.target import Codec, MapTarget
from cells.netlink import news
from cells.netlink.network import (
    MarkedRule,
    TableRoute,
    clear_table,
    read_table,
    remove_marked,
    remove_rows,
    set_rows,
)
from cells.netlink.xfrm import (
    NETLINK_XFRM,
    XFRM_CHANGES,
    XFRM_REMOVALS,
    Direction,
    XfrmKernel,
    XfrmMark,
    XfrmPolicy,
    XfrmState,
)
from cells.node.devices import Device
from cells.node.router import Router
from cells.tunnel.settings import RouteMtu
from lifecycle import (
    BatchError,
    Derived,
    Health,
    HiveError,
    HiveView,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Member,
    ReadTable,
    Reconciler,
    Table,
    Tables,
    UsageError,
    after,
    config,
    group,
    invoke,
    minutes,
    module,
    provide,
    provide_private,
)

__all__ = ["IpsecCustodian", "IpsecKeys", "cell"]

SWEEP: Final = minutes(1)
OVERHEAD: Final = 77
"""Bytes by which a packet grows with an integrity check value of 16: in tunnel mode, with IPv6 outside."""
TRIAL: Final = {
    Family.IPV4: (ip_address("192.0.2.1"), ip_address("192.0.2.2")),
    Family.IPV6: (ip_address("2001:db8::1"), ip_address("2001:db8::2")),
}
"""Addresses for documentation (RFC 5737, RFC 3849), of a state that shows what the kernel supports."""


NUMBER: Final = Codec[int](lambda value: value.to_bytes(1), lambda data: data[0])
INDEX: Final = Codec[int](
    lambda value: value.to_bytes(4, "little"), lambda data: int.from_bytes(data, "little")
)
NETWORK: Final = Codec[IPNetwork](
    lambda network: IpcacheKey.of(network).pack(), lambda data: IpcacheKey.unpack(data).network
)


# The key file, the key that is published, and where pods are that nothing in clear text is sent to.


class GuardedNetwork(msgspec.Struct, frozen=True):
    """A row of the table ``pod-networks``: where pods have their addresses."""

    network: IPNetwork
    elsewhere: bool
    """Of other nodes, also of those that no table has yet; what this node's pods send there is encrypted."""


class KeyInForce(msgspec.Struct, frozen=True):
    """The row of the table ``ipsec-key``: the key of which states are made."""

    spi: int
    overhead: int
    """Bytes by which a packet grows."""


class IpsecKeys:
    """Read at the start, before any program marks a packet, and whenever the file changes.

    The hook raises UsageError for what cannot be beside IPsec and for a file without a good key, HiveError
    for a kernel without ESP. Then it has the kernel block what is marked, and programs what would leave in
    clear text, and publishes the key. A key that replaces another is published once there are states of it:
    see :class:`IpsecCustodian`.
    """

    def __init__(
        self,
        settings: IpsecSettings,
        agent: AgentConfig,
        kernel: XfrmEdge,
        published: PublishedKey,
        view: HiveView,
        maps: Maps,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        health: Health,
        log: Logger,
    ) -> None:
        self.enabled = settings.enable_ipsec
        """Whether packets are encrypted."""
        self.ring = KeyRing(settings.ipsec_key_rotation_duration, time.monotonic)
        self.table: Table[int, KeyInForce] = Table("ipsec-key", key=lambda row: row.spi)
        self.published = published
        self.networks: dict[IPNetwork, GuardedNetwork] = {}
        """Of all pods, as far as settings have them."""
        self.guard: MapTarget[IPNetwork, GuardedNetwork, int] = MapTarget(
            lambda: (maps.pod_networks,), NETWORK, NUMBER, lambda row: int(row.elsewhere)
        )
        """What programs know of all such networks."""
        self._settings = settings
        self._path = Path(settings.ipsec_key_file)
        self._agent = agent
        self._kernel = kernel
        self._view = view
        self._health = health.child("key file")
        self._log = log
        if not self.enabled:
            return
        maps.use("pod_networks")
        tables.add(self.table)
        lifecycle.append(Hook("load the keys of IPsec", self._start))
        if settings.enable_ipsec_key_watcher:
            jobs.observe("watch the key file", self._changes, self._reload)

    @property
    def families(self) -> tuple[Family, ...]:
        """Those of pods' addresses."""
        on = {Family.IPV4: self._agent.ipv4, Family.IPV6: self._agent.ipv6}
        return tuple(family for family in Family if on[family])

    def publish(self) -> None:
        """Have nodes and programs use the key in force."""
        for row in self.table.all():
            if self.published.number != row.spi:
                self.published.publish(EncryptionKey(row.spi, overhead=row.overhead))

    async def _start(self) -> None:
        values = {one.option.name: one.value for one in self._view.loaded.settings}
        if wrong := list(refused_beside(values, self._settings)):
            raise UsageError(f"enable-ipsec=true: {'; '.join(wrong)}")
        if not read_boot_id():
            raise HiveError("enable-ipsec=true: the kernel shows no boot ID, from which nodes' keys follow")
        try:
            self.ring.load(self._read())
        except (ValueError, OSError) as error:
            raise UsageError(f"{wrong_file(self._path, error)}; {EXPECTED}") from None
        if (key := self.ring.current) is None:
            raise UsageError(f"ipsec-key-file={self._path}: no key in it; {EXPECTED}")
        await self._try_kernel(key)
        results = await self._kernel.set_policies(blocks(self.families))
        if refused := [error for error in results if error is not None]:
            raise HiveError(f"enable-ipsec=true: failed to block what is not encrypted: {refused[0]}")
        found = (networks_of_pods(values, self._settings, family) for family in self.families)
        self.networks = {each: GuardedNetwork(each, True) for family in found for each in family}
        self.guard.write_now(self.networks)
        self._note()
        self.publish()
        self._log.info("IPsec encrypts with a key", spi=key.spi)

    async def _try_kernel(self, key: IpsecKey) -> None:
        """Add and remove a state with an output mark in each family. Raises HiveError."""
        for family in self.families:
            source, destination = TRIAL[family]
            state = XfrmState(
                source=source,
                destination=destination,
                spi=key.spi,
                mark=XfrmMark(ENCRYPT, KIND),
                output_mark=XfrmMark(ENCRYPT, KIND),
                aead=key.aead,
                auth=key.auth,
                crypt=key.crypt,
            )
            (error,) = await self._kernel.add_states([state])
            await self._kernel.delete_states([state])
            if error is not None and error.errno != errno.EEXIST:
                raise HiveError(
                    f"enable-ipsec=true: this kernel has no ESP for {family.text} with the key's algorithms:"
                    f" {error.reason or error.strerror}; load the modules esp4, esp6 and those of the"
                    " algorithms (CONFIG_INET_ESP, CONFIG_INET6_ESP, CONFIG_CRYPTO_GCM), or set it to false"
                )

    def _read(self) -> str:
        return self._path.read_text(encoding="utf-8")

    def _note(self) -> None:
        if (key := self.ring.current) is not None:
            with self.table.txn() as txn:
                txn.replace_all([KeyInForce(key.spi, OVERHEAD + key.auth_size - 16)])

    async def _changes(self) -> AsyncIterator[None]:
        async for change in directory_changes([self._path.parent]):
            yield change

    async def _reload(self, _: None) -> None:
        """Put another key of the file in force; until it has a good one, the one in force stays."""
        try:
            text = await to_thread.run_sync(self._read)
            if read_keys(text)[-1:] != (self.ring.current,):
                self.ring.load(text)
                self._log.info("the keys of IPsec were replaced", spi=self.ring.spi)
        except (ValueError, OSError) as error:
            why = wrong_file(self._path, error)
            self._log.error(f"{why}; key {self.ring.spi} stays in force")
            self._health.degraded(why)
        else:
            self._health.ok(f"key {self.ring.spi} is in force")
        self._note()


# The kernel.


class KernelIpsec(XfrmKernel):
    """This node's: the real :class:`XfrmEdge`."""

    async def rows(self) -> list[MarkedRule | TableRoute]:
        """Routes of the table, and rules that have marked packets ask it. Raises NetlinkError, OSError."""
        return await to_thread.run_sync(read_table, RULES.values(), FAMILIES.values())

    async def set_rows(self, rows: Collection[MarkedRule | TableRoute]) -> Refusals:
        """Have these; what was refused."""
        return await to_thread.run_sync(set_rows, rows, TABLE)

    async def remove_rows(self, rows: Collection[MarkedRule | TableRoute]) -> Refusals:
        """Remove these; what was refused."""
        return await to_thread.run_sync(remove_rows, rows, TABLE)

    async def remove_routes(self) -> int:
        """Remove rules for marked packets, and the table they ask; how many of both there were.

        A table that no such rule asks is another program's. Raises NetlinkError, OSError.
        """
        return await to_thread.run_sync(_remove_routes)


def _remove_routes() -> int:
    families = tuple(FAMILIES.values())
    rules = sum(remove_marked(marked, families) for marked in RULES.values())
    return rules + clear_table(TABLE, families) if rules else 0


# What there is to be in it.


class IpsecSources:
    """What states, policies and routes follow from."""

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


_REMOVED: Final = news.passing((news.kinds(*XFRM_REMOVALS),))


@after(IpsecKeys)
class IpsecCustodian:
    """Keeps states, policies and routes of all nodes; what others remove comes back. All stays at stop.

    States of another key are made first; once each was tried the key is published, and written where programs
    read its number. Those of the key before go after ipsec-key-rotation-duration.
    Without enable-ipsec its hook removes what is left of it.
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
        routes: Derived[XfrmKey, MarkedRule | TableRoute] = Derived(
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
        """The plan as its sources are now."""
        self.objects.revision  # noqa: B018  # has it made anew if they have changed
        return self._latest

    def _routes(
        self, nodes: list[ClusterNode], devices: list[Device]
    ) -> dict[XfrmKey, MarkedRule | TableRoute]:
        families, mtu = self.keys.families, self._sources.mtu
        return wanted_routes(nodes, devices, families, mtu, endpoint_routes=self._endpoint_routes)

    def _networks(self, nodes: list[ClusterNode]) -> dict[IPNetwork, GuardedNetwork]:
        known = {each: GuardedNetwork(each, not node.local) for node in nodes for each in node.all_cidrs()}
        return self.keys.networks | known

    async def _removals(self) -> AsyncIterator[None]:
        async for hint in news.hints(XFRM_CHANGES, _REMOVED, protocol=NETLINK_XFRM):
            yield hint

    async def _look(self, _: None) -> None:
        self._reconciler.trigger()

    async def _use(self, _: object) -> None:
        """Publish the key in force once all its states were tried."""
        if self.keys.published.number == self.keys.ring.spi:
            return
        statuses = self._reconciler.statuses
        waits = (statuses.get(key) for key in self.objects.keys())  # noqa: SIM118  # a table, not a dict
        if not any(status is None or status.state == "pending" for status in waits):
            self.keys.publish()

    async def _retire(self, _: object) -> None:
        """Have what replaced keys made removed when its time has come."""
        while (left := self.keys.ring.next_end()) is not None:
            await anyio.sleep(left)
            self._reconciler.trigger()

    async def _remove(self) -> None:
        """Remove what an agent with IPsec has left; what remains of it is a warning: nothing uses it."""
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
"""What a kernel without XFRM answers: it has nothing to remove."""


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
    """Of what the kernel has; ``statistics``: the text of /proc/net/xfrm_stat."""
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
    """What the kernel has, and its errors."""

    async def collect() -> Iterable[MetricFamily]:
        if not custodian.keys.enabled:
            return ()
        states, policies = await custodian.kernel.states(), await custodian.kernel.policies()
        statistics = await to_thread.run_sync(STATISTICS.read_text, "ascii")
        return list(families_of(states, policies, statistics))

    return Collector("ipsec", collect)


def ipsec_status(keys: IpsecKeys) -> Member[StatusSection]:
    """That packets are encrypted; clients ask the kernel for more, as with Cilium."""

    def fill(facts: StatusFacts) -> None:
        if keys.enabled:
            facts.encryption = EncryptionStatus(mode="IPsec")

    return StatusSection(fill)


def kernel() -> XfrmEdge:
    """This node's."""
    return KernelIpsec()


@after(IpsecKeys)
def xfrm_marks(settings: IpsecSettings) -> XfrmMarks:
    """Whether the datapath's programs mark packets: not before the kernel blocks what is not encrypted."""
    return XfrmMarks(settings.enable_ipsec)


@after(IpsecCustodian)
def keep() -> None:
    """The custodian is part of the agent though no cell depends on it."""


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
