"""Egress gateways: selected pods leave the cluster through a gateway node, with a stable source address.

Sources are the CiliumEgressGatewayPolicies, pods' addresses and identities in the ipcache, the cluster's
nodes and this node's devices. A job computes the tables ``egress-gateways`` and ``egress-entries`` from them,
at most once per egress-gateway-reconciliation-trigger-interval, and only after all are listed: until then no
entry is written or removed. A reconciler writes ``egress-entries`` to the map ``cilium_egress_gw_policy_v4``.
On a gateway, rp_filter of the egress devices is set to loose mode, because replies may arrive on another
device than the route to their source.
"""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from ipaddress import IPv4Address
from typing import Any, Final

from anyio import to_thread

from cells.base.metrics import Collector, features
from cells.cluster.identity.identities import Identity
from cells.cluster.identity.numbers import INIT, Scope, scope_of
from cells.cluster.ipcache.rows import IpcacheEntry, Source
from cells.cluster.nodes.node import ClusterNode
from cells.kubernetes.objects.cilium_policy import CILIUM_EGRESS_GATEWAYS, CiliumEgressGatewayPolicy
from cells.kubernetes.resources import Resources
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import EgressKey, EgressValue
from cells.maps.target import MapTarget, record
from cells.masquerade import Masquerade
from cells.masquerade.egress_policies import (
    EgressEntry,
    EgressPolicy,
    Gateway,
    GatewayLinks,
    GatewayPod,
    entries,
    gateways,
    label_map,
    read_policy,
)
from cells.netlink.connection import LOAD_BYTE, Field, message_filter, notifications, of_types
from cells.netlink.rows import list_routes
from cells.node.devices import Device
from cells.node.sysctl import Sysctls
from cells.tunnel.settings import EgressGatewayUse
from lifecycle import (
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
    UsageError,
    invoke,
    module,
    provide,
    provide_private,
    seconds,
)

__all__ = ["EgressEntry", "EgressGateways", "Gateway", "cell"]


INTERVAL: Final = seconds(30)
_MAIN_TABLE: Final = 254
_RTMGRP_IPV4_ROUTE: Final = 0x40
_RTM_NEWROUTE, _RTM_DELROUTE = 24, 25
_PREFIX_LENGTH: Final = 17  # offset of rtm_dst_len: after nlmsghdr (16 bytes) and rtm_family
_DEFAULT_ROUTES: Final = message_filter(
    (of_types(_RTM_NEWROUTE, _RTM_DELROUTE), Field(LOAD_BYTE, _PREFIX_LENGTH, (0,)))
)
_LOCAL_NODE: Final = IPv4Address(0)
"""Stands for this node's address in ipcache entries (tunnel endpoint 0.0.0.0)."""
_ONE_ADDRESS: Final = "/32"


class GatewayPods:
    """The cluster's pods that policies may select: the addresses in the ipcache.

    Pods of other clusters are never selected, although the ipcache has their addresses.
    """

    def __init__(
        self,
        ipcache: Table[str, IpcacheEntry],
        identities: Table[int, Identity],
        nodes: ReadTable[str, ClusterNode],
    ) -> None:
        self.tables: tuple[ReadTable[Any, Any], ...] = (ipcache, identities, nodes)
        """The tables that the results depend on."""
        self._ipcache, self._identities, self._nodes = ipcache, identities, nodes

    def nodes(self) -> list[ClusterNode]:
        """Return the nodes of this cluster."""
        found = self._nodes.all()
        own = {node.cluster for node in found if node.local}
        return [node for node in found if node.cluster in own]

    def node_labels(self) -> dict[IPv4Address, Mapping[str, str]]:
        """Return nodes' labels by each of their addresses; for this node also by 0.0.0.0."""
        found: dict[IPv4Address, Mapping[str, str]] = {}
        for node in self.nodes():
            own = (each.ip for each in node.addresses if isinstance(each.ip, IPv4Address))
            found |= dict.fromkeys((*own, _LOCAL_NODE) if node.local else own, node.labels)
        return found

    def selected(self, policies: Collection[EgressPolicy]) -> Iterator[GatewayPod]:
        """Yield the pods with an IPv4 address that a policy selects by the labels of their identity.

        Identities are filtered first: a cluster has many more addresses.
        """
        by_identity = {
            each.id: each.labels
            for each in self._identities.all()
            if _is_pods(each.id) and any(policy.selects(label_map(each.labels)) for policy in policies)
        }
        for row in self._ipcache.all():
            labels = by_identity.get(row.identity) if row.source is not Source.CLUSTERMESH else None
            if labels is not None and row.prefix.endswith(_ONE_ADDRESS) and ":" not in row.prefix:
                ip = IPv4Address(row.prefix.removesuffix(_ONE_ADDRESS))
                yield GatewayPod(ip, labels, row.tunnel_endpoint)


