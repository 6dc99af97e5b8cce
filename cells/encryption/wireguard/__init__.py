"""WireGuard between nodes: encrypt packets from pods to pods of other nodes.

Input:  the tables ``nodes`` and ``ipcache``.
Output: the device ``cilium_wg0`` with a peer per remote node that publishes a key, and its allowed IPs.
Why:    programs decide which packets are encrypted (bpf/netdev/encrypt.h). A packet without a peer is
        dropped, not sent in clear text.
Source: Cilium 1.17, pkg/wireguard/agent.

Settings: see EncryptionSettings.
"""

from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import anyio
from anyio import to_thread

from cells.api import (
    NEVER,
    EncryptionStatus,
    StatusFacts,
    StatusSection,
    WireguardInterface,
    WireguardPeerStatus,
    WireguardStatus,
    rfc3339,
)
from cells.api.operations import ApiPart, Route
from cells.api.wire import answer
from cells.base.addresses import Family
from cells.base.metrics import Collector, MetricFamily, counter, features, gauge
from cells.base.processes import exit_text, process_ended
from cells.cluster.encryption import (
    UNANNOUNCED_KEY,
    WIREGUARD_KEY,
    WIREGUARD_LINK,
    WIREGUARD_PORT,
    ClusterEncryption,
    EncryptionKey,
    PublishedKey,
)
from cells.cluster.ipcache.rows import IpcacheEntry
from cells.cluster.nodes.node import ClusterNode
from cells.config import AgentConfig
from cells.datapath.datapath import Datapath
from cells.encryption.ipsec.active_key import IpsecKeys
from cells.encryption.wireguard.device import WireguardDevice
from cells.encryption.wireguard.peers import PeerError, PeerNode, WireguardPeers
from cells.encryption.wireguard.rotation import RotationRefusedError, WireguardRotation
from cells.encryption.wireguard.settings import EncryptionSettings, WireguardKey
from cells.node.devices import Device
from cells.node.sysctl import Sysctls
from cells.tunnel.settings import PodTunnel
from lifecycle import (
    Change,
    Health,
    HiveError,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Member,
    ReadTable,
    Table,
    UsageError,
    after,
    config,
    group,
    invoke,
    module,
    provide,
    provide_private,
    seconds,
)
from lifecycle.http import Request, Response

__all__ = ["WireguardAgent", "cell"]

INTERVAL: Final = seconds(30)
"""Interval of comparisons with the device, in addition to those at changes of links."""
NOTHING: Final = ClusterEncryption()
SYSCTLS: Final = {f"net/ipv4/conf/{WIREGUARD_LINK}/rp_filter": "0"}
"""Disable reverse path filtering on the device: decrypted packets have no return route over it."""


def cluster_encryption(settings: EncryptionSettings, ipsec: IpsecKeys) -> ClusterEncryption:
    """Return the encryption mode of the cluster by settings."""
    if ipsec.enabled:
        return ClusterEncryption(UNANNOUNCED_KEY)
    return ClusterEncryption(WIREGUARD_KEY, settings.encrypt_node) if settings.enable_wireguard else NOTHING


def encryption_features(settings: EncryptionSettings, ipsec: IpsecKeys) -> Member[Collector]:
    """Report the feature metric of encryption; IPsec encrypts only packets of pods."""
    mode = "ipsec" if ipsec.enabled else "wireguard" if settings.enable_wireguard else ""
    value = (mode, "true" if settings.encrypt_node else "false") if mode else ""
    return features("encryption-features", lambda: {"adv_connect_and_lb_transparent_encryption": value})


@after(WireguardKey, IpsecKeys)
def encryption_key(published: PublishedKey) -> Table[str, EncryptionKey]:
    """Return the table ``encryption-key`` after the key, if any, was published."""
    return published.table


