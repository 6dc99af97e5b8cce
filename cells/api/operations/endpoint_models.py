"""Pure conversions between endpoints, controllers and their wire models.

Source: Cilium 1.17, pkg/endpoint/api.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address

from cells.api import models
from cells.api.operations.config_mapping import DISABLED, ENABLED, OFF, ON, SOURCE_IP_VERIFICATION
from cells.base.labels import labels_sha256
from cells.endpoint import (
    DatapathConfiguration,
    Endpoint,
    EndpointError,
    EndpointRequest,
    State,
    StatusEntry,
    StatusLog,
    health_of,
)
from cells.netlink.rows import mac_text, parse_mac
from cells.observe.controllers import ControllerState
from lifecycle import Duration

ZERO_MAC = bytes(6)
POLICY_AUDIT_MODE = "PolicyAuditMode"
ANY_SOURCES = frozenset({"any", "unspec"})


@lru_cache(4096)  # a status has hundreds of timestamps, few of them new
def rfc3339(seconds: float) -> str:
    """Format Unix seconds as RFC 3339 in UTC with milliseconds, as go-openapi does."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def endpoint_model(
    endpoint: Endpoint,
    shown: State,
    log: StatusLog,
    host_addressing: models.NodeAddressing,
    policy: models.EndpointPolicyStatus,
    controllers: Iterable[models.ControllerStatus] = (),
) -> models.EndpointModel:
    """Return the model of an endpoint; ``shown`` is the state that clients see.

    Lists contain no null and ``status`` is always present: clients rely on both.
    """
    configuration = configuration_model(endpoint)
    newest = log.newest
    return models.EndpointModel(
        id=endpoint.id,
        spec=configuration,
        status=models.EndpointStatus(
            state=shown,
            external_identifiers=identifiers_model(endpoint),
            identity=identity_model(endpoint) if endpoint.identity else None,
            labels=labels_model(endpoint).status,
            realized=configuration,
            networking=networking_model(endpoint, host_addressing),
            policy=policy,
            health=health_model(shown),
            controllers=list(controllers),
            log=[log_line(newest)] if newest else [],
        ),
    )


def configuration_model(endpoint: Endpoint) -> models.EndpointConfigurationSpec:
    """Return the options of an endpoint that can be changed."""
    verified = DISABLED if endpoint.datapath.disable_sip_verification else ENABLED
    return models.EndpointConfigurationSpec(
        options={SOURCE_IP_VERIFICATION: verified}, label_configuration=user_labels(endpoint)
    )


def audit_option(audited: bool) -> dict[str, str]:
    """Return the option of the host endpoint that can be changed."""
    return {POLICY_AUDIT_MODE: ENABLED if audited else DISABLED}


def requested_audit(body: models.EndpointConfigurationSpec, now: bool, immutable: Mapping[str, str]) -> bool:
    """Return whether PATCH of the host endpoint's options enables audit mode of the host policy."""
    return _requested(body, POLICY_AUDIT_MODE, now, immutable)


def user_labels(endpoint: Endpoint) -> models.LabelConfigurationSpec:
    """Return the labels that a user has added to the endpoint."""
    return models.LabelConfigurationSpec(user=sorted(endpoint.custom_labels))


def requested_verification(
    body: models.EndpointConfigurationSpec, now: bool, immutable: Mapping[str, str]
) -> bool:
    """Return whether PATCH of an endpoint's options enables source IP verification; default ``now``.

    Clients send all options, unchanged ones as words, others as ``0`` or ``1``. Raises EndpointError 400 for
    an option that cannot be changed, or an invalid value.
    """
    return _requested(body, SOURCE_IP_VERIFICATION, now, immutable)


def _requested(
    body: models.EndpointConfigurationSpec, option: str, now: bool, immutable: Mapping[str, str]
) -> bool:
    wanted = now
    for name, value in sorted((body.options or {}).items()):
        if name == option:
            if value.lower() not in ON | OFF:
                raise EndpointError(
                    400, f'invalid option value "{value}" for {name}: expected {ENABLED} or {DISABLED}'
                )
            wanted = value.lower() in ON
        elif name not in immutable or _normalized(value) != _normalized(immutable[name]):
            raise EndpointError(400, f"option {name} of this endpoint cannot be changed: only {option} can")
    return wanted