def _is_pods(identity: int) -> bool:
    return identity == INIT or scope_of(identity) in (Scope.CLUSTER, Scope.WELL_KNOWN)


class GatewayDevices:
    """This node's devices, and the device of its IPv4 default route."""

    def __init__(self, devices: Table[int, Device]) -> None:
        self.table = devices

    async def now(self) -> GatewayLinks:
        """Return the current devices. Raises NetlinkError."""
        default = await to_thread.run_sync(_default_device)  # slow: a node may have very many routes
        return GatewayLinks(self.table.all(), default)

    async def changes(self) -> AsyncIterator[None]:
        """Yield once at once, and then on each change of a default route."""
        async for hint in notifications(_RTMGRP_IPV4_ROUTE, _DEFAULT_ROUTES):
            yield hint


def _default_device() -> int:
    """Return the device index of the IPv4 default route; 0 if there is none or if the best is ambiguous."""
    routes = [
        route
        for route in list_routes(socket.AF_INET)
        if route.table == _MAIN_TABLE and not route.destination.prefixlen
    ]
    least = min((route.metric for route in routes), default=0)
    best = {route.ifindex for route in routes if route.metric == least}
    return best.pop() if len(best) == 1 else 0


class _Entries(MapTarget[EgressKey, EgressEntry, EgressValue]):
    """Writes the map; a key has the host bits of the row's current CIDR."""

    async def put(self, batch: Mapping[EgressKey, EgressEntry]) -> None:
        self.write_now({row.key: row for row in batch.values()})


