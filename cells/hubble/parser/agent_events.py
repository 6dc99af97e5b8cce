"""What happens in the agent, as Hubble's agent events: rules, endpoints, prefixes and services that change.

Source: Cilium 1.17, pkg/monitor/api (the notifications) and Hubble's parser of agent events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from cells.hubble.enums import AgentEventType
from cells.hubble.flow import (
    AgentEvent,
    AgentEventUnknown,
    EndpointRegenNotification,
    EndpointUpdateNotification,
    IPCacheNotification,
    PolicyUpdateNotification,
    ServiceDeleteNotification,
    ServiceUpsertNotification,
    ServiceUpsertNotificationAddr,
    TimeNotification,
)
from cells.hubble.scalars import DecodeError, parse_rfc3339

START = 2
REGENERATED, REGENERATION_FAILED = 3, 4
POLICY_UPDATED, POLICY_DELETED = 5, 6
ENDPOINT_CREATED, ENDPOINT_DELETED = 7, 8
IPCACHE_UPSERTED, IPCACHE_DELETED = 9, 10
SERVICE_UPSERTED, SERVICE_DELETED = 11, 12


class _Notification(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", omit_defaults=True):
    """Base of the notifications, as monitors print them in JSON: without defaults, except what has none."""


class AgentStarted(_Notification, frozen=True, kw_only=True):
    """The agent runs."""

    time: str
    """RFC 3339."""


class PolicyChanged(_Notification, frozen=True, kw_only=True, rename=None):
    """Rules were added or removed."""

    labels: Sequence[str] | None = None
    revision: int = 0
    rule_count: int


class EndpointRegenerated(_Notification, frozen=True, kw_only=True):
    """An endpoint has its policy and programs anew, or does not."""

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
    """A prefix has another identity, or none."""

    cidr: str
    id: int
    old_id: int | None = None
    host_ip: str = ""
    old_host_ip: str = ""
    encrypt_key: int
    namespace: str = ""
    pod_name: str = ""


class AddressPort(msgspec.Struct, frozen=True):
    """Of a frontend or backend."""

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


def _start(body: AgentStarted) -> dict[str, Any]:
    try:
        time: int | None = parse_rfc3339(body.time)
    except DecodeError:
        time = None
    return {"agent_start": TimeNotification(time=time)}


def _policy(body: PolicyChanged) -> dict[str, Any]:
    return {
        "policy_update": PolicyUpdateNotification(
            labels=tuple(body.labels or ()), revision=body.revision, rule_count=body.rule_count
        )
    }


def _regeneration(body: EndpointRegenerated) -> dict[str, Any]:
    return {
        "endpoint_regenerate": EndpointRegenNotification(
            id=body.id, labels=tuple(body.labels or ()), error=body.error
        )
    }


def _endpoint(body: EndpointChanged) -> dict[str, Any]:
    return {
        "endpoint_update": EndpointUpdateNotification(
            id=body.id,
            labels=tuple(body.labels or ()),
            error=body.error,
            pod_name=body.pod_name,
            namespace=body.namespace,
        )
    }


def _prefix(body: PrefixChanged) -> dict[str, Any]:
    return {
        "ipcache_update": IPCacheNotification(
            cidr=body.cidr,
            identity=body.id,
            old_identity=body.old_id,
            host_ip=body.host_ip,
            old_host_ip=body.old_host_ip,
            encrypt_key=body.encrypt_key,
            namespace=body.namespace,
            pod_name=body.pod_name,
        )
    }


def _service(body: ServiceUpserted) -> dict[str, Any]:
    frontend = body.frontend_address
    return {
        "service_upsert": ServiceUpsertNotification(
            id=body.id,
            frontend_address=ServiceUpsertNotificationAddr(ip=frontend.ip or "<nil>", port=frontend.port),
            backend_addresses=tuple(
                ServiceUpsertNotificationAddr(ip=backend.ip, port=backend.port)
                for backend in body.backend_addresses or ()
            ),
            type=body.type,
            traffic_policy=body.ext_traffic_policy,
            name=body.name,
            namespace=body.namespace,
            ext_traffic_policy=body.ext_traffic_policy,
            int_traffic_policy=body.int_traffic_policy,
        )
    }


def _service_deleted(body: ServiceDeleted) -> dict[str, Any]:
    return {"service_delete": ServiceDeleteNotification(id=body.id)}


_EVENTS: Final[dict[int, tuple[AgentEventType, type[Any], Callable[[Any], dict[str, Any]]]]] = {
    START: (AgentEventType.AGENT_STARTED, AgentStarted, _start),
    REGENERATED: (AgentEventType.ENDPOINT_REGENERATE_SUCCESS, EndpointRegenerated, _regeneration),
    REGENERATION_FAILED: (AgentEventType.ENDPOINT_REGENERATE_FAILURE, EndpointRegenerated, _regeneration),
    POLICY_UPDATED: (AgentEventType.POLICY_UPDATED, PolicyChanged, _policy),
    POLICY_DELETED: (AgentEventType.POLICY_DELETED, PolicyChanged, _policy),
    ENDPOINT_CREATED: (AgentEventType.ENDPOINT_CREATED, EndpointChanged, _endpoint),
    ENDPOINT_DELETED: (AgentEventType.ENDPOINT_DELETED, EndpointChanged, _endpoint),
    IPCACHE_UPSERTED: (AgentEventType.IPCACHE_UPSERTED, PrefixChanged, _prefix),
    IPCACHE_DELETED: (AgentEventType.IPCACHE_DELETED, PrefixChanged, _prefix),
    SERVICE_UPSERTED: (AgentEventType.SERVICE_UPSERTED, ServiceUpserted, _service),
    SERVICE_DELETED: (AgentEventType.SERVICE_DELETED, ServiceDeleted, _service_deleted),
}


def agent_event(kind: int, notification: object) -> AgentEvent:
    """The event of a notification with the monitor's number; unknown where the two do not fit."""
    if (known := _EVENTS.get(kind)) is not None and isinstance(notification, known[1]):
        return AgentEvent(type=known[0], **known[2](notification))
    text = msgspec.json.encode(notification).decode()
    return AgentEvent(unknown=AgentEventUnknown(type=str(kind), notification=text))