def _normalized(value: str) -> str:
    text = value.lower()
    return ENABLED if text in ON else DISABLED if text in OFF else text


def identifiers_model(endpoint: Endpoint) -> models.EndpointIdentifiers:
    """Return the identifiers of the endpoint; legacy ones only if it was created with them."""
    legacy = not endpoint.disable_legacy_identifiers
    return models.EndpointIdentifiers(
        cni_attachment_id=endpoint.attachment_id,
        container_id=endpoint.container_id if legacy else "",
        container_name=endpoint.container_name if legacy else "",
        pod_name=endpoint.pod if legacy else "",
        k8s_pod_name=endpoint.pod_name,
        k8s_namespace=endpoint.pod_namespace,
    )


def identity_model(endpoint: Endpoint) -> models.IdentityModel:
    """Return the endpoint's security identity."""
    return models.IdentityModel(
        id=endpoint.identity,
        labels=sorted(endpoint.labels),
        labels_sha256=labels_sha256(endpoint.labels),
    )


def labels_model(endpoint: Endpoint) -> models.LabelConfiguration:
    """Return the endpoint's labels, and those that a user has added."""
    user = user_labels(endpoint)
    return models.LabelConfiguration(
        spec=user,
        status=models.LabelConfigurationStatus(
            realized=user,
            security_relevant=sorted(endpoint.labels),
            derived=sorted(endpoint.info_labels),
        ),
    )


def networking_model(endpoint: Endpoint, host_addressing: models.NodeAddressing) -> models.EndpointNetworking:
    """Return addresses and links; without a MAC, the CNI plugin keeps the one it has assigned."""
    address = models.AddressPair(
        ipv4=str(endpoint.ipv4) if endpoint.ipv4 else "",
        ipv4_pool_name=endpoint.pool if endpoint.ipv4 else "",
        ipv6=str(endpoint.ipv6) if endpoint.ipv6 else "",
        ipv6_pool_name=endpoint.ipv6_pool if endpoint.ipv6 else "",
    )
    return models.EndpointNetworking(
        addressing=[address],
        host_addressing=host_addressing,
        host_mac=optional_mac(endpoint.host_mac),
        mac=optional_mac(endpoint.pod_mac),
        interface_name=endpoint.ifname,
        interface_index=endpoint.ifindex,
        container_interface_name=endpoint.container_ifname,
    )


def health_model(shown: State) -> models.EndpointHealth:
    """Return the health for a state; the CNI plugin's CHECK reads it."""
    health = health_of(shown)
    return models.EndpointHealth(
        overall_health=health.overall, bpf=health.bpf, policy=health.policy, connected=health.connected
    )


def log_line(entry: StatusEntry) -> models.EndpointStatusChange:
    """Return one line of the endpoint's log."""
    return models.EndpointStatusChange(
        code=entry.code, message=entry.message, state=entry.state, timestamp=rfc3339(entry.time)
    )


def optional_mac(mac: bytes) -> str:
    """Format a MAC; empty for a zero or empty one."""
    return "" if mac in (b"", ZERO_MAC) else mac_text(mac)


def has_labels(labels: Iterable[str], wanted: Iterable[str]) -> bool:
    """Whether the labels include all ``wanted`` ones.

    Labels are ``source:key[=value]``; a label without a source, or with the source ``any``, matches any
    source.
    """
    have = {_label(text) for text in labels}
    keys = {key for _, key in have}
    return all(
        key in keys if source in ANY_SOURCES else (source, key) in have for source, key in map(_label, wanted)
    )


def _label(text: str) -> tuple[str, str]:
    """Split a label into source and ``key[=value]``; a colon in the value does not end a source."""
    source, colon, rest = text.partition(":")
    return (
        (source, rest.removesuffix("=")) if colon and "=" not in source else ("any", text.removesuffix("="))
    )


