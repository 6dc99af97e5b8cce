"""The rules that decided a policy verdict, queried from the agent.

An event has only the verdict. If rules have changed since, the current ones are shown.
"""

import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import click

from cells.observe.events import Verdict
from cells.observe.events.text import dissect
from hive.client import ask

RETAINED: Final = 2.0
"""Seconds for which an answer is reused."""
MOST: Final = 1024

Question = tuple[int, str, int, int, int, str]


class Rules:
    """Answers of the agent, cached for some time; after a failure the agent is not queried again."""

    def __init__(self, agent_socket: Path) -> None:
        self._socket = agent_socket
        self._known: dict[Question, tuple[float, list[dict[str, Any]]]] = {}
        self._silent = False

    def of(self, verdict: Verdict) -> list[dict[str, Any]]:
        """Return ``rule`` as text and ``labels`` of each deciding rule."""
        direction = "egress" if verdict.egress else "ingress"
        packet = dissect(verdict.packet)
        peer = (packet.destination if verdict.egress else packet.source) if packet is not None else None
        address = str(peer) if peer is not None else ""
        question = (
            verdict.source,
            direction,
            verdict.remote_identity,
            verdict.protocol,
            verdict.port,
            address,
        )
        now = time.monotonic()
        held = self._known.get(question)
        if held is not None and now - held[0] < RETAINED:
            return held[1]
        if self._silent:
            return []
        names = ("endpoint", "direction", "identity", "protocol", "port", "address")
        query = urlencode(dict(zip(names, question, strict=True)))
        try:
            found: list[dict[str, Any]] = ask(f"/hive/policy/verdict?{query}", self._socket)["rules"]
        except click.ClickException as error:
            click.echo(f"rules are not shown: {error.message}", err=True)
            self._silent = True
            return []
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[question] = (now, found)
        return found


def rules_text(verdict: Verdict, rules: list[dict[str, Any]]) -> str:
    """Return the text below the line of a verdict: the deciding rules."""
    if rules:
        return ", by " + "; ".join(one["rule"] for one in rules)
    return ", by no rule: none allows it" if verdict.verdict < 0 else ""
