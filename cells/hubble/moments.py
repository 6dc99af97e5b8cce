"""The resolver of flows from the agent's tables, with the names at the time of an event.

A flow may be read long after its event. So the names are looked up when the first event of its two addresses
arrives, and shared by all later ones until one of the agent's tables changes.

Socket traces contain only the id of the process's control group. It leads to the pod through
open_by_handle_at(2), which encodes a group as that id (FILEID_KERNFS), and through kubelet's names of groups:
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

_MOST_MOMENTS: Final = 1 << 16
_NO_STAMP: Final = Stamp(0, "")
MOUNTS: Final = Path("/proc/self/mountinfo")
_FILEID_KERNFS = 0xFE
_UID = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?")


class FrontendIndex:
    """Services by addresses of their frontends, as the table has no index of addresses alone."""

    def __init__(self) -> None:
        self.revision = 0
        self._services: dict[str, dict[Hashable, tuple[int, FlowService]]] = {}

    def follow(self, changes: Sequence[Change[FrontendKey, ServedFrontend]]) -> None:
        """Process changes of the table ``services``."""
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
        """The services of an address, by port."""
        return dict(self._services.get(address, {}).values())


class AgentResolver(Resolver):
    """Resolves names from the agent's present tables."""

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
        # A static pod, which its node owns, has no workload; others with a controller have a generateName.
        owner = next(((one.kind, one.name) for one in owners if one.controller and one.kind != "Node"), None)
        return workload_of(pod.name, owner, pod.labels)

    def identity_at(self, address: str) -> int:
        """See Resolver."""
        try:
            return self._tables.ipcache.identity_at(ip_address(address))
        except (OSError, NotStartedError):  # the kernel's map cannot be read, or is not yet
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
        """All services of an address, by port."""
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
        except (OSError, NotStartedError):  # the kernel's map of networks cannot be read, or is not yet
            return None
        if match.entry is None:
            return None
        return DecidingRules([origin.labels for origin in match.entry.origins], view.revision)


class Moment(Resolver):
    """The names for events of two addresses, as they were when the first of these events arrived."""

    def __init__(self, resolver: AgentResolver) -> None:
        super().__init__()
        self._agent = resolver
        self._names: dict[tuple[int, str], Sequence[str]] = {}
        self._services: dict[str, Mapping[int, FlowService]] = {}
        self._links: dict[int, str] = {}

    def _party(self, address: str, identity: int) -> FlowEndpoint:
        return self._agent.party(address, identity)

    def local_endpoint(self, address: str) -> LocalEndpoint | None:
        """See Resolver."""
        return self._agent.local_endpoint(address)

    def endpoint(self, number: int) -> LocalEndpoint | None:
        """See Resolver."""
        return self._agent.endpoint(number)

    def identity_at(self, address: str) -> int:
        """See Resolver."""
        return self._agent.identity_at(address)

    def pod_at(self, address: str) -> tuple[str, str]:
        """See Resolver."""
        return self._agent.pod_at(address)

    def labels_of(self, identity: int) -> Sequence[str]:
        """See Resolver."""
        return self._agent.labels_of(identity)

    def service_at(self, address: str, port: int) -> FlowService | None:
        """See Resolver."""
        services = self._services.get(address)
        if services is None:
            services = self._services[address] = self._agent.services_at(address)
        return services.get(port)

    def names_at(self, endpoint: int, address: str) -> Sequence[str]:
        """See Resolver."""
        key = endpoint, address
        names = self._names.get(key)
        if names is None:
            names = self._names[key] = self._agent.names_at(endpoint, address)
        return names

    def link_name(self, index: int) -> str:
        """See Resolver."""
        name = self._links.get(index)
        if name is None:
            name = self._links[index] = self._agent.link_name(index)
        return name

    def addresses_of_cgroup(self, cgroup: int) -> Sequence[str]:
        """See Resolver."""
        return self._agent.addresses_of_cgroup(cgroup)

    def rules(self, endpoint: int, entry: EntryKey, address: str, *, egress: bool) -> DecidingRules | None:
        """See Resolver."""
        return self._agent.rules(endpoint, entry, address, egress=egress)


