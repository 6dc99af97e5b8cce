"""Read IPsec's key file, test the key with the kernel, and publish the active key.

Input:  the key file, as a Secret mounts it.
Output: the table ``ipsec-key``; policies that block marked packets; pod networks known from settings.
Why:    the kernel blocks marked packets before programs mark packets, so none leaves in clear text.
Source: Cilium 1.17, IPsec transparent encryption.
"""

from __future__ import annotations

import errno
import time
from collections.abc import AsyncIterator
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import msgspec
from anyio import to_thread

from cells.base.addresses import Family, IPNetwork
from cells.cluster.encryption import EncryptionKey, PublishedKey
from cells.cluster.nodes.local import read_boot_id
from cells.config import AgentConfig
from cells.config.drift import directory_changes
from cells.encryption.ipsec.keys import (
    EXPECTED,
    IpsecKey,
    IpsecSettings,
    KeyRing,
    cluster_pod_networks,
    incompatible_settings,
    key_file_error,
    read_keys,
)
from cells.encryption.ipsec.plan import (
    ENCRYPT,
    KIND,
    XfrmEdge,
    blocks,
)
from cells.maps.node_maps import Maps
from cells.maps.records.cluster import IpcacheKey
from cells.maps.target import Codec, MapTarget
from cells.netlink.xfrm import (
    XfrmMark,
    XfrmState,
)
from lifecycle import (
    Health,
    HiveError,
    HiveView,
    Hook,
    Jobs,
    Lifecycle,
    Logger,
    Table,
    Tables,
    UsageError,
)

__all__ = ["NUMBER", "ActiveIpsecKey", "IpsecKeys", "PodNetworkRow"]

OVERHEAD: Final = 77
"""Bytes that ESP adds to a packet in tunnel mode over IPv6, with an ICV of 16 bytes."""
PROBE_ADDRESSES: Final = {
    Family.IPV4: (ip_address("192.0.2.1"), ip_address("192.0.2.2")),
    Family.IPV6: (ip_address("2001:db8::1"), ip_address("2001:db8::2")),
}
"""Documentation addresses (RFC 5737, RFC 3849) of the state that tests the kernel's support."""
NUMBER: Final = Codec[int](lambda value: value.to_bytes(1), lambda data: data[0])
NETWORK: Final = Codec[IPNetwork](
    lambda network: IpcacheKey.of(network).pack(), lambda data: IpcacheKey.unpack(data).network
)


class PodNetworkRow(msgspec.Struct, frozen=True):
    """A row of the table ``pod-networks``: a network of pods."""

    network: IPNetwork
    remote: bool
    """Whether it belongs to other nodes, known or not; packets from this node's pods to it are encrypted."""


class ActiveIpsecKey(msgspec.Struct, frozen=True):
    """The row of the table ``ipsec-key``: the key with which states are created."""

    spi: int
    overhead: int
    """Bytes that encryption adds to a packet."""


class IpsecKeys:
    """Loads the key at the start, before any program marks packets, and again when the file changes.

    The hook raises UsageError for incompatible settings and for a file without a valid key, HiveError for a
    kernel without ESP. It then adds the policies that block marked packets, writes the pod networks to which
    programs drop packets in clear text, and publishes the key. A new key of a rotation is published once its
    states exist: see :class:`IpsecReconciler`.
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
        """Whether enable-ipsec is set."""
        self.ring = KeyRing(settings.ipsec_key_rotation_duration, time.monotonic)
        self.table: Table[int, ActiveIpsecKey] = Table("ipsec-key", key=lambda row: row.spi)
        self.published = published
        self.networks: dict[IPNetwork, PodNetworkRow] = {}
        """Pod networks of the whole cluster, as far as settings contain them."""
        self.pod_network_target: MapTarget[IPNetwork, PodNetworkRow, int] = MapTarget(
            lambda: (maps.pod_networks,), NETWORK, NUMBER, lambda row: int(row.remote)
        )
        """Target for ``hive_pod_networks``, the map in which programs look up pod networks."""
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
        """The enabled address families of pods."""
        on = {Family.IPV4: self._agent.ipv4, Family.IPV6: self._agent.ipv6}
        return tuple(family for family in Family if on[family])

    def publish(self) -> None:
        """Publish the active key to other nodes and to programs."""
        for row in self.table.all():
            if self.published.number != row.spi:
                self.published.publish(EncryptionKey(row.spi, overhead=row.overhead))

    async def _start(self) -> None:
        values = {one.option.name: one.value for one in self._view.loaded.settings}
        if wrong := list(incompatible_settings(values, self._settings)):
            raise UsageError(f"enable-ipsec=true: {'; '.join(wrong)}")
        if not read_boot_id():
            raise HiveError(
                "enable-ipsec=true: the kernel has no boot ID, from which the keys of nodes are derived"
            )
        try:
            self.ring.load(self._read())
        except (ValueError, OSError) as error:
            raise UsageError(f"{key_file_error(self._path, error)}; {EXPECTED}") from None
        if (key := self.ring.current) is None:
            raise UsageError(f"ipsec-key-file={self._path}: no key in it; {EXPECTED}")
        await self._probe_kernel(key)
        results = await self._kernel.set_policies(blocks(self.families))
        if refused := [error for error in results if error is not None]:
            raise HiveError(f"enable-ipsec=true: failed to block unencrypted packets: {refused[0]}")
        found = (cluster_pod_networks(values, self._settings, family) for family in self.families)
        self.networks = {each: PodNetworkRow(each, True) for family in found for each in family}
        self.pod_network_target.write_now(self.networks)
        self._update_table()
        self.publish()
        self._log.info("IPsec key is active", spi=key.spi)

    async def _probe_kernel(self, key: IpsecKey) -> None:
        """Add and delete a state with an output mark for each family. Raises HiveError for a rejected one."""
        for family in self.families:
            source, destination = PROBE_ADDRESSES[family]
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

    def _update_table(self) -> None:
        if (key := self.ring.current) is not None:
            with self.table.txn() as txn:
                txn.replace_all([ActiveIpsecKey(key.spi, OVERHEAD + key.auth_size - 16)])

    async def _changes(self) -> AsyncIterator[None]:
        async for change in directory_changes([self._path.parent]):
            yield change

    async def _reload(self, _: None) -> None:
        """Activate the last key of the changed file; if the file is invalid, keep the active key."""
        try:
            text = await to_thread.run_sync(self._read)
            if read_keys(text)[-1:] != (self.ring.current,):
                self.ring.load(text)
                self._log.info("IPsec key was replaced", spi=self.ring.spi)
        except (ValueError, OSError) as error:
            why = key_file_error(self._path, error)
            self._log.error(f"{why}; key {self.ring.spi} stays active")
            self._health.degraded(why)
        else:
            self._health.ok(f"key {self.ring.spi} is active")
        self._update_table()
