"""Settings of the datapath, and values derived from them and from other cells' settings."""

from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from cells.config.shared import ServiceReach
from cells.maps.records.endpoints import (
    NODE_AUDITS_POLICY,
    NODE_NOTIFY_DROP,
    NODE_NOTIFY_POLICY_VERDICT,
    NODE_NOTIFY_SOCK,
    NODE_NOTIFY_TRACE,
)
from lifecycle import Duration, Hook, Lifecycle, Logger, Settings, seconds
from lifecycle.settings import RenamedFrom

__all__ = [
    "AGGREGATION",
    "PACKAGED_OBJECTS",
    "DatapathSettings",
    "HostRouting",
    "MonitorNotifications",
    "ProgramSettings",
    "ServicePrograms",
    "XfrmMarks",
    "host_routing",
    "service_programs",
]


PACKAGED_OBJECTS = Path(__file__).resolve().parent / "objects"

_LEVELS: Final = {"none": 0, "disabled": 0, "lowest": 1, "low": 2, "medium": 3, "max": 4, "maximum": 4}
AGGREGATION: Final = _LEVELS | {str(level): level for level in range(5)}
"""Levels of monitor-aggregation by name."""
_LAST_PORT: Final = 65535


class MonitorNotifications(msgspec.Struct, frozen=True):
    """The events that the programs send, and whether policy is in audit mode.

    ``flags`` are those of NodeConfig, ``aggregation`` is 0 to 4.
    """

    flags: int
    aggregation: int


class DatapathSettings(Settings, frozen=True):
    """Which programs run, and lifetimes of tracked connections."""

    datapath_object: Path | None = None
    """Compiled datapath to load; unset: the one in the package."""

    bpf_ct_timeout_regular_tcp: Duration = seconds(8000)
    """Lifetime of a TCP connection without packets."""

    bpf_ct_timeout_regular_any: Duration = seconds(60)
    """Lifetime of any other flow without packets."""

    bpf_ct_timeout_regular_tcp_syn: Duration = seconds(60)
    """Lifetime of a TCP connection of which only SYNs were seen."""

    bpf_ct_timeout_regular_tcp_fin: Duration = seconds(10)
    """Lifetime of a TCP connection that both sides have closed."""

    bpf_ct_timeout_service_tcp: Duration = seconds(8000)
    """Lifetime of the backend selection of an idle TCP connection."""

    bpf_ct_timeout_service_any: Duration = seconds(60)
    """Lifetime of the backend selection of any other idle flow."""

    bpf_ct_timeout_service_tcp_grace: Duration = seconds(60)
    """Time after a TCP connection ended in which a new one with its ports gets the same backend."""

    service_no_backend_response: Literal["reject", "drop"] = "reject"
    """Reply to a client of a service without backends: reject refuses the connection (ICMP port unreachable,
    ECONNREFUSED at a socket), drop does not reply (EHOSTUNREACH at a socket).
    """

    disable_external_ip_mitigation: bool = True
    """Serve all externalIPs to pods and to the node, as Kubernetes requires; false: only those that the node
    has, so that no Service can intercept traffic to a foreign address (CVE-2020-8554).
    """

    ipv4_service_loopback_address: IPv4Address = IPv4Address("169.254.42.1")
    """Source address of packets from a pod to itself through a service."""

    node_port_range: tuple[int, ...] = (30000, 32767)
    """First and last node port; NAT uses the ports above."""

    bpf_lb_acceleration: Annotated[
        Literal["disabled", "native", "best-effort", "generic", "testing-only"],
        RenamedFrom("node-port-acceleration"),
    ] = "disabled"
    """Handle NodePort packets of external clients by XDP: native on all native devices, best-effort where the
    driver supports it; generic, or testing-only, needs no driver support and is slower than without XDP.
    """

    enable_host_legacy_routing: bool | None = None
    """Route packets between pods and native devices through the host's stack and its rules. Otherwise they
    are redirected past it, which needs kube-proxy-replacement; unset: past it with kube-proxy-replacement."""

    enable_sctp: bool = False
    """Track SCTP; otherwise SCTP packets are dropped."""

    monitor_aggregation: Annotated[str, RenamedFrom("monitor-aggregation-level")] = "medium"
    """Which packets are traced: none (every packet), low (every delivery), medium and maximum (new flows and
    changes)."""

    bpf_events_drop_enabled: bool = True
    """Send drop events to the monitor."""

    policy_audit_mode: bool = False
    """Forward packets that policies deny, and report them to the monitor."""

    bpf_events_policy_verdict_enabled: bool = True
    """Send policy verdicts of new flows, and of every denied packet, to the monitor."""

    bpf_events_trace_enabled: bool = True
    """Send trace events to the monitor, as selected by monitor-aggregation."""

    trace_sock: bool = True
    """Send events about sockets to the monitor: the backend that each is connected to."""

    @property
    def accelerates(self) -> bool:
        """Whether native devices get an XDP program."""
        return self.bpf_lb_acceleration != "disabled"

    @property
    def generic_xdp(self) -> bool:
        """Whether XDP runs in generic mode, without driver support."""
        return self.bpf_lb_acceleration in {"generic", "testing-only"}

    @property
    def notifications(self) -> MonitorNotifications:
        """The events that the programs send at the start."""
        flags = (
            NODE_NOTIFY_DROP * self.bpf_events_drop_enabled
            | NODE_NOTIFY_TRACE * self.bpf_events_trace_enabled
            | NODE_NOTIFY_POLICY_VERDICT * self.bpf_events_policy_verdict_enabled
            | NODE_NOTIFY_SOCK * self.trace_sock
            | NODE_AUDITS_POLICY * self.policy_audit_mode
        )
        return MonitorNotifications(flags, AGGREGATION[self.monitor_aggregation.lower()])

    def faults(self) -> Iterator[str]:
        if self.monitor_aggregation.lower() not in AGGREGATION:
            yield (
                f"monitor-aggregation={self.monitor_aggregation}: expected none, lowest, low, medium,"
                " maximum, or 0 to 4"
            )
        first, last = (*self.node_port_range, 0, 0)[:2]
        if len(self.node_port_range) != 2 or not 1 <= first <= last < _LAST_PORT:
            text = ",".join(map(str, self.node_port_range))
            yield f"node-port-range={text}: expected two ports such as 30000,32767"
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, Duration) and not 1 <= value < 1 << 31:
                name = field.replace("_", "-")
                yield f"{name}={value}: expected whole seconds, from 1s to 596523h"


