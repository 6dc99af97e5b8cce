"""``hive observe --why``: prints below a drop the deciding policy and what would allow it, by the agent."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import click

from cells.hubble.enums import DropReason, FlowVerdict, TrafficDirection
from cells.hubble.flow import Flow, FlowEndpoint
from hive.client import DEFAULT_SOCKET, RefusedError, ask
from hive.observe.drop_reason import reason_text
from hive.observe.hubble_server import CommandError
from hive.policy.command import direction_lines

BY_POLICY: Final = frozenset({DropReason.POLICY_DENIED, DropReason.POLICY_DENY})
FRESH: Final = 5.0
"""Seconds for which an answer is reused for drops of the same kind."""
MOST_ANSWERS: Final = 1000
INDENT: Final = "    "


class Question(NamedTuple):
    """The agent's query for a drop."""

    source: str
    destination: str
    port: str
    protocol: str


class Answer(NamedTuple):
    """The agent's explanation of a drop, and its time in seconds of the monotonic clock."""

    lines: tuple[str, ...]
    at: float


class DropReasons:
    """Explains drops by the current policies; queries the agent once in five seconds for each kind."""

    def __init__(self) -> None:
        self._socket = Path(os.environ.get("CILIUM_SOCK", DEFAULT_SOCKET))
        self._answers: dict[tuple[Question, int], Answer] = {}
        self._printed: tuple[str, ...] = ()

    def lines(self, flow: Flow) -> Sequence[str]:
        """Return the lines below a flow; none if it was not dropped, or equals the previous drop.

        Raises CommandError if no agent answers.
        """
        if flow.verdict != FlowVerdict.DROPPED:
            return ()
        lines = tuple(INDENT + line for line in self._lines(flow))
        if lines == self._printed:
            return ()
        self._printed = lines
        return lines

    def _lines(self, flow: Flow) -> tuple[str, ...]:
        reason = flow.drop_reason_desc
        if flow.l7 is None and reason and reason not in BY_POLICY:
            return (f"not caused by policy: {reason_text(reason)}",)
        question = question_of(flow)
        if question is None:
            return ("not explained: a packet without addresses",)
        key, now = (question, flow.traffic_direction), time.monotonic()
        known = self._answers.get(key)
        if known is None or now - known.at >= FRESH:
            if len(self._answers) >= MOST_ANSWERS:
                self._answers.clear()
            known = self._answers[key] = Answer(tuple(self._answer(question, flow)), now)
        return known.lines

    def _answer(self, question: Question, flow: Flow) -> Iterator[str]:
        asked = urlencode({name: value for name, value in question._asdict().items() if value})
        try:
            found: Mapping[str, Any] = ask(f"/hive/policy/explain?{asked}", self._socket)
        except RefusedError as refused:
            yield f"not explained: {refused.reason}"
            return
        except click.ClickException as error:
            raise CommandError(f"--why asks the agent of this node: {error.message}") from None
        direction = _DIRECTIONS.get(flow.traffic_direction)
        ways = found["ways"]
        decided = [one for way in ways for one in way["directions"] if one["direction"] == direction]
        explaining = [one for one in decided if one["verdict"] != "allow" or (flow.l7 and one["requests"])]
        for one in explaining:
            yield from direction_lines(one)
        if not explaining:
            if decided:
                yield f"allowed now ({found['headline']}): policies or labels have changed since"
            for way in ways:
                yield from filter(None, (*way["elsewhere"], way["problem"], way["note"]))
        yield from (f"note: {note}" for note in found["notes"])


_DIRECTIONS: Final[Mapping[int, str]] = {
    TrafficDirection.INGRESS: "ingress",
    TrafficDirection.EGRESS: "egress",
}


def question_of(flow: Flow) -> Question | None:
    """Return the query for a packet, or None if it has no addresses."""
    if flow.IP is None:
        return None
    source, destination = _end(flow.source, flow.IP.source), _end(flow.destination, flow.IP.destination)
    port, protocol = "", ""
    if (l4 := flow.l4) is not None:
        for name, ports in (("TCP", l4.TCP), ("UDP", l4.UDP), ("SCTP", l4.SCTP)):
            if ports is not None:
                port, protocol = str(ports.destination_port), name
        for name, message in (("ICMP", l4.ICMPv4), ("ICMPV6", l4.ICMPv6)):
            if message is not None:
                port, protocol = str(message.type), name
    return Question(source, destination, port, protocol)


def _end(endpoint: FlowEndpoint | None, address: str) -> str:
    if endpoint is not None and endpoint.pod_name:
        return f"pod/{endpoint.namespace}/{endpoint.pod_name}"
    return address
