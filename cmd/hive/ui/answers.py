"""Answers the queries of the page of ``hive ui`` with one node's agent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import anyio
import anyio.to_thread
import click

from cells.hubble.rpc.messages import RpcError
from hive.agents import Answer
from hive.client import RefusedError, ask, module_health
from hive.observe.hubble_client import ConnectError
from hive.ui.flows import FlowMap

AT_ONCE: Final = 4
"""Number of queries to the agent in parallel."""
PEERS_FRESH: Final = 30.0
"""Seconds for which WireGuard's peers are cached."""


class NodeAnswers:
    """Answers for one node."""

    def __init__(self, agent_socket: Path, hubble: str, timeout: float) -> None:
        self._ask: Callable[..., Any] = partial(ask, agent_socket=agent_socket, timeout=timeout)
        self._health = agent_socket.with_name("health.sock")
        self._timeout = timeout
        self._flows = FlowMap(hubble, timeout)
        self._known_peers: list[Any] = []
        self._peers_at: float | None = None
        self._limiter: anyio.CapacityLimiter | None = None
        self._answers: Mapping[str, Callable[[Mapping[str, str]], Any]] = {
            "flows": lambda _: self._flows.summary(),
            "policy": self._policy,
            "explain": self._explain,
            "nodes": self._nodes,
            "inside": self._inside,
            "health": lambda _: module_health(self._ask),
        }

    async def answer(self, name: str, query: Mapping[str, str]) -> Answer:
        """Answer a query in a thread."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(AT_ONCE)
        return await anyio.to_thread.run_sync(self.answer_now, name, query, limiter=self._limiter)

    def answer_now(self, name: str, query: Mapping[str, str]) -> Answer:
        """Return an HTTP status and the body; errors are ``{"error": ...}``."""
        if name not in self._answers:
            return 404, {"error": f"unknown question {name[:20]}"}
        try:
            return 200, self._answers[name](query)
        except (click.ClickException, ConnectError, RpcError) as error:
            status = error.status if isinstance(error, RefusedError) and error.status < 500 else 502
            return status, {"error": _reason(error)}

    def _policy(self, query: Mapping[str, str]) -> Any:
        return self._ask(f"/hive/policy/matrix?{_chosen(query, 'from', 'to', 'most')}")

    def _explain(self, query: Mapping[str, str]) -> Any:
        return self._ask(
            f"/hive/policy/explain?{_chosen(query, 'source', 'destination', 'port', 'protocol')}"
        )

    def _nodes(self, _query: Mapping[str, str]) -> Any:
        """Return this node's view of the nodes; disabled features are None."""
        nodes = self._ask("/v1/cluster/nodes")
        view = {
            "nodes": nodes,
            "status": self._ask("/v1/healthz"),
            "health": ask("/v1beta/status", self._health, timeout=self._timeout)
            if self._health.exists()
            else None,
            "bgp": self._bgp(),
            "wireguard": None,
        }
        if ((view["status"].get("encryption") or {}).get("mode")) == "Wireguard":
            view["wireguard"] = self._peers()
        return {"views": {str(nodes.get("self", "")).rpartition("/")[2]: view}, "problems": {}}

    def _peers(self) -> Any:
        """Return WireGuard's peers, which are only in the verbose status."""
        if self._peers_at is None or time.monotonic() - self._peers_at > PEERS_FRESH:
            found = self._ask("/v1/debuginfo").get("encryption") or {}
            interfaces = (found.get("wireguard") or {}).get("interfaces") or ()
            self._known_peers = [peer for one in interfaces for peer in one.get("peers") or ()]
            self._peers_at = time.monotonic()
        return self._known_peers

    def _bgp(self) -> Any:
        try:
            return self._ask("/v1/bgp/peers") or []
        except RefusedError as error:
            if error.status == 501:
                return None
            raise

    def _inside(self, _query: Mapping[str, str]) -> Any:
        return {
            "graph": self._ask("/hive/graph"),
            "timeline": self._ask("/hive/timeline"),
            "health": module_health(self._ask),
        }


def _reason(error: click.ClickException | ConnectError | RpcError) -> str:
    if isinstance(error, ConnectError):
        return "the agent serves no flows: set enable-hubble=true (chart: hubble.enabled), and restart it"
    if isinstance(error, RefusedError):
        return error.reason
    return error.message


def _chosen(query: Mapping[str, str], *names: str) -> str:
    return urlencode({name: query[name] for name in names if query.get(name)})