class ProgramSettings(DatapathSettings, frozen=True):
    """The settings of the programs, with those that other cells determine (not options)."""

    marks_for_xfrm: bool = False
    """Mark packets from pods to other nodes' pods, so that XFRM encrypts them (IPsec)."""

    serves_outside: bool = True
    """Serve external clients: packets that arrive at native devices."""


class XfrmMarks(msgspec.Struct, frozen=True):
    """Whether the programs set marks for IPsec; provided by the cell that has the keys."""

    on: bool = False


class HostRouting(msgspec.Struct, frozen=True):
    """Whether packets between devices and pods bypass the host's stack (BPF host routing).

    As in Cilium 1.17, this requires kube-proxy-replacement: otherwise services may be implemented by
    netfilter rules, which need the stack. With IPsec packets never bypass it: the stack encrypts.
    """

    past_stack: bool = False
    marks: bool = False
    """Whether packets from pods to other nodes' pods are marked for XFRM."""
    serves_outside: bool = True
    """Whether external clients reach services through native devices."""

    @property
    def mode(self) -> str:
        """The mode as in Cilium's status."""
        return "BPF" if self.past_stack else "Legacy"


class ServicePrograms(msgspec.Struct, frozen=True):
    """The settings of the programs that services depend on."""

    port_range: tuple[int, int]
    """First and last node port."""
    acceleration: str
    """The value of bpf-lb-acceleration."""
    sctp: bool
    rejects: bool
    """Whether a client of a service without backends gets a reply."""
    trusts_external_ips: bool
    """Whether externalIPs that the node does not have are served."""

    @property
    def accelerates(self) -> bool:
        """Whether native devices get an XDP program."""
        return self.acceleration != "disabled"


def service_programs(settings: DatapathSettings) -> ServicePrograms:
    first, last = settings.node_port_range
    return ServicePrograms(
        port_range=(first, last),
        acceleration=settings.bpf_lb_acceleration,
        sctp=settings.enable_sctp,
        rejects=settings.service_no_backend_response == "reject",
        trusts_external_ips=settings.disable_external_ip_mitigation,
    )


def host_routing(
    settings: DatapathSettings,
    services: ServiceReach | None,
    ipsec: XfrmMarks | None,
    lifecycle: Lifecycle,
    log: Logger,
) -> HostRouting:
    """Derive the routing mode from the settings; log if BPF host routing was requested but is unavailable."""
    marks = ipsec is not None and ipsec.on
    can = services is not None and services.replaces_kube_proxy and not marks
    needs = "enable-ipsec=false" if marks else "kube-proxy-replacement=true"

    async def report() -> None:
        log.info(f"host routing by eBPF needs {needs}: packets pass the host's stack")

    if settings.enable_host_legacy_routing is False and not can:
        lifecycle.append(Hook("report how packets are routed", report))
    past_stack = can and not settings.enable_host_legacy_routing
    return HostRouting(past_stack, marks, services is None or services.outside)
