"""Creates Kubernetes events for dropped packets of pods, which ``kubectl describe pod`` shows.

Why:    owners of a pod see its events, but rarely the node's flows. At most one event per pod and interval is
        created, so that a flood of drops does not load the API server.
Source: Cilium 1.17, hubble-drop-events, -interval and -reasons: type Warning, reason PacketDrop.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from cells.cluster.identity.numbers import RESERVED_IDENTITIES, UNKNOWN
from cells.config import AgentConfig
from cells.hubble.hubble import Hubble
from cells.kubernetes.api_server import KubernetesAPI
from cells.kubernetes.objects.core import PODS, Pod
from lifecycle import Duration, Jobs, Logger, Settings, Table, minutes

if TYPE_CHECKING:  # imported only if Hubble is enabled
    from cells.hubble.flow import Flow, FlowEndpoint

CONTROLLER: Final = "cilium"
WAITING: Final = 256
"""Maximum number of events queued for the API server; other pods are reported at their next drop."""
_DROPPING: Final = frozenset((b"\1", b"\5"))
"""Message types (first bytes) of records that may be drops: drop notifications and policy verdicts."""
_PRUNED_AT: Final = 1024


class DropEventSettings(Settings, frozen=True):
    """Which drops are events of Kubernetes."""

    hubble_drop_events: bool = False
    """Report drops of pods' packets as events of Kubernetes, on the pods."""

    hubble_drop_events_interval: Duration = minutes(2)
    """Time between two such events of one pod."""

    hubble_drop_events_reasons: tuple[str, ...] = ("auth_required", "policy_denied")
    """Reasons of drops that are reported, such as policy_denied or policy_deny; unknown ones are ignored."""

    def validate(self) -> None:
        """Refuse an interval that is not positive. Raises ValueError (one line)."""
        if self.hubble_drop_events_interval <= 0:
            raise ValueError("hubble-drop-events-interval: expected more than 0")


class DropEvents:
    """Creates events for drops if Hubble is enabled and there is an API server."""

    def __init__(
        self,
        hubble: Hubble,
        settings: DropEventSettings,
        agent: AgentConfig,
        api: KubernetesAPI,
        pods: Table[tuple[str, str], Pod],
        *,
        jobs: Jobs,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._agent = agent
        self._api = api
        self._pods = pods
        self._log = log
        self._reported: dict[tuple[str, str], float] = {}
        """Time of the last event by pod, in seconds of the monotonic clock."""
        if settings.hubble_drop_events and hubble.observer is not None:
            self._flows = hubble.observer
            jobs.one_shot("report drops", self._run)

    async def _run(self) -> None:
        if not self._api.enabled:
            self._log.warning("hubble-drop-events: there is no API server to report drops to")
            return
        found, waiting = anyio.create_memory_object_stream["Flow"](WAITING)
        async with found, waiting, anyio.create_task_group() as tasks:
            tasks.start_soon(self._write, waiting)
            await self._watch(found)

    async def _watch(self, found: MemoryObjectSendStream[Flow]) -> None:
        """Queue the first drop of each pod in an interval.

        If the queue is full because of a slow API server, the pod is reported at its next drop.
        """
        from cells.hubble.enums import FlowVerdict
        from cells.hubble.flow import Flow

        reasons = self._reasons()
        async for batch in self._flows.follow(_DROPPING):
            now = anyio.current_time()
            for seen in batch:
                flow = seen.event
                if not isinstance(flow, Flow) or flow.verdict != FlowVerdict.DROPPED:
                    continue
                if flow.drop_reason_desc in reasons and self._due(flow, now):
                    try:
                        found.send_nowait(flow)
                    except anyio.WouldBlock:
                        del self._reported[_dropping_pod(flow)]

    def _reasons(self) -> frozenset[int]:
        """Return the numbers of the reported drop reasons; unknown names are logged, as in Cilium."""
        from cells.hubble.enums import DropReason

        known = {reason.name: int(reason) for reason in DropReason}
        found = set[int]()
        for name in self._settings.hubble_drop_events_reasons:
            if (number := known.get(name.upper())) is None:
                self._log.warning("hubble-drop-events-reasons: unknown drop reason is ignored", reason=name)
            else:
                found.add(number)
        return frozenset(found)

    def _due(self, flow: Flow, now: float) -> bool:
        pod = _dropping_pod(flow)
        oldest = now - self._settings.hubble_drop_events_interval
        if not pod[1] or self._reported.get(pod, -math.inf) > oldest:
            return False
        if len(self._reported) >= _PRUNED_AT:
            self._reported = {key: at for key, at in self._reported.items() if at > oldest}
        self._reported[pod] = now
        return True

    async def _write(self, waiting: MemoryObjectReceiveStream[Flow]) -> None:
        from cells.kubernetes.client.errors import KubernetesError
        from cells.kubernetes.object_events import EventRecorder, Regarding

        recorder = EventRecorder(self._api.client, CONTROLLER, self._agent.node_name, again=0.0)
        async for flow in waiting:
            namespace, name = _dropping_pod(flow)
            pod = self._pods.get((namespace, name))
            uid = pod.metadata.uid if pod is not None else ""
            about = Regarding(PODS, name, namespace, uid)
            await self._api.reachable()
            try:
                await recorder.report(
                    about, "PacketDrop", drop_note(flow), action="PacketDrop", kind="Warning"
                )
            except KubernetesError as error:
                self._log.warning("drop is not reported", pod=f"{namespace}/{name}", error=str(error))


def drop_note(flow: Flow) -> str:
    """Format the event's message as Cilium does; an unknown direction counts as egress."""
    from cells.hubble.enums import DropReason

    try:
        reason = DropReason(flow.drop_reason_desc).name.lower()
    except ValueError:
        reason = str(flow.drop_reason_desc)
    source, destination = (flow.IP.source, flow.IP.destination) if flow.IP is not None else ("", "")
    if _is_incoming(flow):
        text = f"Incoming packet dropped ({reason}) from {_peer(flow.source, source)}"
    else:
        text = f"Outgoing packet dropped ({reason}) to {_peer(flow.destination, destination)}"
    return f"{text} {_protocol(flow)}".rstrip()


def _is_incoming(flow: Flow) -> bool:
    from cells.hubble.enums import TrafficDirection

    return flow.traffic_direction == TrafficDirection.INGRESS


def _dropping_pod(flow: Flow) -> tuple[str, str]:
    """Return namespace and name of the pod that the event is about; empty if no pod is involved."""
    endpoint = flow.destination if _is_incoming(flow) else flow.source
    return (endpoint.namespace, endpoint.pod_name) if endpoint is not None else ("", "")


def _peer(endpoint: FlowEndpoint | None, address: str) -> str:
    if endpoint is not None and endpoint.pod_name:
        return f"{endpoint.namespace}/{endpoint.pod_name} ({address})"
    labels = RESERVED_IDENTITIES.get(endpoint.identity) if endpoint is not None else None
    if labels:
        return f"{labels[0].removeprefix('reserved:')} ({address})"
    if endpoint is None or endpoint.identity == UNKNOWN:
        return f"unknown ({address})"
    return address


def _protocol(flow: Flow) -> str:
    l4 = flow.l4
    if l4 is None:
        return ""
    for name, record in (("TCP", l4.TCP), ("UDP", l4.UDP)):
        if record is not None:
            return f"{name}/{record.destination_port}"
    return next((name for name in ("ICMPv4", "ICMPv6", "SCTP") if getattr(l4, name) is not None), "")
