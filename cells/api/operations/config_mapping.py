"""Models of GET /config, the agent's configuration, and PATCH /config, the options that can change."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from cells.api import models
from cells.base.addresses import Family, IPAddress
from cells.datapath.settings import AGGREGATION, MonitorNotifications
from cells.endpoint import Enforced
from cells.maps.records.endpoints import (
    NODE_AUDITS_POLICY,
    NODE_NOTIFY_DROP,
    NODE_NOTIFY_POLICY_VERDICT,
    NODE_NOTIFY_SOCK,
    NODE_NOTIFY_TRACE,
)
from cells.netlink.messages import OffloadLimits
from cells.node.router import Addressing
from cells.policy import Enforcement

SOURCE_IP_VERIFICATION = "SourceIPVerification"
EVENTS = {
    "DropNotification": NODE_NOTIFY_DROP,
    "PolicyAuditMode": NODE_AUDITS_POLICY,
    "PolicyVerdictNotification": NODE_NOTIFY_POLICY_VERDICT,
    "TraceNotification": NODE_NOTIFY_TRACE,
    "TraceSockNotification": NODE_NOTIFY_SOCK,
}
DEBUG = "Debug"
LATER = frozenset({"ConntrackAccounting", "ConntrackLocal", "DebugLB", "DebugPolicy", "PolicyTracing"})
"""Cilium's options of features that are not built; only "disabled" is accepted."""
ALWAYS = frozenset({"PolicyAccounting"})
"""Cilium's options that are always enabled in this agent."""
AGGREGATION_OPTION = "MonitorAggregationLevel"
AGGREGATION_LEVELS = ("None", "Lowest", "Low", "Medium", "Max")
ENABLED, DISABLED = "Enabled", "Disabled"
ON = frozenset({"enabled", "enable", "true", "on", "1"})
OFF = frozenset({"disabled", "disable", "false", "off", "0"})
DATAPATH_MODE = "veth"


SILENT = MonitorNotifications(flags=0, aggregation=0)


class NodeFacts(msgspec.Struct, frozen=True):
    """Properties of the node that the CNI plugin reads.

    The MTU is that of pod links and uplinks, in bytes.
    """

    addressing: Mapping[Family, Addressing]
    """Router address and pod CIDR of each enabled family."""
    mtu: int
    route_mtu: int | None = None
    """MTU of pods' routes: below that of their links by the encapsulation overhead."""
    ipam_mode: str = "cluster-pool"
    """The IPAM mode: which component allocates pod addresses."""
    notifications: MonitorNotifications = SILENT
    """The packet notifications that the datapath sends."""
    debug: bool = False
    """Whether debug logging is enabled."""
    chaining: str = "none"
    """The chaining mode of the CNI plugin."""
    route_mtu_in_chains: bool = False
    """Whether pod routes on links of other CNI plugins get the MTU."""
    reserved_ports: str = ""
    """Ports to add to ip_local_reserved_ports of a new pod."""
    limits: OffloadLimits = OffloadLimits()
    """GSO and GRO sizes of pod links."""
    big_tcp: frozenset[Family] = frozenset()
    """Address families with BIG TCP (packets above 64 KiB)."""
    masqueraded: frozenset[Family] = frozenset()
    """Address families that are masqueraded."""
    monitor: models.MonitorStatus | None = None
    """The perf buffers of datapath events; None if the monitor is disabled."""
    api_server: str = ""
    """URL of the API server in the settings; empty if unset."""
    kubeconfig: str = ""
    """Path of the kubeconfig in the settings; empty if unset."""
    tunnel_protocol: str = ""
    """The tunnel protocol; empty in native routing mode."""
    kvstore: str = ""
    """The kind of kvstore; empty without one."""
    kvstore_options: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Options of the kvstore connection."""

    @property
    def router_ips(self) -> frozenset[IPAddress]:
        """The router addresses."""
        return frozenset(each.ip for each in self.addressing.values())


class NodeSection(msgspec.Struct, frozen=True):
    """A cell's contribution to NodeFacts: ``added`` returns the facts with its fields set."""

    added: Callable[[NodeFacts], NodeFacts]


def host_addressing(node: NodeFacts) -> models.NodeAddressing:
    """Return router address and pod CIDR of each family; a disabled family has no key."""
    found = {
        family: models.NodeAddressingElement(
            enabled=True, ip=str(each.ip), alloc_range=str(each.alloc_range or "")
        )
        for family, each in node.addressing.items()
    }
    return models.NodeAddressing(ipv4=found.get(Family.IPV4), ipv6=found.get(Family.IPV6))