class WireguardSources:
    """The tables from which peers are computed."""

    def __init__(
        self,
        nodes: ReadTable[str, ClusterNode],
        prefixes: Table[str, IpcacheEntry],
        devices: Table[int, Device],
    ) -> None:
        self.nodes = nodes
        self.prefixes = prefixes
        self.devices = devices

    async def wait_initialized(self) -> None:
        """Wait until the initial nodes and prefixes are known."""
        await self.nodes.wait_initialized()
        await self.prefixes.wait_initialized()


class WireguardAgent:
    """Creates the device before the node accepts pods, and reconciles its peers.

    Device and peers remain when the agent stops. Nothing is removed from the device before all nodes and
    prefixes are known. With enable-wireguard=false, the hook removes the devices of an earlier agent. Raises
    HiveError if the node does not support WireGuard.
    """

    def __init__(
        self,
        key: WireguardKey,
        device: WireguardDevice,
        sources: WireguardSources,
        datapath: Datapath,
        sysctls: Sysctls,
        peers: WireguardPeers,
        rotation: WireguardRotation,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        health: Health,
        log: Logger,
    ) -> None:
        self.settings = settings = key.settings
        self._key = key
        self._device = device
        self._sources = sources
        self._datapath = datapath
        self._sysctls = sysctls
        self._health = health.child("peers")
        self._log = log
        self._peers = peers
        self._rotation = rotation
        self._changed_prefixes: deque[Change[str, IpcacheEntry]] = deque()
        self._pending_nodes: dict[str, PeerNode | None] = {}
        """Changed or rejected nodes; None for a deleted node."""
        self._refused: dict[str, str] = {}
        self._all_known = False
        self._recreated = anyio.Event()
        """Set when the device was created again."""
        self._compared = 0.0
        self._device_error = ""
        """The last error of the device; empty if none."""
        lifecycle.append(Hook("set up WireGuard", self._start))
        if settings.enable_wireguard:
            self._timer = jobs.timer("reconcile", self._reconcile, INTERVAL)
            jobs.observe("watch nodes", sources.nodes.changes, self._queue_nodes)
            jobs.observe("watch prefixes", sources.prefixes.changes, self._queue_prefixes)
            jobs.observe("watch devices", sources.devices.changes, self._trigger_comparison)
            jobs.one_shot("wait for all nodes", self._start_when_known)
            jobs.one_shot("watch wireguard-go", self._watch_program)

    # Changes of sources

    async def _queue_nodes(self, changes: Iterable[Change[str, ClusterNode]]) -> None:
        for change in changes:
            node = change.row or change.old
            if node is None:
                continue
            if change.row is None:
                self._rotation.forget(node.full_name)
            else:
                self._rotation.note(node)
            other = change.row is not None and not node.local
            self._pending_nodes[node.full_name] = peer_of(node) if other else None
        self._timer.trigger()

    async def _queue_prefixes(self, changes: Iterable[Change[str, IpcacheEntry]]) -> None:
        self._changed_prefixes.extend(changes)
        self._timer.trigger()

    async def _trigger_comparison(self, _: object) -> None:
        self._compared = 0.0
        self._timer.trigger()

    async def _start_when_known(self) -> None:
        await self._sources.wait_initialized()
        self._all_known = True
        self._rotation.start()
        await self._trigger_comparison(None)

    async def _watch_program(self) -> None:
        """Restart wireguard-go when it ends."""
        while True:
            if pid := self._device.program.pid:
                await process_ended(pid)
                self._log.error(f"wireguard-go ended, pid {pid}{exit_text(pid)}: restarting it")
                await self._trigger_comparison(None)
            await self._recreated.wait()
            self._recreated = anyio.Event()

    # Reconciliation

    async def _start(self) -> None:
        if not self.settings.enable_wireguard:
            await to_thread.run_sync(self._device.remove)
            return
        if self.settings.encrypt_node and self._datapath.accelerates:
            raise UsageError(
                "encrypt-node=true: programs in devices' drivers would send past it; set"
                " bpf-lb-acceleration=disabled, or encrypt-node=false"
            )
        try:
            await to_thread.run_sync(self._device.ensure)
        except (OSError, HiveError) as error:
            raise HiveError(f"failed to initialize WireGuard agent: {error}") from error
        self._sysctls.enforce(SYSCTLS)

    async def _reconcile(self) -> None:
        """Apply pending changes. Raises errors of the device; the job repeats it."""
        async with self._device.lock:
            await self._apply_changes()
        self._device_error = ""
        self._rotation.look()
        self._report()

    async def _apply_changes(self) -> None:
        now = time.monotonic()
        compare = not self._compared or now - self._compared >= INTERVAL
        try:
            made = compare and await to_thread.run_sync(self._device.ensure)
            if made:
                self._sysctls.enforce(SYSCTLS)
                self._recreated.set()
            changes = list(self._changed_prefixes)
            self._changed_prefixes.clear()
            pending = dict(self._pending_nodes)
            done, failed = await to_thread.run_sync(self._apply, changes, pending)
            for name in done:
                if self._pending_nodes.get(name) is pending[name]:  # unless it has changed again meanwhile
                    del self._pending_nodes[name]
            if failed is not None:
                raise failed
            if made or (compare and self._all_known):
                restored = await to_thread.run_sync(self._peers.restore_changed)
                self._compared = now
                if restored:
                    self._log.info("peers of WireGuard restored", count=restored)
        except (OSError, HiveError) as error:
            self._compared = 0.0
            self._device_error = str(error)
            raise

    def _apply(
        self, changes: Collection[Change[str, IpcacheEntry]], nodes: Mapping[str, PeerNode | None]
    ) -> tuple[list[str], OSError | None]:
        """Apply prefixes, then nodes, so that a new peer has all its prefixes at once.

        Returns done and failed nodes.

        Runs in a worker thread.
        """
        done: list[str] = []
        failed: OSError | None = None
        for change in changes:
            row = change.row or change.old
            if row is None:
                continue
            host = row.tunnel_endpoint if change.row is not None and int(row.tunnel_endpoint) else None
            try:
                self._peers.prefix_upserted(row.network, host)
            except OSError as error:  # the peer retries the remaining calls
                failed = error
        for name, node in nodes.items():
            try:
                if node is not None:
                    self._peers.upsert(node)
                elif name in self._peers:
                    self._peers.delete(name)
            except PeerError as error:
                self._refuse(name, str(error))
            except OSError as error:
                failed = error
            else:
                done.append(name)
                self._refused.pop(name, None)
        return done, failed

    def _refuse(self, name: str, why: str) -> None:
        if self._refused.get(name) != why:
            self._refused[name] = why
            self._log.warning("Failed to update WireGuard configuration for peer", node=name, error=why)

    def _report(self) -> None:
        if self._refused:
            name, why = next(iter(self._refused.items()))
            self._health.degraded(f"{len(self._refused)} nodes cannot be encrypted to; {name}: {why}")
        else:
            self._health.ok(f"{len(self._peers)} peers, MTU {self._device.mtu}")

    # Status and metrics

    def status(self) -> EncryptionStatus:
        """WireGuard's part of the agent's status, with peers by the last comparison."""
        if self._device_error:
            msg = f"failed to get device: {self._device_error}"
            return EncryptionStatus(mode="Wireguard", msg=msg, wireguard=WireguardStatus())
        nodes = "Disabled"
        if self.settings.encrypt_node:
            nodes = "OptedOut" if self._key.opted_out else "Enabled"
        peers = [
            WireguardPeerStatus(
                public_key=base64.b64encode(key).decode(),
                endpoint=peer.endpoint,
                last_handshake_time=rfc3339(peer.handshake) if peer.handshake else NEVER,
                allowed_ips=sorted(map(str, peer.allowed)),
                transfer_tx=peer.sent,
                transfer_rx=peer.received,
            )
            for key, peer in self._device.state.peers.items()
        ]
        interface = WireguardInterface(
            name=WIREGUARD_LINK,
            listen_port=WIREGUARD_PORT,
            public_key=self._key.public,
            peer_count=len(self._peers),
            peers=peers,
        )
        return EncryptionStatus(
            mode="Wireguard", wireguard=WireguardStatus(node_encryption=nodes, interfaces=[interface])
        )

    def collect(self) -> list[MetricFamily]:
        """Number of peers, and bytes received from and sent to them."""
        if not self.settings.enable_wireguard:
            return []
        peers = self._device.state.peers.values()
        sums = {"sent": sum(one.sent for one in peers), "received": sum(one.received for one in peers)}
        return [
            gauge("hive_wireguard_peers", "Other nodes that this one encrypts to", len(self._peers)),
            gauge("hive_wireguard_refused_nodes", "Nodes that cannot be encrypted to", len(self._refused)),
            gauge(
                "hive_wireguard_rotation_nodes",
                "Other nodes that a rotation of this node's key waits for",
                len(self._rotation.state().waits_for),
            ),
            counter(
                "hive_wireguard_bytes_total",
                "Bytes of encrypted packets to and from present peers",
                {(direction,): total for direction, total in sums.items()},
                "direction",
            ),
        ]


