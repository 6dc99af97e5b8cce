"""Cilium's agent notifications, from changes of the agent's tables.

Why:    ``cilium-dbg monitor`` and Hubble show what the agent did beside the packets: policies, endpoints,
        ipcache and services. AgentNotifications sends them to monitor clients, EventSources to the ring.
Source: Cilium 1.17, pkg/monitor/api (AgentNotifyMessage and its notifications).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from cells.cluster.ipcache.rows import IpcacheEntry
from cells.endpoint import Endpoint
from cells.policy.control import PolicyObject, PolicyView
from cells.policy.maps import RealizedPolicy
from cells.services import FrontendKey
from cells.services.control import ServedFrontend
from lifecycle import Change, Table

START = 2
REGENERATED, REGENERATION_FAILED = 3, 4
POLICY_UPDATED, POLICY_DELETED = 5, 6
ENDPOINT_CREATED, ENDPOINT_DELETED = 7, 8
IPCACHE_UPSERTED, IPCACHE_DELETED = 9, 10
SERVICE_UPSERTED, SERVICE_DELETED = 11, 12


class _Notification(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", omit_defaults=True):
    """Base of the notifications in their JSON form: fields with defaults are omitted if unset."""


class AgentStarted(_Notification, frozen=True, kw_only=True):
    """The agent has started."""

    time: str
    """RFC 3339."""


class PolicyChanged(_Notification, frozen=True, kw_only=True, rename=None):
    """Rules were added or removed."""

    labels: Sequence[str] | None = None
    revision: int = 0
    rule_count: int


class EndpointRegenerated(_Notification, frozen=True, kw_only=True):
    """The regeneration of an endpoint succeeded or failed."""

    id: int = 0
    labels: Sequence[str] | None = None
    error: str = ""


class EndpointChanged(_Notification, frozen=True, kw_only=True):
    """An endpoint was created or deleted."""

    id: int = 0
    labels: Sequence[str] | None = None
    error: str = ""
    pod_name: str = ""
    namespace: str = ""


class PrefixChanged(_Notification, frozen=True, kw_only=True):
    """The identity of a prefix changed or was removed."""

    cidr: str
    id: int
    old_id: int | None = None
    host_ip: str = ""
    old_host_ip: str = ""
    encrypt_key: int
    namespace: str = ""
    pod_name: str = ""


class AddressPort(msgspec.Struct, frozen=True):
    """The address of a frontend or backend."""

    ip: str = ""
    port: int = 0


class ServiceUpserted(_Notification, frozen=True, kw_only=True):
    """A frontend was added or changed."""

    id: int = 0
    frontend_address: AddressPort
    backend_addresses: Sequence[AddressPort] | None
    type: str = ""
    traffic_policy: str = ""
    ext_traffic_policy: str = ""
    int_traffic_policy: str = ""
    name: str = ""
    namespace: str = ""


class ServiceDeleted(_Notification, frozen=True, kw_only=True):
    """A frontend was removed."""

    id: int = 0


Notification = (
    AgentStarted
    | PolicyChanged
    | EndpointRegenerated
    | EndpointChanged
    | PrefixChanged
    | ServiceUpserted
    | ServiceDeleted
)
Notified = tuple[int, Notification]
"""The notification's number (AgentNotification), and its body."""


def started() -> Notified:
    """Return the notification of the agent's start."""
    return START, AgentStarted(time=datetime.now(UTC).isoformat())


# Conversion of table changes.


def of_frontends(changes: Iterable[Change[FrontendKey, ServedFrontend]]) -> Iterator[Notified]:
    """Yield the notifications for changed frontends."""
    for change in changes:
        row = change.row
        if row is None:
            yield SERVICE_DELETED, ServiceDeleted(id=change.old.id if change.old is not None else 0)
            continue
        frontend = row.in_maps
        address = frontend.key.address
        yield (
            SERVICE_UPSERTED,
            ServiceUpserted(
                id=row.id,
                frontend_address=AddressPort(str(address.ip), address.port),
                backend_addresses=[
                    AddressPort(str(one.address.ip), one.address.port) for one in frontend.backends
                ],
                type=frontend.type.text,
                ext_traffic_policy="Local" if frontend.ext_local else "Cluster",
                int_traffic_policy="Local" if frontend.int_local else "Cluster",
                name=frontend.service.name,
                namespace=frontend.service.namespace,
            ),
        )


