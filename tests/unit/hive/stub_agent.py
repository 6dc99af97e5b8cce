"""An HTTP server on a unix socket that answers as a test sets it, and records requests."""

import http.server
import json
import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class StubAgent:
    """The socket, and the requests received: path and headers."""

    socket: Path
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    changes: list[tuple[str, object]] = field(default_factory=list)
    """Path and body of each PATCH, DELETE and POST; a POST gets the configured response."""


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@contextmanager
def stub_agent(directory: Path, answers: Mapping[str, tuple[int, object]]) -> Iterator[StubAgent]:
    """Serve ``path -> (status, body)``; a body of bytes is sent unchanged, anything else as JSON."""
    agent = StubAgent(directory / "cilium.sock")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))  # unread, it resets the connection
            agent.requests.append((self.path, dict(self.headers)))
            self.answer()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            agent.changes.append((self.path, json.loads(body)))
            self.answer()

        def answer(self) -> None:
            status, body = answers.get(self.path, (404, "not found"))
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_PATCH(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            agent.changes.append((self.path, json.loads(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_DELETE(self) -> None:
            agent.changes.append((self.path, None))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
            """Log nothing."""

    with _Server(str(agent.socket), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield agent
        finally:
            server.shutdown()
            thread.join()
