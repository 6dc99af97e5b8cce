"""Answers the page of ``hive ui``: GET only, to who has the token, from the agent's unix sockets.

Any process that can connect to loopback can ask here, also a web page with a name that leads to 127.0.0.1
(DNS rebinding). So the path begins with a random token, and the Host has to be a name of loopback.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Final
from urllib.parse import urlencode

import anyio
import anyio.to_thread
import click

from cells.hubble.rpc.grpc import RpcError
from hive.client import RefusedError, ask
from hive.observe.hubble_client import ConnectError
from hive.ui.flows import FlowMap
from lifecycle.graph import page_part, read_graph, read_timeline
from lifecycle.http import Request, Response

LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
AT_ONCE: Final = 4
"""Questions to the agent."""
SCRIPTS: Final = ("map.js", "views.js", "main.js")
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; frame-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Bridge:
    """The handler of an HttpServer."""

    def __init__(self, token: str, agent_socket: Path, hubble: str, timeout: float) -> None:
        self._token = token
        self._ask: Callable[..., Any] = partial(ask, agent_socket=agent_socket, timeout=timeout)
        self._health = agent_socket.with_name("health.sock")
        self._timeout = timeout
        self._flows = FlowMap(hubble, timeout)
        self._limiter = anyio.CapacityLimiter(AT_ONCE)
        self._answers: Mapping[str, Callable[[Mapping[str, str]], Any]] = {
            "flows": lambda _: self._flows.summary(),
            "policy": self._policy,
            "explain": self._explain,
            "nodes": self._nodes,
            "inside": self._inside,
        }

    async def handle(self, request: Request) -> Response:
        """One request."""
        if (refused := self._refused(request)) is not None:
            return refused
        name = request.path.removeprefix(f"/{self._token}/")
        if not name:
            return _page()
        if name not in self._answers:
            return _text(404, "nothing is here")
        try:
            found = await self._in_thread(partial(self._answers[name], request.query))
        except (click.ClickException, ConnectError, RpcError) as error:
            status = error.status if isinstance(error, RefusedError) and error.status < 500 else 502
            return _json(status, {"error": _reason(error)})
        return found if isinstance(found, Response) else _json(200, found)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await anyio.to_thread.run_sync(work, limiter=self._limiter)

    def _refused(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in LOOPBACK:
            return _text(403, "the Host is not a name of loopback: open the address that hive ui printed")
        if request.method != "GET":
            return _text(405, "only GET")
        token = request.path.removeprefix("/").partition("/")
        if not (token[1] and hmac.compare_digest(token[0].encode(), self._token.encode())):
            return _text(403, "the token is missing: open the whole address that hive ui printed")
        return None

    def _policy(self, query: Mapping[str, str]) -> Any:
        return self._ask(f"/hive/policy/matrix?{_chosen(query, 'from', 'to', 'most')}")

    def _explain(self, query: Mapping[str, str]) -> Any:
        return self._ask(
            f"/hive/policy/explain?{_chosen(query, 'source', 'destination', 'port', 'protocol')}"
        )

    def _nodes(self, _query: Mapping[str, str]) -> Any:
        """What there is of nodes; what is off is None."""
        return {
            "nodes": self._ask("/v1/cluster/nodes"),
            "status": self._ask("/v1/healthz"),
            "health": ask("/v1beta/status", self._health, timeout=self._timeout)
            if self._health.exists()
            else None,
            "bgp": self._bgp(),
        }

    def _bgp(self) -> Any:
        try:
            return self._ask("/v1/bgp/peers") or []
        except RefusedError as error:
            if error.status == 501:
                return None
            raise

    def _inside(self, _query: Mapping[str, str]) -> Response:
        """The page of ``hive inspect --format html`` about the running agent."""
        graph = read_graph(json.dumps(self._ask("/hive/graph")))
        timeline = read_timeline(json.dumps(self._ask("/hive/timeline")))
        framed = HEADERS | {"Content-Security-Policy": "frame-ancestors 'self'"}
        return Response(200, graph.html(timeline).encode(), "text/html; charset=utf-8", framed)


def _reason(error: click.ClickException | ConnectError | RpcError) -> str:
    if isinstance(error, ConnectError):
        return "the agent serves no flows: set enable-hubble=true (chart: hubble.enabled), and restart it"
    if isinstance(error, RefusedError):
        return error.reason
    return error.message


def _chosen(query: Mapping[str, str], *names: str) -> str:
    return urlencode({name: query[name] for name in names if query.get(name)})


def _page() -> Response:
    nonce = secrets.token_urlsafe(16)
    folder = files("hive.ui")
    own = {one: (folder / one).read_text(encoding="utf-8") for one in ("page.html", "page.css", *SCRIPTS)}
    text = Template(own["page.html"]).substitute(
        nonce=nonce,
        style=page_part("look.css") + own["page.css"],
        script="\n".join([page_part("elements.js"), *(own[one] for one in SCRIPTS)]),
    )
    headers = HEADERS | {"Content-Security-Policy": _POLICY.format(nonce)}
    return Response(200, text.encode(), "text/html; charset=utf-8", headers)


def _json(status: int, value: object) -> Response:
    return Response(status, json.dumps(value).encode(), "application/json", dict(HEADERS))


def _text(status: int, text: str) -> Response:
    return Response(status, f"{text}\n".encode(), "text/plain; charset=utf-8", dict(HEADERS))
