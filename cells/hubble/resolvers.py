"""Resolver of flows from the agent's tables, with a snapshot of the names at the time of an event.

A client may read a flow long after its event. Therefore ``EventSources`` stores a SnapshotResolver with each
datapath record: it is created for the first event between two addresses, and shared by later ones until one
of the agent's tables changes.

Socket traces contain only the cgroup id of the process. open_by_handle_at(2) accepts the id as a file handle
(FILEID_KERNFS), and the path of the cgroup contains the pod's UID as kubelet writes it:
``kubepods/burstable/pod<uid>``, or ``kubepods-burstable-pod<uid>.slice`` with underscores in the UID.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cells.cluster.ipcache.rows import prefix_of
from cells.endpoint import Endpoint
from cells.hubble.codec import share
from cells.hubble.flow import FlowEndpoint, FlowService, Workload
from cells.hubble.hubble import KnownNames
from cells.hubble.parser import EventError, Parser, Stamp
from cells.hubble.parser.resolver import DecidingRules, EntryKey, LocalEndpoint, Resolver, workload_of
from cells.observe.events import Sample
from cells.services import FrontendKey
from cells.services.control import ServedFrontend
from lifecycle import Change, NotStartedError

_MAX_SNAPSHOTS: Final = 1 << 16
_NO_STAMP: Final = Stamp(0, "")
MOUNTS: Final = Path("/proc/self/mountinfo")
_FILEID_KERNFS = 0xFE
_UID = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?")


class FrontendIndex:
    """Index of services by frontend address; the table ``services`` has no index without the port."""

    def __init__(self) -> None:
        self.revision = 0
        self._services: dict[str, dict[Hashable, tuple[int, FlowService]]] = {}

    def follow(self, changes: Sequence[Change[FrontendKey, ServedFrontend]]) -> None:
        """Apply changes of the table ``services``."""
        self.revision += 1
        for change in changes:
            row = change.row or change.old
            if row is None or row.key.address.is_wildcard:
                continue
            text = str(row.key.address.ip)
            if change.deleted:
                known = self._services.get(text, {})
                known.pop(change.key, None)
                if not known:
                    self._services.pop(text, None)
                continue
            name = row.frontend.service
            service = share(FlowService(name=name.name, namespace=name.namespace))
            self._services.setdefault(text, {})[change.key] = row.key.address.port, service

    def at(self, address: str) -> Mapping[int, FlowService]:
        """Return the services of an address, by port."""
        return dict(self._services.get(address, {}).values())


class AgentResolver(Resolver):
    """Resolves names from the current rows of the agent's tables."""

    def __init__(self, tables: KnownNames, frontends: FrontendIndex) -> None:
        super().__init__()
        self._tables = tables
        self._by_name = tables.endpoints.by("name")
        self._frontends = frontends

    def local_endpoint(self, address: str) -> LocalEndpoint | None:
        """See Resolver."""
        family = 6 if ":" in address else 4
        row = next(iter(self._by_name.get(f"ipv{family}:{address}")), None)
        return None if row is None else self._local(row)

    def endpoint(self, number: int) -> LocalEndpoint | None:
        """See Resolver."""
        row = self._tables.endpoints.get(number)
        return None if row is None else self._local(row)

    def _local(self, row: Endpoint) -> LocalEndpoint:
        return LocalEndpoint(
            row.id,
            row.identity,
            row.pod_namespace,
            row.pod_name,
            row.labels,
            self._workload(row.pod_namespace, row.pod_name),
        )

    def _workload(self, namespace: str, name: str) -> Workload | None:
        pod = self._tables.pods.get((namespace, name)) if name else None
        if pod is None:
            return None
        owners = pod.metadata.owner_references or ()
        # Static pods are owned by their Node and have no workload; other controlled pods have a generateName.
        owner = next(((one.kind, one.name) for one in owners if one.controller and one.kind != "Node"), None)
        return workload_of(pod.name, owner, pod.labels)

    def identity_at(self, address: str) -> int:
        """See Resolver."""
        try:
            return self._tables.ipcache.identity_at(ip_address(address))
        except (OSError, NotStartedError):  # the ipcache map cannot be read, or is not open yet
            return 0

    def pod_at(self, address: str) -> tuple[str, str]:
        """See Resolver."""
        row = self._tables.ipcache.table.get(prefix_of(ip_address(address)))
        if row is not None and row.pod is not None:
            return row.pod
        local = self.local_endpoint(address)
        return (local.namespace, local.pod_name) if local is not None else ("", "")

    def labels_of(self, identity: int) -> Sequence[str]:
        """See Resolver."""
        row = self._tables.identities.get(identity)
        return () if row is None else row.labels

    def service_at(self, address: str, port: int) -> FlowService | None:
        """See Resolver."""
        return self._frontends.at(address).get(port)

    def services_at(self, address: str) -> Mapping[int, FlowService]:
        """Return all services of an address, by port."""
        return self._frontends.at(address)

    def names_at(self, endpoint: int, address: str) -> Sequence[str]:
        """See Resolver."""
        known = self._tables.names.of.get(endpoint)
        if known is None:
            return ()
        wanted = ip_address(address)
        return tuple(sorted({name.removesuffix(".") for name, one in known.pairs() if one == wanted}))

    def link_name(self, index: int) -> str:
        """See Resolver."""
        try:
            return socket.if_indextoname(index)
        except OSError:
            return ""

    def addresses_of_cgroup(self, cgroup: int) -> Sequence[str]:
        """See Resolver."""
        if not (uid := pod_of_cgroup(cgroup)):
            return ()
        endpoints = (row for row in self._tables.endpoints.all() if row.pod_uid == uid)
        return [str(address) for row in endpoints for address in row.addresses]

    def rules(self, endpoint: int, entry: EntryKey, address: str, *, egress: bool) -> DecidingRules | None:
        """See Resolver."""
        if (view := self._tables.policies) is None:
            return None
        try:
            match = view.decide(
                endpoint,
                "egress" if egress else "ingress",
                entry.identity,
                entry.protocol,
                entry.port or 0,
                address=ip_address(address) if address else None,
            )
        except (OSError, NotStartedError):  # the ipcache map cannot be read, or is not open yet
            return None
        if match.entry is None:
            return None
        return DecidingRules([origin.labels for origin in match.entry.origins], view.revision)


