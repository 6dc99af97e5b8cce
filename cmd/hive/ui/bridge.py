"""Serves the page of ``hive ui``: GET only, for clients with the token.

Any local process can connect to loopback, and so can a web page with a name that resolves to 127.0.0.1 (DNS
rebinding). So the path starts with a random token, and the Host must be a name of loopback.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any, Final, Protocol

import anyio.to_thread

from hive.agents import Answer
from lifecycle.graph import page_part, read_graph, read_timeline
from lifecycle.http import Request, Response

LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
SCRIPTS: Final = ("arrange.js", "map.js", "panel.js", "views.js", "main.js")
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


class Answers(Protocol):
    """The interface that answers queries of the page."""

    async def answer(self, name: str, query: Mapping[str, str]) -> Answer:
        """Return an HTTP status and the body."""
        ...


class Bridge:
    """The handler of an HttpServer."""

    def __init__(self, token: str, answers: Answers, *, cluster: bool = False) -> None:
        self._token = token
        self._answers = answers
        self._cluster = cluster

    async def handle(self, request: Request) -> Response:
        """Answer one request."""
        if (refused := self._refused(request)) is not None:
            return refused
        name = request.path.removeprefix(f"/{self._token}/")
        if not name:
            return _page(cluster=self._cluster)
        status, found = await self._answers.answer(name, request.query)
        if name == "inside" and status == 200:
            return await anyio.to_thread.run_sync(_inside, found)
        return _json(status, found)

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


def _inside(found: Any) -> Response:
    """Return the page of ``hive inspect --format html`` for a running agent."""
    graph = read_graph(json.dumps(found["graph"]))
    timeline = read_timeline(json.dumps(found["timeline"]))
    framed = HEADERS | {"Content-Security-Policy": "frame-ancestors 'self'"}
    return Response(
        200, graph.html(timeline, found.get("health")).encode(), "text/html; charset=utf-8", framed
    )


def _page(*, cluster: bool) -> Response:
    nonce = secrets.token_urlsafe(16)
    folder = files("hive.ui")
    own = {one: (folder / one).read_text(encoding="utf-8") for one in ("page.html", "page.css", *SCRIPTS)}
    text = Template(own["page.html"]).substitute(
        nonce=nonce,
        scope="cluster" if cluster else "node",
        style=page_part("look.css") + own["page.css"],
        script="\n".join([page_part("elements.js"), *(own[one] for one in SCRIPTS)]),
    )
    headers = HEADERS | {"Content-Security-Policy": _POLICY.format(nonce)}
    return Response(200, text.encode(), "text/html; charset=utf-8", headers)


def _json(status: int, value: object) -> Response:
    return Response(status, json.dumps(value).encode(), "application/json", dict(HEADERS))


def _text(status: int, text: str) -> Response:
    return Response(status, f"{text}\n".encode(), "text/plain; charset=utf-8", dict(HEADERS))