def _keys(header: int, fixed: slice) -> Callable[[bytes], bytes]:
    """The key of the parties of an event: parts of the record's header, and the packet's addresses."""

    def key(data: bytes) -> bytes:
        if data[header + 12 : header + 14] == b"\x08\x00":
            return data[fixed] + data[header + 26 : header + 34]
        return data[fixed] + data[header + 12 : header + 14] + data[header + 22 : header + 54]

    return key


def _trace_key(data: bytes) -> bytes:
    return _TRACE_V1(data) + data[32:48] if data[14:16] == b"\1\0" else _TRACE_V0(data)


def _sock_key(data: bytes) -> bytes:
    return data[2:18] + data[28:36]


_TRACE_V0: Final = _keys(32, slice(16, 24))
_TRACE_V1: Final = _keys(48, slice(16, 24))
_KEYS: Final[dict[int, Callable[[bytes], bytes]]] = {
    1: _keys(36, slice(16, 24)),
    3: _keys(24, slice(0, 1)),
    4: _trace_key,
    5: _keys(32, slice(16, 20)),
    7: _sock_key,
}


class Moments:
    """Returns for each event the moment of its parties; a new one after a table has changed."""

    def __init__(self, tables: KnownNames, frontends: FrontendIndex, parser: Parser) -> None:
        self._tables = tables
        self._frontends = frontends
        self._parser = parser
        self._revisions: tuple[int, ...] = ()
        self._moments: dict[tuple[int, bytes], Moment] = {}
        self.now = AgentResolver(tables, frontends)
        """Names from the present tables."""

    def refresh(self) -> None:
        """Check whether a table has changed; call it before each batch of events."""
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
            self._forget()

    def _forget(self) -> None:
        self._moments = {}
        self.now = AgentResolver(self._tables, self._frontends)

    def of(self, sample: Sample) -> Moment:
        """The moment of a record's parties."""
        data = sample.data
        make = _KEYS.get(data[0]) if data else None
        key = data[0] if data else 0, make(data) if make is not None else b""
        moment = self._moments.get(key)
        if moment is None:
            if len(self._moments) >= _MOST_MOMENTS:
                self._forget()
            moment = self._moments[key] = Moment(self.now)
            if make is not None:
                self._ask(sample, moment)
        return moment

    def _ask(self, sample: Sample, moment: Moment) -> None:
        """Look up what the event's flow needs of the moment."""
        try:
            self._parser.read(sample.data, sample.cpu, _NO_STAMP, moment)
        except EventError:
            return


def cgroup2_mount(mounts: str) -> str:
    """The mount point of cgroup v2, from the text of a mountinfo; empty if it is not mounted."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return before.split()[4]
    return ""


def pod_uid(path: str) -> str:
    """The UID of the pod of a control group's path; empty for other groups."""
    for part in path.split("/"):
        if part.startswith(("pod", "kubepods")) and (match := _UID.search(part)):
            return match[1].replace("_", "-")
    return ""


@lru_cache(maxsize=4096)
def pod_of_cgroup(number: int) -> str:
    """The UID of the pod with this control group; empty if there is no such group or it has no pod."""
    root = cgroup2_mount(MOUNTS.read_text())
    return pod_uid(cgroup_path(root, number)) if root else ""


def cgroup_path(root: str, number: int) -> str:
    """The path of the control group with this id below cgroup v2's mount; empty if there is none."""
    handle = ctypes.create_string_buffer(struct.pack("=IiQ", 8, _FILEID_KERNFS, number))
    try:
        mount = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        found = ctypes.CDLL(None, use_errno=True).open_by_handle_at(mount, handle, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(mount)
    if found < 0:
        return ""
    try:
        return str(Path(f"/proc/self/fd/{found}").readlink())
    finally:
        os.close(found)