class SnapshotResolver(Resolver):
    """Caches the lookups for events between two addresses, as of the first of these events.

    The first event is parsed once when it arrives, which fills the caches.
    """

    def __init__(self, resolver: AgentResolver) -> None:
        super().__init__()
        self._resolver = resolver
        self._names: dict[tuple[int, str], Sequence[str]] = {}
        self._services: dict[str, Mapping[int, FlowService]] = {}
        self._links: dict[int, str] = {}

    def _party(self, address: str, identity: int) -> FlowEndpoint:
        return self._resolver.party(address, identity)

    def local_endpoint(self, address: str) -> LocalEndpoint | None:
        """See Resolver."""
        return self._resolver.local_endpoint(address)

    def endpoint(self, number: int) -> LocalEndpoint | None:
        """See Resolver."""
        return self._resolver.endpoint(number)

    def identity_at(self, address: str) -> int:
        """See Resolver."""
        return self._resolver.identity_at(address)

    def pod_at(self, address: str) -> tuple[str, str]:
        """See Resolver."""
        return self._resolver.pod_at(address)

    def labels_of(self, identity: int) -> Sequence[str]:
        """See Resolver."""
        return self._resolver.labels_of(identity)

    def service_at(self, address: str, port: int) -> FlowService | None:
        """See Resolver."""
        services = self._services.get(address)
        if services is None:
            services = self._services[address] = self._resolver.services_at(address)
        return services.get(port)

    def names_at(self, endpoint: int, address: str) -> Sequence[str]:
        """See Resolver."""
        key = endpoint, address
        names = self._names.get(key)
        if names is None:
            names = self._names[key] = self._resolver.names_at(endpoint, address)
        return names

    def link_name(self, index: int) -> str:
        """See Resolver."""
        name = self._links.get(index)
        if name is None:
            name = self._links[index] = self._resolver.link_name(index)
        return name

    def addresses_of_cgroup(self, cgroup: int) -> Sequence[str]:
        """See Resolver."""
        return self._resolver.addresses_of_cgroup(cgroup)

    def rules(self, endpoint: int, entry: EntryKey, address: str, *, egress: bool) -> DecidingRules | None:
        """See Resolver."""
        return self._resolver.rules(endpoint, entry, address, egress=egress)


