"""EndpointSlices to backends, by the port name they serve.

Source: discovery.k8s.io/v1, KEP-1669 (terminating endpoints), KEP-2433 (topology hints).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cells.kubernetes import EndpointConditions, EndpointSlice
from cells.services.model.options import LoadBalancerOptions
from cells.services.model.types import (
    ANY_PROTOCOL,
    PROTOCOLS,
    Address,
    Backend,
    BackendState,
    parse_address,
)

Backends = Mapping[str, tuple[Backend, ...]]
"""Backends by port name, in order of address."""


def state_of(conditions: EndpointConditions, options: LoadBalancerOptions) -> BackendState | None:
    """The state of an endpoint, None when it is no backend at all.

    Not ready and serving no more: none. Not ready, serving and terminating: connections there go on. What
    is not said not to be ready is ready.
    """
    if conditions.ready is not False:
        return BackendState.ACTIVE
    if not options.enable_k8s_terminating_endpoint or not conditions.serving:
        return None
    return BackendState.TERMINATING if conditions.terminating else BackendState.ACTIVE


def backends_of(slices: Iterable[EndpointSlice], options: LoadBalancerOptions) -> Backends:
    """The backends of a service's slices. An address in several slices is active if one says so."""
    found: dict[str, dict[Address, Backend]] = {}
    for slice_ in slices:
        for backend in _of_slice(slice_, options):
            held = found.setdefault(backend.port_name, {}).get(backend.address)
            if held is None or backend.state < held.state:
                found[backend.port_name][backend.address] = backend
    return {
        name: tuple(sorted(backends.values(), key=lambda one: (one.address.ip.version, one.address)))
        for name, backends in found.items()
    }


def _of_slice(slice_: EndpointSlice, options: LoadBalancerOptions) -> Iterable[Backend]:
    version = {"IPv4": 4, "IPv6": 6}.get(slice_.address_type)
    for endpoint in slice_.endpoints or ():
        state = state_of(endpoint.conditions, options)
        if state is None or version is None:
            continue
        hints = endpoint.hints.for_zones if endpoint.hints is not None else None
        for text in endpoint.addresses or ():
            address = parse_address(text)
            if address is None or address.version != version:
                continue
            for port in slice_.ports or ():
                number = PROTOCOLS.get(port.protocol or "TCP")
                if port.port is None or number is None:
                    continue
                protocol = number if options.bpf_lb_proto_diff else ANY_PROTOCOL
                yield Backend(
                    address=Address(address, port.port, protocol),
                    state=state,
                    node=endpoint.node_name or "",
                    port_name=port.name or "",
                    zone=endpoint.zone or "",
                    hinted_zones=tuple(zone.name for zone in hints) if hints else None,
                )
