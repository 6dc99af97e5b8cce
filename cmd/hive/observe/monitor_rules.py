"""Queries the rules that decided a policy verdict from the agent.

Events have only the verdict. If rules have changed since, the current ones are shown.
"""

import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import click

from cells.observe.events import Verdict
from cells.observe.events.text import dissect
from hive.client import ask

CACHE_SECONDS: Final = 2.0
"""Seconds for which an answer is reused."""
MAX_CACHED: Final = 1024

VerdictQuery = tuple[int, str, int, int, int, str]


class DecidingRules:
    """Queries deciding rules and caches them; after a failure it no longer queries."""

    def __init__(self, agent_socket: Path) -> None:
        self._socket = agent_socket
        self._cached: dict[VerdictQuery, tuple[float, list[dict[str, Any]]]] = {}
        self._failed = False

    def deciding(self, verdict: Verdict) -> list[dict[str, Any]]:
        """Return ``rule`` as text and ``labels`` of each deciding rule."""
        direction = "egress" if verdict.egress else "ingress"
        packet = dissect(verdict.packet)
        peer = (packet.destination if verdict.egress else packet.source) if packet is not None else None
        address = str(peer) if peer is not None else ""
        query_key = (
            verdict.source,
            direction,
            verdict.remote_identity,
            verdict.protocol,
            verdict.port,
            address,
        )
        now = time.monotonic()
        cached = self._cached.get(query_key)
        if cached is not None and now - cached[0] < CACHE_SECONDS:
            return cached[1]
        if self._failed:
            return []
        names = ("endpoint", "direction", "identity", "protocol", "port", "address")
        query = urlencode(dict(zip(names, query_key, strict=True)))
        try:
            found: list[dict[str, Any]] = ask(f"/hive/policy/verdict?{query}", self._socket)["rules"]
        except click.ClickException as error:
            click.echo(f"rules are not shown: {error.message}", err=True)
            self._failed = True
            return []
        if len(self._cached) >= MAX_CACHED:
            self._cached.clear()
        self._cached[query_key] = (now, found)
        return found


def rules_text(verdict: Verdict, rules: list[dict[str, Any]]) -> str:
    """Return the text below the line of a verdict: the deciding rules."""
    if rules:
        return ", by " + "; ".join(one["rule"] for one in rules)
    return ", by no rule: none allows it" if verdict.verdict < 0 else ""
