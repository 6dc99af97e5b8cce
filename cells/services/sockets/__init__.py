"""Services at the socket: who connects to one talks to a backend from the start.

Edge:   programs attached to the root of the control groups, for every process of the node and its pods; they
        read the maps of the services.
Needs:  AgentConfig, DatapathSettings, ServiceSettings, Maps.   Gives: SocketLB.
Why:    a connection is translated once, before there is a packet, and costs what a direct one costs. The
        links are pinned: programs serve on while no agent runs, and another build replaces them in place.

Settings: bpf-lb-sock, bpf-lb-sock-hostns-only, cgroup-root, node-port-bind-protection.
"""

from collections.abc import Iterable

from cells.observe.metrics import Collector, Family, counter
from cells.services.sockets.kernel import KernelSocketHooks, KernelSockets, SocketHooks, SocketKernel
from cells.services.sockets.loader import SocketLB
from cells.services.sockets.settings import SocketLBSettings
from cells.services.sockets.termination import SocketTermination
from lifecycle import Member, config, invoke, module, provide

__all__ = ["SocketHooks", "SocketKernel", "SocketLB", "SocketLBSettings", "SocketTermination", "cell"]


def socket_metrics(sockets: SocketLB, termination: SocketTermination) -> Member[Collector]:
    """What somebody took off, and what was ended, as metrics."""

    async def collect() -> Iterable[Family]:
        text = "Programs at sockets that someone else took off or replaced."
        ended = "Sockets ended because the backend they were connected to was removed."
        return [
            counter("hive_socket_lb_ended_total", ended, termination.ended),
            counter("hive_socket_lb_faults_total", text, sockets.found),
        ]

    return Collector("socket-lb", collect)


cell = module(
    "socket-lb",
    "Services at the socket",
    config(SocketLBSettings),
    provide(SocketLB, KernelSocketHooks.provided, SocketTermination, KernelSockets.provided, socket_metrics),
    invoke(SocketLB, SocketTermination),
)