def wireguard_peers(
    key: WireguardKey, device: WireguardDevice, agent: AgentConfig, tunnel: PodTunnel
) -> WireguardPeers:
    """Peers of cilium_wg0: endpoints have an address of an enabled family, in tunnel mode IPv4.

    The other family is used for nodes without such an address, and for packets between nodes.
    """
    on = {Family.IPV4: agent.ipv4 or tunnel.used, Family.IPV6: agent.ipv6}
    families = frozenset(family for family in Family if on[family])
    keepalive = key.settings.wireguard_persistent_keepalive
    return WireguardPeers(device, families, keepalive, others=frozenset(Family) - families)


def peer_of(node: ClusterNode) -> PeerNode:
    """Return the part of a node on which its peer depends."""
    addresses = {family: ip for family in Family if (ip := node.node_ip(family)) is not None}
    return PeerNode(node.full_name, node.wireguard_key, addresses, frozenset(node.all_cidrs()))


def encryption_status(wireguard: WireguardAgent) -> Member[StatusSection]:
    """The state of encryption, for the agent's status."""

    def fill(facts: StatusFacts) -> None:
        if wireguard.settings.enable_wireguard:
            facts.encryption = wireguard.status()

    return StatusSection(fill)


def rotation_part(rotation: WireguardRotation) -> Member[ApiPart]:
    """GET and POST /encryption/rotation: show, or begin, a rotation of this node's key."""

    async def show(_: Request) -> Response:
        return answer(200, rotation.state())

    async def begin(_: Request) -> Response:
        try:
            return answer(200, await rotation.begin())
        except RotationRefusedError as error:
            return answer(409, str(error))
        except OSError as error:
            return answer(500, f"the next key cannot be written: {error}")

    path = "/encryption/rotation"
    return ApiPart("encryption-rotation", [Route("GET", path, show), Route("POST", path, begin)])


def wireguard_metrics(wireguard: WireguardAgent) -> Member[Collector]:
    """Number of peers and transferred bytes."""

    async def collect() -> Iterable[MetricFamily]:
        return wireguard.collect()

    return Collector("wireguard", collect)


cell = group(
    module(
        "encryption",
        "What is encrypted between nodes, and this node's key",
        config(EncryptionSettings),
        provide(cluster_encryption, encryption_features, encryption_key, WireguardKey),
    ),
    module(
        "wireguard",
        "Encryption between nodes, by WireGuard",
        provide(encryption_status, rotation_part, wireguard_metrics),
        provide_private(
            *(WireguardDevice, wireguard_peers, WireguardSources, WireguardRotation, WireguardAgent),
        ),
        invoke(WireguardAgent),
    ),
)
