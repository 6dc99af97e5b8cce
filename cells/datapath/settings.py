"""Settings of the datapath, and what follows from them and others'."""

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
"""Names of the levels of monitor-aggregation."""
_LAST_PORT: Final = 65535


class MonitorNotifications(msgspec.Struct, frozen=True):
    """Which packet events the programs send, and whether policy is only audited.

    Flags of NodeConfig, and the level of aggregation, 0 to 4.
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
    """Lifetime of an idle TCP connection's choice of a service backend."""

    bpf_ct_timeout_service_any: Duration = seconds(60)
    """The same for any other flow."""

    bpf_ct_timeout_service_tcp_grace: Duration = seconds(60)
    """How long after a TCP connection closes one with the same ports still goes to its backend."""

    service_no_backend_response: Literal["reject", "drop"] = "reject"
    """What a client of a service without backends gets: reject refuses the connection (ICMP port unreachable,
    ECONNREFUSED at a socket), drop does not answer (EHOSTUNREACH at a socket)."""

    disable_external_ip_mitigation: bool = True
    """Serve all externalIPs to pods and to the node, as Kubernetes asks; false: only those that the node has,
    so that no Service draws traffic to an address of others (CVE-2020-8554)."""

    ipv4_service_loopback_address: IPv4Address = IPv4Address("169.254.42.1")
    """Source address of a pod's packets that a service sends back to the same pod."""

    node_port_range: tuple[int, ...] = (30000, 32767)
    """First and last port for node ports; translated flows use the ports above."""

    bpf_lb_acceleration: Annotated[
        Literal["disabled", "native", "best-effort", "generic", "testing-only"],
        RenamedFrom("node-port-acceleration"),
    ] = "disabled"
    """Serve clients outside in devices' drivers (XDP): native on all that packets leave the node through,
    best-effort where the driver can; generic, or testing-only, needs no driver and is slower than without."""

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
    """Allow what policies deny, and report it to the monitor."""

    bpf_events_policy_verdict_enabled: bool = True
    """Send policy verdicts of new flows, and of every denied packet, to the monitor."""

    bpf_events_trace_enabled: bool = True
    """Send trace events to the monitor, as monitor-aggregation has it."""

    trace_sock: bool = True
    """Send the backend each socket is connected to, to the monitor."""

    @property
    def accelerates(self) -> bool:
        """Whether there are programs in devices' drivers."""
        return self.bpf_lb_acceleration != "disabled"

    @property
    def generic_xdp(self) -> bool:
        """Whether those run before the stack instead, whatever the driver."""
        return self.bpf_lb_acceleration in {"generic", "testing-only"}

    @property
    def notifications(self) -> MonitorNotifications:
        """What the programs report from the start on."""
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
    """Those, and what the programs do by settings of other cells: no options."""

    marks_for_xfrm: bool = False
    """Mark what pods send to other nodes' pods for the kernel to encrypt by IPsec."""

    serves_outside: bool = True
    """Serve clients outside the cluster, who come by the node's devices."""


class XfrmMarks(msgspec.Struct, frozen=True):
    """Whether programs mark what the kernel is to encrypt and decrypt by IPsec; from who has its keys."""

    on: bool = False


class HostRouting(msgspec.Struct, frozen=True):
    """How packets get from devices to pods and back: past the host's stack, or through it.

    As in Cilium 1.17, past it only with kube-proxy-replacement: else services may be in rules that only the
    stack walks. With IPsec never: the stack encrypts.
    """

    past_stack: bool = False
    marks: bool = False
    """What pods send to other nodes' pods is marked for the stack to encrypt."""
    serves_outside: bool = True
    """Clients outside the cluster get to services by the node's devices."""

    @property
    def mode(self) -> str:
        """As the status has it."""
        return "BPF" if self.past_stack else "Legacy"


class ServicePrograms(msgspec.Struct, frozen=True):
    """How the programs serve services."""

    port_range: tuple[int, int]
    """Of node ports, the first and the last."""
    acceleration: str
    """Whether programs in devices' drivers serve too, as bpf-lb-acceleration has it."""
    sctp: bool
    rejects: bool
    """Whether a client of a service without backends gets an answer."""
    trusts_external_ips: bool
    """Whether pods reach external addresses that are not this cluster's."""

    @property
    def accelerates(self) -> bool:
        """Whether there are programs in devices' drivers."""
        return self.acceleration != "disabled"


def service_programs(settings: DatapathSettings) -> ServicePrograms:
    """As the settings have it."""
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
    """By the settings; that it was asked for in vain is logged."""
    marks = ipsec is not None and ipsec.on
    can = services is not None and services.replaces_kube_proxy and not marks
    needs = "enable-ipsec=false" if marks else "kube-proxy-replacement=true"

    async def report() -> None:
        log.info(f"host routing by eBPF needs {needs}: packets pass the host's stack")

    if settings.enable_host_legacy_routing is False and not can:
        lifecycle.append(Hook("report how packets are routed", report))
    past_stack = can and not settings.enable_host_legacy_routing
    return HostRouting(past_stack, marks, services is None or services.outside)
