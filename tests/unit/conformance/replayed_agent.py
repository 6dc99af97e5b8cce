"""A server that answers as a recorded agent did, and the comparable form of clients' output."""

from __future__ import annotations

import http.server
import json
import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from hive.dbg.main import run

UNORDERED: Final = {"config_list_options", "endpoint_config_list_options", "endpoint_labels"}
"""Commands that print in no fixed order."""
UNORDERED_TOO: Final = {"debuginfo", "endpoint_labels_add_delete", "ip_list"}
"""Commands that also send their requests in no fixed order."""
OWN_VERSION: Final = re.compile(r"Client: .*")


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: clients close the connection once they have the response."""


@contextmanager
def replaying(socket: Path, exchanges: list[Any]) -> Iterator[list[tuple[str, str, Any]]]:
    """Run an agent that answers as recorded; return the list of its requests."""
    left = list(exchanges)
    asked: list[tuple[str, str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append((self.command, self.path, json.loads(data) if data.strip() else None))
            status, body = self._recorded()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _recorded(self) -> tuple[int, bytes]:
            for one in left:
                request, response = one["request"], one["response"]
                if (request["method"], request["path"]) == (self.command, self.path):
                    left.remove(one)
                    text = response.get("body_text") or ""
                    body = json.dumps(response["body"]) if "body" in response else text
                    return response["status"], body.encode()
            return 599, b"not recorded"

        do_GET = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815 - http.server's names

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
            """Log nothing."""

    with _Server(str(socket), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield asked
        finally:
            server.shutdown()
            thread.join()
            socket.unlink(missing_ok=True)


def lines_of(text: str, name: str) -> list[str]:
    """Return lines with runs of blanks as one and ages as placeholders, without empty ones."""
    text = re.sub(r"\b\d+[hms]\S* ago", "<AGO>", text)
    text = re.sub(r"\(\d+[dy]\S*, x", "(<AGE>, x", text)
    text = OWN_VERSION.sub("Client:", text)
    lines = [line for line in (" ".join(one.split()) for one in text.splitlines()) if line]
    return sorted(lines) if name in UNORDERED | UNORDERED_TOO else lines


def shown(
    words: str,
    answers: dict[str, Any],
    directory: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[int, list[list[str]], str]:
    """Return the exit code, the printed lines as words, and the error."""
    monkeypatch.setenv("CILIUM_SOCK", f"unix://{directory}/cilium.sock")
    exchanges = []
    for path, body in answers.items():
        method, _, rest = path.partition(" ")
        status, content = body if isinstance(body, tuple) else (200, body)
        request = {"method": method, "path": f"/v1/{rest}"}
        exchanges.append({"request": request, "response": {"status": status, "body": content}})
    with replaying(directory / "cilium.sock", exchanges):
        code = run(words.split())
    out, err = capfd.readouterr()
    return code, [line.split() for line in out.splitlines()], err
