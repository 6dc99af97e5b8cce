"""Selects the events of ``hive monitor`` by kind, endpoint, pod, namespace, network and verdict."""

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Final, Protocol

from cells.observe.events import (
    AgentNotification,
    Drop,
    Event,
    LookupRecord,
    Lost,
    Packet,
    Raw,
    RequestRecord,
    Trace,
    TraceSock,
    Verdict,
    dissect,
)

VERDICTS: Final = ("forwarded", "dropped", "redirected", "audit", "error")
"""The verdicts of ``hubble observe --verdict``."""
_RECORD_VERDICTS: Final = {"Forwarded": "forwarded", "Denied": "dropped"}


class PodNames(Protocol):
    """Resolves endpoints and addresses to pods (``namespace/name``); empty if there is none."""

    def endpoint(self, number: int, /) -> str:
        """Return the pod of an endpoint of this node."""
        ...

    def pod(self, address: str, /) -> str:
        """Return the pod with an address, on any node."""
        ...


def verdict_of(event: Event) -> str:
    """Return the verdict of an event, one of VERDICTS; empty without one."""
    match event:
        case Drop():
            return "dropped"
        case Trace():
            return "forwarded"
        case Verdict() if event.audited:
            return "audit"
        case Verdict():
            return "dropped" if event.verdict < 0 else "redirected" if event.verdict else "forwarded"
        case RequestRecord() | LookupRecord():
            return _RECORD_VERDICTS.get(event.verdict, "error")
    return ""


@dataclass(frozen=True)
class EventFilter:
    """A filter of events; lost-event notifications always match."""

    kinds: tuple[type, ...] = ()
    """Event types; empty: all."""
    source: frozenset[int] = frozenset()
    destination: frozenset[int] = frozenset()
    related: frozenset[int] = frozenset()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    verdicts: frozenset[str] = frozenset()
    pods: frozenset[str] = frozenset()
    """Names of pods, with or without their namespaces, on either end."""
    namespaces: frozenset[str] = frozenset()
    """Namespaces of pods on either end."""
    names: PodNames | None = None
    """Resolves the pods for ``pods`` and ``namespaces``."""

    def matches(self, event: Event) -> bool:
        """Whether the event matches all criteria."""
        if isinstance(event, Lost):
            return True
        if self.kinds and not isinstance(event, self.kinds):
            return False
        if self.verdicts and verdict_of(event) not in self.verdicts:
            return False
        return self._matches_endpoints(event) and self._matches_pods(event)

    def _matches_endpoints(self, event: Event) -> bool:
        if isinstance(event, AgentNotification | Raw | Lost):
            return not (self.source or self.destination or self.related or self.networks)
        if isinstance(event, RequestRecord | LookupRecord):
            return self._record_matches_endpoints(event)
        if isinstance(event, TraceSock):
            endpoints = self.source or self.destination or self.related
            return not endpoints and (
                not self.networks or any(event.address in each for each in self.networks)
            )
        source, destination = event.source, getattr(event, "destination", 0)
        if isinstance(event, Verdict) and not event.egress:
            source, destination = 0, event.source
        elif source == destination:
            source = 0  # an event of the receiver's program, which does not have the sender
        return (
            (not self.source or source in self.source)
            and (not self.destination or destination in self.destination)
            and (not self.related or not self.related.isdisjoint({event.source, destination}))
            and (not self.networks or self._matches_networks(dissect(event.packet)))
        )

    def _matches_pods(self, event: Event) -> bool:
        if self.names is None or not (self.pods or self.namespaces):
            return True
        return any(
            (not self.pods or not self.pods.isdisjoint({name, name.partition("/")[2]}))
            and (not self.namespaces or name.partition("/")[0] in self.namespaces)
            for name in filter(None, _pods_of(event, self.names))
        )

    def _record_matches_endpoints(self, event: RequestRecord | LookupRecord) -> bool:
        ends = event.source, event.destination
        endpoints = {one.endpoint for one in ends}
        return (
            (not self.source or event.source.endpoint in self.source)
            and (not self.destination or event.destination.endpoint in self.destination)
            and (not self.related or not self.related.isdisjoint(endpoints))
            and (
                not self.networks
                or any(ip_address(one.address) in network for network in self.networks for one in ends)
            )
        )

    def _matches_networks(self, packet: Packet | None) -> bool:
        ends = () if packet is None else (packet.source, packet.destination)
        return any(end is not None and end in network for network in self.networks for end in ends)


def _pods_of(event: Event, names: PodNames) -> Iterator[str]:
    """Return the pods on both ends: by number those of this node, by address all."""
    if isinstance(event, RequestRecord | LookupRecord):
        for end in (event.source, event.destination):
            yield names.endpoint(end.endpoint)
            yield names.pod(end.address)
    elif isinstance(event, TraceSock):
        yield names.pod(str(event.address))
    elif isinstance(event, Drop | Trace | Verdict):
        yield names.endpoint(event.source)
        yield names.endpoint(getattr(event, "destination", 0))
        packet = dissect(event.packet)
        for address in () if packet is None else (packet.source, packet.destination):
            if address is not None:
                yield names.pod(str(address))