def _party_key(header: int, fixed: slice) -> Callable[[bytes], bytes]:
    """Return a function that extracts the parties of a record: header fields and the packet's addresses."""

    def key(data: bytes) -> bytes:
        if data[header + 12 : header + 14] == b"\x08\x00":
            return data[fixed] + data[header + 26 : header + 34]
        return data[fixed] + data[header + 12 : header + 14] + data[header + 22 : header + 54]

    return key


def _trace_key(data: bytes) -> bytes:
    return _TRACE_V1(data) + data[32:48] if data[14:16] == b"\1\0" else _TRACE_V0(data)


def _sock_key(data: bytes) -> bytes:
    return data[2:18] + data[28:36]


_TRACE_V0: Final = _party_key(32, slice(16, 24))
_TRACE_V1: Final = _party_key(48, slice(16, 24))
_KEYS: Final[dict[int, Callable[[bytes], bytes]]] = {
    1: _party_key(36, slice(16, 24)),
    3: _party_key(24, slice(0, 1)),
    4: _trace_key,
    5: _party_key(32, slice(16, 20)),
    7: _sock_key,
}


class ResolverSnapshots:
    """Returns a resolver for each record; resolvers are shared until one of the tables changes."""

    def __init__(self, tables: KnownNames, frontends: FrontendIndex, parser: Parser) -> None:
        self._tables = tables
        self._frontends = frontends
        self._parser = parser
        self._revisions: tuple[int, ...] = ()
        self._snapshots: dict[tuple[int, bytes], SnapshotResolver] = {}
        self.current = AgentResolver(tables, frontends)
        """Resolves names from the current tables."""

    def refresh(self) -> None:
        """Discard all snapshots if a table has changed; called before each batch of events."""
        tables = self._tables
        revisions = (
            tables.endpoints.revision,
            tables.identities.revision,
            tables.ipcache.table.revision,
            tables.pods.revision,
            self._frontends.revision,
            tables.names.revision,
        )
        if revisions != self._revisions:
            self._revisions = revisions
            self._invalidate()

    def _invalidate(self) -> None:
        self._snapshots = {}
        self.current = AgentResolver(self._tables, self._frontends)

    def of(self, sample: Sample) -> SnapshotResolver:
        """Return the resolver for a record's parties; create and fill it for the first record."""
        data = sample.data
        party_key = _KEYS.get(data[0]) if data else None
        key = data[0] if data else 0, party_key(data) if party_key is not None else b""
        snapshot = self._snapshots.get(key)
        if snapshot is None:
            if len(self._snapshots) >= _MAX_SNAPSHOTS:
                self._invalidate()
            snapshot = self._snapshots[key] = SnapshotResolver(self.current)
            if party_key is not None:
                self._populate(sample, snapshot)
        return snapshot

    def _populate(self, sample: Sample, snapshot: SnapshotResolver) -> None:
        """Parse a record once, so that the snapshot caches the names of its flow."""
        try:
            self._parser.read(sample.data, sample.cpu, _NO_STAMP, snapshot)
        except EventError:
            return


def cgroup2_mount(mounts: str) -> str:
    """Return the mount point of cgroup v2 from the contents of mountinfo; empty if it is not mounted."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return before.split()[4]
    return ""


def pod_uid(path: str) -> str:
    """Return the pod's UID from the path of a cgroup; empty for cgroups outside pods."""
    for part in path.split("/"):
        if part.startswith(("pod", "kubepods")) and (match := _UID.search(part)):
            return match[1].replace("_", "-")
    return ""


@lru_cache(maxsize=4096)
def pod_of_cgroup(number: int) -> str:
    """Return the UID of the pod of a cgroup; empty if the cgroup does not exist or has no pod."""
    root = cgroup2_mount(MOUNTS.read_text())
    return pod_uid(cgroup_path(root, number)) if root else ""


def cgroup_path(root: str, number: int) -> str:
    """Return the path of the cgroup with this id, starting at cgroup v2's mount; empty if there is none."""
    handle = ctypes.create_string_buffer(struct.pack("=IiQ", 8, _FILEID_KERNFS, number))
    try:
        mount = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        descriptor = ctypes.CDLL(None, use_errno=True).open_by_handle_at(
            mount, handle, os.O_RDONLY | os.O_CLOEXEC
        )
    finally:
        os.close(mount)
    if descriptor < 0:
        return ""
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    finally:
        os.close(descriptor)
