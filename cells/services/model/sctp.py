"""Ports in SCTP that nobody reaches: its checksum is over the whole packet, so ports are not translated.

Gives: sctp_faults_of.
"""

from __future__ import annotations

from collections.abc import Iterator

from cells.kubernetes import Service
from cells.services.model.options import LoadBalancerOptions


def sctp_faults_of(service: Service, options: LoadBalancerOptions) -> Iterator[tuple[int, str]]:
    """Ports that nobody reaches, with the reason, for the log. A named target may be any number."""
    if service.spec.type == "ExternalName" or service.spec.cluster_ip == "None":
        return
    for port in service.spec.ports or ():
        if port.protocol != "SCTP":
            continue
        if not options.enable_sctp:
            yield port.port, "enable-sctp is off: SCTP is dropped"
            continue
        target = 0 if isinstance(port.target_port, str) else port.target_port or port.port
        served = [port.port]
        if options.enable_node_port and port.node_port:
            served.append(port.node_port)
        for number in served:
            if target and number != target:
                yield number, f"SCTP keeps its port, and the target's is {target}: expected one number"