def configuration_model(
    node: NodeFacts, settings: Mapping[str, object], enforced: Enforced
) -> models.DaemonConfiguration:
    """Return the response of GET /config; ``settings`` is the daemon's configuration map."""
    options = {
        DEBUG: _switch(node.debug),
        SOURCE_IP_VERIFICATION: _switch(enforced.source_ip_verification),
        **event_options(node.notifications),
    }
    spec = models.DaemonConfigurationSpec(options=options, policy_enforcement=enforced.enforcement)
    return models.DaemonConfiguration(
        spec=spec,
        status=models.DaemonConfigurationStatus(
            addressing=host_addressing(node),
            realized=spec,
            immutable={},
            daemon_configuration_map=dict(settings),
            kvstore_configuration=models.KVStoreConfiguration(
                type=node.kvstore, options=dict(node.kvstore_options) or None
            ),
            datapath_mode=DATAPATH_MODE,
            device_mtu=node.mtu,
            route_mtu=node.route_mtu or node.mtu,
            ipam_mode=node.ipam_mode,
            enable_route_mtu_for_cni_chaining=node.route_mtu_in_chains,
            ip_local_reserved_ports=node.reserved_ports,
            gso_max_size=node.limits.gso,
            gro_max_size=node.limits.gro,
            gso_ipv4_max_size=node.limits.gso_ipv4,
            gro_ipv4_max_size=node.limits.gro_ipv4,
            masquerade=bool(node.masqueraded),
            masquerade_protocols=models.MasqueradeProtocols(
                ipv4=Family.IPV4 in node.masqueraded, ipv6=Family.IPV6 in node.masqueraded
            ),
            node_monitor=node.monitor,
            k8s_endpoint=node.api_server,
            k8s_configuration=node.kubeconfig,
        ),
    )


def event_options(notifications: MonitorNotifications) -> dict[str, str]:
    """Return the options of packet notifications."""
    options = {name: _switch(bool(notifications.flags & flag)) for name, flag in EVENTS.items()}
    return {**options, AGGREGATION_OPTION: AGGREGATION_LEVELS[notifications.aggregation]}


def requested_configuration(
    wanted: models.DaemonConfigurationSpec, now: Enforced, notifications: MonitorNotifications
) -> tuple[Enforced, MonitorNotifications]:
    """Apply PATCH /config; options that it does not name are unchanged.

    Clients send the whole configuration, so equal values have no effect. Raises ValueError (one line) for an
    option that cannot change, or an invalid value.
    """
    enforcement, verification = now.enforcement, now.source_ip_verification
    flags, aggregation = notifications.flags, notifications.aggregation
    if wanted.policy_enforcement:
        try:
            enforcement = Enforcement(wanted.policy_enforcement.lower())
        except ValueError:
            raise ValueError(f"invalid option for PolicyEnforcement {wanted.policy_enforcement}") from None
    for name, value in sorted((wanted.options or {}).items()):
        if name == SOURCE_IP_VERIFICATION:
            verification = _is_on(name, value)
        elif name in EVENTS:
            flags = flags | EVENTS[name] if _is_on(name, value) else flags & ~EVENTS[name]
        elif name == AGGREGATION_OPTION:
            if value.lower() not in AGGREGATION:
                expected = ", ".join(AGGREGATION_LEVELS)
                raise ValueError(f'invalid option value "{value}" for {name}: expected {expected}, or 0 to 4')
            aggregation = AGGREGATION[value.lower()]
        elif name != DEBUG:
            _require_unchanged(name, value)
    return Enforced(enforcement, verification), MonitorNotifications(flags, aggregation)


def requested_debug(wanted: models.DaemonConfigurationSpec, now: bool) -> bool:
    """Return whether PATCH /config enables debug logging. Raises ValueError (one line)."""
    value = (wanted.options or {}).get(DEBUG)
    return now if value is None else _is_on(DEBUG, value)


def _require_unchanged(name: str, value: str) -> None:
    """Raise ValueError (one line) if the request changes an option that cannot change."""
    if name in LATER:
        if _is_on(name, value):
            raise ValueError(f"option {name} is not built yet: it can only be {DISABLED}")
    elif name in ALWAYS:
        if not _is_on(name, value):
            raise ValueError(f"option {name} cannot be switched off: policy entries always count")
    else:
        changeable = ", ".join((DEBUG, AGGREGATION_OPTION, *EVENTS, SOURCE_IP_VERIFICATION))
        raise ValueError(f"unknown option {name}: while the agent runs, these can be changed: {changeable}")


def _switch(on: bool) -> str:
    return ENABLED if on else DISABLED


def _is_on(name: str, value: str) -> bool:
    if value.lower() not in ON | OFF:
        raise ValueError(f'invalid option value "{value}" for {name}: expected {ENABLED} or {DISABLED}')
    return value.lower() in ON