class EgressGateways:
    """Computes gateways and entries from the policies. Inactive without ``enable-ipv4-egress-gateway``."""

    def __init__(
        self,
        use: EgressGatewayUse,
        pods: GatewayPods,
        resources: Resources,
        devices: GatewayDevices,
        masquerade: Masquerade,
        maps: Maps,
        sysctls: Sysctls,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        health: Health,
        log: Logger,
    ) -> None:
        if not use.served:
            return
        maps.use("egress_gateway4")
        self._pods = pods
        self._devices = devices
        self._masquerades = masquerade.ipv4
        self._sysctls = sysctls
        self._log = log
        self._health = health.child("policies")
        self._objects = resources.table(CILIUM_EGRESS_GATEWAYS)
        self._policies: dict[str, EgressPolicy] = {}
        """The last valid version of each policy by name: an invalid change leaves it active."""
        self._wrong: dict[str, str] = {}
        self._loose_devices: set[str] = set()
        self.gateways: Table[str, Gateway] = Table("egress-gateways", key=lambda row: row.policy)
        """The gateway of each policy."""
        self.entries: Table[EgressKey, EgressEntry] = Table("egress-entries", key=lambda row: row.key)
        """The wanted entries of the map."""
        self._first = self.entries.initializer("egress gateway policies")
        target = _Entries(lambda: (maps.egress_gateway4,), record(EgressKey), record(EgressValue), _value_of)
        reconciler: Reconciler[EgressKey, EgressEntry] = Reconciler(self.entries, target, full_every=INTERVAL)
        tables.add(self.gateways, self.entries, reconciler.statuses)
        lifecycle.append(Hook("check what egress gateways need", self._check))
        jobs.observe("reconcile", reconciler)
        self._timer = jobs.timer("follow policies", self._follow, math.inf, rest=use.every)
        self._sources: tuple[ReadTable[Any, Any], ...] = (*pods.tables, self._objects, devices.table)
        for table in self._sources:
            jobs.observe(f"watch {table.name}", table.changes, self._trigger)
        jobs.observe("watch default routes", devices.changes, self._trigger)

    async def _check(self) -> None:
        if not self._masquerades:
            raise UsageError(
                "enable-ipv4-egress-gateway=true: egress gateways need masquerading;"
                " set enable-ipv4=true and enable-ipv4-masquerade=true, or leave it out"
            )

    async def _trigger(self, _: object) -> None:
        self._timer.trigger()

    async def _follow(self) -> None:
        """Compute gateways and entries from scratch, once all sources are listed.

        Raises NetlinkError and HiveError.
        """
        for table in self._sources:
            await table.wait_initialized()
        policies = self._read(self._objects.all())
        chosen = gateways(policies, self._pods.nodes(), await self._devices.now())
        found = entries(policies, chosen, self._pods.selected(policies), self._pods.node_labels())
        self._report(chosen)
        with self.gateways.txn() as rows:
            rows.replace_all(chosen.values())
        with self.entries.txn() as entry_rows:
            entry_rows.replace_all(found.values())
        self._first.done()
        self._set_loose_rp_filter({each.interface for each in chosen.values() if each.interface})

    def _read(self, objects: list[CiliumEgressGatewayPolicy]) -> list[EgressPolicy]:
        """Return the active policies; for an invalid object, its last valid version."""
        names = {each.name for each in objects}
        self._policies = {name: each for name, each in self._policies.items() if name in names}
        wrong: dict[str, str] = {}
        for each in objects:
            try:
                self._policies[each.name] = read_policy(each)
            except ValueError as error:
                wrong[each.name] = str(error)
        self._wrong, before = wrong, self._wrong
        for name, text in wrong.items():
            if before.get(name) != text:
                left = "; its previous version stays active" if name in self._policies else ""
                self._log.warning(
                    f"an egress gateway policy cannot be applied{left}", policy=name, error=text
                )
        return list(self._policies.values())

    def _report(self, chosen: Mapping[str, Gateway]) -> None:
        for name, gateway in chosen.items():
            before = self.gateways.get(name)
            if gateway.wrong and (before is None or before.wrong != gateway.wrong):
                self._log.warning(
                    "this node is an egress gateway and has no address for it: packets are dropped",
                    policy=name,
                    error=gateway.wrong,
                )
        faults = self._wrong | {name: each.wrong for name, each in chosen.items() if each.wrong}
        if not faults:
            self._health.ok(f"{len(chosen)} policies are active")
            return
        name, text = next(iter(faults.items()))
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        self._health.degraded(f"{name}: {text}{more}")

    def _set_loose_rp_filter(self, devices: set[str]) -> None:
        """Set rp_filter of these devices to loose mode, to accept replies. Raises HiveError."""
        self._sysctls.release(_rp_filter_of(each) for each in self._loose_devices - devices)
        self._loose_devices = devices
        self._sysctls.enforce({_rp_filter_of(each): "2" for each in sorted(devices)})


def egress_gateway_features(use: EgressGatewayUse) -> Member[Collector]:
    """Whether egress gateways are enabled, as a feature in use."""
    return features(
        "egress-gateway-features", lambda: {"adv_connect_and_lb_egress_gateway_enabled": use.served}
    )


def _value_of(entry: EgressEntry) -> EgressValue:
    return entry.value


def _rp_filter_of(device: str) -> str:
    return f"net/ipv4/conf/{device}/rp_filter"


cell = module(
    "egress-gateway",
    "Egress gateways for selected pods",
    provide(EgressGateways, egress_gateway_features),
    provide_private(GatewayPods, GatewayDevices),
    invoke(EgressGateways),
)
