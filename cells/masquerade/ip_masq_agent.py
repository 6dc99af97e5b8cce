"""ip-masq-agent's file: networks to which pods' packets are not masqueraded.

A job watches the file's directory (inotify) and fills the table ``ip-masq-networks``; a reconciler writes it
to cilium_ipmasq_v4 and cilium_ipmasq_v6.

Source: https://github.com/kubernetes-sigs/ip-masq-agent, and Cilium 1.17's parsing of the file.
"""

from __future__ import annotations

import struct
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Final

import msgspec

from cells.config import AgentConfig
from cells.config.drift import file_changes
from cells.maps.node_maps import Maps
from cells.maps.target import BYTES, Codec, MapTarget
from cells.masquerade.devices import MasqueradeSettings
from lifecycle import Health, Hook, Jobs, Lifecycle, Logger, Reconciler, Table, Tables, seconds

__all__ = ["MasqueradedNetwork"]


IPNetwork = IPv4Network | IPv6Network

INTERVAL: Final = seconds(30)
_PREFIX: Final = struct.Struct("<I")

DEFAULTS: Final = tuple(
    map(
        ip_network,
        (
            *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "192.0.0.0/24"),
            *("192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
            "240.0.0.0/4",
        ),
    )
)
"""Without a file, or with an empty one: private and reserved IPv4 networks."""
LINK_LOCAL: Final = (ip_network("169.254.0.0/16"), ip_network("fe80::/10"))


class MasqueradedNetwork(msgspec.Struct, frozen=True):
    """A row of ``ip-masq-networks``: a network to which packets are not masqueraded."""

    network: IPNetwork


def network_table() -> Table[IPNetwork, MasqueradedNetwork]:
    """Create the ``ip-masq-networks`` table, keyed by network."""
    return Table("ip-masq-networks", key=lambda row: row.network)


class _MasqueradeFile(msgspec.Struct, rename="camel"):
    """The keys of the file that ip-masq-agent and Cilium use; both ignore others."""

    non_masquerade_cidrs: list[str] = msgspec.field(default_factory=list, name="nonMasqueradeCIDRs")
    masq_link_local: bool = False
    masq_link_local_ipv6: bool = msgspec.field(default=False, name="masqLinkLocalIPv6")


def read_networks(text: str | None) -> set[IPNetwork]:
    """Parse the file; None if there is none. Raises ValueError if it is invalid."""
    if not text:  # as in Cilium, an empty file counts as missing, and one of blanks excludes nothing
        return {*DEFAULTS, *LINK_LOCAL}
    try:
        found = msgspec.yaml.decode(text, type=_MasqueradeFile) if text.strip() else _MasqueradeFile()
    except msgspec.MsgspecError as error:
        raise ValueError(" ".join(str(error).split())) from error
    networks = set(map(_network, found.non_masquerade_cidrs))
    masqueraded = (found.masq_link_local, found.masq_link_local_ipv6)
    return networks | {network for network, masq in zip(LINK_LOCAL, masqueraded, strict=True) if not masq}


def _network(text: str) -> IPNetwork:
    """Parse a CIDR; as in Cilium, the prefix length is required. Raises ValueError."""
    _, _, length = text.partition("/")
    if not (length.isascii() and length.isdigit()):
        raise ValueError(f"nonMasqueradeCIDRs: {text!r}: expected a network such as 10.0.0.0/8")
    return ip_network(text, strict=False)


class IpMasqAgent:
    """Follows the file. An invalid file changes nothing, and marks the health as degraded."""

    def __init__(
        self,
        settings: MasqueradeSettings,
        maps: Maps,
        table: Table[IPNetwork, MasqueradedNetwork],
        agent: AgentConfig,
        *,
        lifecycle: Lifecycle,
        jobs: Jobs,
        tables: Tables,
        health: Health,
        log: Logger,
    ) -> None:
        self._path = settings.ip_masq_agent_config_path
        self._on = settings.enable_ip_masq_agent
        self._families = (4,) * agent.ipv4 + (6,) * agent.ipv6
        self._table = table
        self._log = log
        self._health = health.child("ip-masq-agent")
        self._first = table.initializer("ip-masq-agent's file")
        reconciler: Reconciler[IPNetwork, MasqueradedNetwork] = Reconciler(
            table, network_target(maps), full_every=INTERVAL
        )
        tables.add(reconciler.statuses)
        lifecycle.append(Hook("read ip-masq-agent's file", self._start))
        jobs.observe("reconcile networks", reconciler)
        if self._on:
            maps.use("ipmasq4", "ipmasq6")
            jobs.observe("watch ip-masq-agent's file", partial(file_changes, self._path), self._read_file)

    async def _start(self) -> None:
        if self._on:
            await self._read_file(None)
        else:
            self._first.done()

    async def _read_file(self, _: None) -> None:
        """Read the file. Until it is valid, entries of an earlier agent stay in the maps."""
        try:
            found = read_networks(_text(self._path))
        except (ValueError, OSError) as error:
            wrong = f"ip-masq-agent-config-path={self._path}: {error}; networks stay as they were"
            self._log.warning(wrong)
            self._health.degraded(wrong)
            return
        networks = [each for each in found if each.version in self._families]
        with self._table.txn() as rows:
            rows.replace_all(MasqueradedNetwork(each) for each in networks)
        self._first.done()
        self._health.ok(f"{len(networks)} networks are excluded from masquerading")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None


def network_target(maps: Maps) -> MapTarget[IPNetwork, MasqueradedNetwork, bytes]:
    """Create the reconciler's target of cilium_ipmasq_v4 and cilium_ipmasq_v6."""
    return MapTarget(
        lambda: (maps.ipmasq4, maps.ipmasq6),
        Codec(key_of, network_of),
        BYTES,
        lambda _: b"\1",
        which=lambda network: network.version == 6,
    )


def key_of(network: IPNetwork) -> bytes:
    """Encode the key of a network."""
    return _PREFIX.pack(network.prefixlen) + network.network_address.packed


def network_of(key: bytes) -> IPNetwork:
    """Decode a key."""
    (length,) = _PREFIX.unpack_from(key)
    return ip_network((key[_PREFIX.size :], length))
