"""``hive ui``: serves the page on loopback until it is interrupted."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import webbrowser
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import click

from hive.agents import serve_queries
from hive.client import ask, socket_option, timeout_option
from hive.output import page_options
from hive.signals import signals_as_interrupts
from hive.ui.answers import NodeAnswers
from hive.ui.bridge import Answers, Bridge
from lifecycle.http import HttpServer, ServerLimits

_GRACE: Final = 1.0
_HUBBLE_SOCKET: Final = "hubble.sock"
_REDIRECT: Final = '<!doctype html><meta http-equiv="refresh" content="0;url={}"><a href="{}">hive ui</a>'


@click.command()
@page_options
@click.option("--stdio", is_flag=True, hidden=True, help="Answer queries of hive cluster on standard input.")
@socket_option
@timeout_option
def command(port: int, no_browser: bool, stdio: bool, agent_socket: Path, timeout: float) -> None:
    """Show connections, the policies that allow or deny them, and the state of nodes on a page.

    The page is served on 127.0.0.1 until ctrl-C; its address contains a random token. It reads the agent's
    sockets and changes nothing. Flows require enable-hubble=true. For all nodes: hive cluster ui.
    """
    hubble = os.environ.get("HUBBLE_SERVER") or f"unix://{agent_socket.with_name(_HUBBLE_SOCKET)}"
    answers = NodeAnswers(agent_socket, hubble, timeout)
    with signals_as_interrupts():
        try:
            if stdio:
                serve_queries(answers.answer_now)
                return
            ask("/v1/healthz", agent_socket, timeout=timeout)
            with listening(port) as listener:
                anyio.run(serve_page, listener, answers, False, no_browser)
        except KeyboardInterrupt:
            return


def listening(port: int) -> socket.socket:
    """Return a listening socket on loopback. Raises click.ClickException."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise click.ClickException(
            f"--port {port}: {error.strerror}: name another, or leave it out"
        ) from error


async def serve_page(listener: socket.socket, answers: Answers, cluster: bool, no_browser: bool) -> None:
    """Serve until cancelled; print the address, and open a browser if there is a display."""
    token = secrets.token_urlsafe(24)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/"
    bridge = Bridge(token, answers, cluster=cluster)
    server = HttpServer(bridge.handle, grace=_GRACE, limits=ServerLimits(connections=32, body=0))
    await server.serve(listener)
    click.echo(f"The page, until ctrl-C:  {address}")
    try:
        if no_browser or not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            await anyio.sleep_forever()
        with tempfile.TemporaryDirectory(prefix="hive-ui-") as folder:
            # arguments of processes are visible to all users: the browser gets a file that only this user can
            # read
            file = Path(folder) / "open.html"
            file.write_text(_REDIRECT.format(address, address), encoding="utf-8")
            await anyio.to_thread.run_sync(webbrowser.open, file.as_uri())
            await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            await server.close()