def of_endpoints(changes: Iterable[Change[int, Endpoint]]) -> Iterator[Notified]:
    """Yield the notifications for created and deleted endpoints."""
    for change in changes:
        row = change.row or change.old
        if row is None or (change.old is not None and change.row is not None):
            continue
        yield (
            ENDPOINT_DELETED if change.deleted else ENDPOINT_CREATED,
            EndpointChanged(id=row.id, labels=row.labels, pod_name=row.pod_name, namespace=row.pod_namespace),
        )


def of_realized(
    changes: Iterable[Change[int, RealizedPolicy]], endpoints: Table[int, Endpoint]
) -> Iterator[Notified]:
    """Yield the notifications for regenerated endpoints: a new revision or error of the policy map."""
    for change in changes:
        row, old = change.row, change.old
        if row is None or (old is not None and (row.revision, row.error) == (old.revision, old.error)):
            continue
        found = endpoints.get(row.endpoint_id)
        yield (
            REGENERATION_FAILED if row.error else REGENERATED,
            EndpointRegenerated(
                id=row.endpoint_id, labels=found.labels if found is not None else None, error=row.error
            ),
        )


def of_prefixes(changes: Iterable[Change[str, IpcacheEntry]]) -> Iterator[Notified]:
    """Yield the notifications for ipcache entries that were changed or deleted."""
    for change in changes:
        row, old = change.row or change.old, None if change.deleted else change.old
        if row is None:
            continue
        namespace, pod_name = row.pod or ("", "")
        yield (
            IPCACHE_DELETED if change.deleted else IPCACHE_UPSERTED,
            PrefixChanged(
                cidr=row.prefix,
                id=row.identity,
                old_id=old.identity if old is not None else None,
                host_ip=_host_ip(row),
                old_host_ip=_host_ip(old) if old is not None else "",
                encrypt_key=row.encrypt_key,
                namespace=namespace,
                pod_name=pod_name,
            ),
        )


class PolicyNotifications:
    """Creates the notifications for policy objects; remembers labels for those of deletions."""

    def __init__(self, view: PolicyView, known: Iterable[PolicyObject] = ()) -> None:
        self._view = view
        self._labels = {
            _object_key(row): rules for row in known if (rules := self._rule_labels(row)) or not row.refused
        }

    def of(self, changes: Iterable[Change[tuple[str, str, str], PolicyObject]]) -> Iterator[Notified]:
        """Yield the notifications for changed policy objects."""
        for change in changes:
            rules: Sequence[Sequence[str]] | None = None
            if change.row is None:
                rules = self._labels.pop(change.key, None)
            elif not change.row.refused:
                rules = self._labels[change.key] = self._rule_labels(change.row)
            if rules is not None:
                yield (
                    POLICY_DELETED if change.deleted else POLICY_UPDATED,
                    PolicyChanged(
                        labels=sorted({label for rule in rules for label in rule}),
                        revision=self._view.revision,
                        rule_count=len(rules),
                    ),
                )

    def _rule_labels(self, row: PolicyObject) -> Sequence[Sequence[str]]:
        return self._view.labels_of(*_object_key(row))


def _object_key(row: PolicyObject) -> tuple[str, str, str]:
    return row.kind, row.namespace, row.name


def _host_ip(row: IpcacheEntry) -> str:
    """Return the tunnel endpoint of an ipcache entry; empty if there is none."""
    return str(row.tunnel_endpoint) if int(row.tunnel_endpoint) else ""
