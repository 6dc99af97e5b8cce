"""Whether pods and native devices pass each other packets, past the host's stack.

For:    Datapath, status.   Needs: DatapathSettings, ServiceSettings.   Gives: HostRouting, host_routing().
Source: Cilium 1.17: host routing needs kube-proxy-replacement, for else services may be in rules that only
        the stack walks, and masquerading by eBPF, which there is no other of here.
"""

from __future__ import annotations

from dataclasses import dataclass

from cells.datapath.settings import DatapathSettings
from cells.services.settings import ServiceSettings
from lifecycle import Hook, Lifecycle, Logger


@dataclass(frozen=True, slots=True)
class HostRouting:
    """How packets get from devices to pods and back."""

    past_stack: bool = False

    @property
    def mode(self) -> str:
        """As the status has it."""
        return "BPF" if self.past_stack else "Legacy"


def host_routing(
    settings: DatapathSettings, services: ServiceSettings | None, lifecycle: Lifecycle, log: Logger
) -> HostRouting:
    """By the settings; what was asked for in vain is logged."""
    replaces = services is not None and services.kube_proxy_replacement

    async def tell() -> None:
        log.info("host routing by eBPF needs kube-proxy-replacement=true: packets pass the host's stack")

    if settings.enable_host_legacy_routing is False and not replaces:
        lifecycle.append(Hook("tell how packets are routed", tell))
    return HostRouting(replaces and not settings.enable_host_legacy_routing)