def endpoint_request(body: models.EndpointChangeRequest) -> EndpointRequest:
    """Convert the body of PUT /endpoint/{id}.

    Raises EndpointError 400 for an invalid address or MAC, and for unsupported properties.
    """
    addressing = body.addressing or models.AddressPair()
    if body.properties:
        raise EndpointError(400, f"unsupported endpoint properties: {', '.join(sorted(body.properties))}")
    return EndpointRequest(
        container_id=body.container_id,
        container_ifname=body.container_interface_name,
        container_name=body.container_name,
        ifname=body.interface_name,
        ifindex=requested_ifindex(body.interface_index),
        pod_mac=requested_mac(body.mac),
        host_mac=requested_mac(body.host_mac),
        ipv4=requested_ipv4(addressing.ipv4),
        pool=addressing.ipv4_pool_name,
        expiration_uuid=addressing.ipv4_expiration_uuid,
        ipv6=requested_ipv6(addressing.ipv6),
        ipv6_pool=addressing.ipv6_pool_name,
        ipv6_expiration_uuid=addressing.ipv6_expiration_uuid,
        pod_name=body.k8s_pod_name,
        pod_namespace=body.k8s_namespace,
        pod_uid=body.k8s_uid,
        netns_cookie=requested_cookie(body.netns_cookie),
        labels=tuple(body.labels),
        disable_legacy_identifiers=body.disable_legacy_identifiers,
        datapath=requested_datapath(body.datapath_configuration),
    )


def requested_ipv4(text: str) -> IPv4Address | None:
    """Parse ``a.b.c.d`` or ``a.b.c.d/length`` (sent with delegated IPAM); None if empty."""
    if not text:
        return None
    try:
        return IPv4Address(text.partition("/")[0])
    except ValueError:
        raise EndpointError(400, f'invalid IPv4 address "{text}"') from None


def requested_ipv6(text: str) -> IPv6Address | None:
    """Parse an IPv6 address with or without a prefix length; None if empty."""
    if not text:
        return None
    try:
        return IPv6Address(text.partition("/")[0])
    except ValueError:
        raise EndpointError(400, f'invalid IPv6 address "{text}"') from None


def requested_mac(text: str) -> bytes:
    """Parse a MAC; zeros if empty."""
    if not text:
        return ZERO_MAC
    try:
        return parse_mac(text)
    except ValueError:
        raise EndpointError(400, f'invalid MAC address "{text}"') from None


def requested_ifindex(number: int) -> int:
    """Validate the ifindex of the pod's link: at most 31 bits; 0 means absent."""
    if not 0 <= number < 1 << 31:
        raise EndpointError(400, f"invalid interface-index {number}")
    return number


def requested_cookie(text: str) -> int:
    """Parse the netns cookie of the pod; 0 if it is invalid, as in Cilium."""
    readable = text.isascii() and text.isdigit() and len(text) <= 20
    return int(text) if readable and int(text) < 1 << 64 else 0


def requested_datapath(wanted: models.EndpointDatapathConfiguration | None) -> DatapathConfiguration:
    """Convert the datapath configuration of a request.

    Raises EndpointError 400 for unsupported options, because ignoring them would silently lose the pod's
    packets.
    """
    if wanted is None:
        return DatapathConfiguration()
    if wanted.install_endpoint_route:
        raise EndpointError(400, "unsupported datapath-configuration: install-endpoint-route")
    return DatapathConfiguration(
        external_ipam=wanted.external_ipam,
        require_arp_passthrough=wanted.require_arp_passthrough,
        require_egress_prog=wanted.require_egress_prog,
        require_routing=wanted.require_routing,
        disable_sip_verification=wanted.disable_sip_verification,
    )


# Controllers, in GET /healthz and in the status of endpoints.

NEVER = "0001-01-01T00:00:00.000Z"
"""Go's zero time, for events that have not happened."""


def controller(status: ControllerState) -> models.ControllerStatus:
    """Return the model of a controller."""
    return models.ControllerStatus(
        name=status.name,
        uuid=status.uuid,
        configuration=models.ControllerConfiguration(
            error_retry=status.retries,
            error_retry_base=str(Duration(status.retry_base)),
            interval=str(Duration(status.interval)),
        ),
        status=models.ControllerCounts(
            success_count=status.successes,
            last_success_timestamp=timestamp(status.last_success),
            failure_count=status.failures,
            last_failure_timestamp=timestamp(status.last_failure),
            consecutive_failure_count=status.failures_in_a_row,
            last_failure_msg=status.last_error,
        ),
    )


def timestamp(seconds: float | None) -> str:
    """Format a time; in the year 1 for None."""
    return NEVER if seconds is None else rfc3339(seconds)
