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

from hive.client import ask, socket_option, timeout_option
from hive.signals import orderly
from hive.ui.bridge import Bridge
from lifecycle.http import HttpServer, ServerLimits

_GRACE: Final = 1.0
_HUBBLE_SOCKET: Final = "hubble.sock"
_REDIRECT: Final = '<!doctype html><meta http-equiv="refresh" content="0;url={}"><a href="{}">hive ui</a>'


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of 127.0.0.1 to serve on; 0 for any that is free.  [default: 0]",
)
@click.option("--no-browser", is_flag=True, help="Only print the address of the page; open no browser.")
@socket_option
@timeout_option
def command(port: int, no_browser: bool, agent_socket: Path, timeout: float) -> None:
    """Show on a page which workloads talk, which may, and how nodes are.

    The page is served on 127.0.0.1 until ctrl-C, to those who have its address: it holds a random token.
    It reads the agent's sockets and changes nothing. Flows need enable-hubble=true.
    """
    ask("/v1/healthz", agent_socket, timeout=timeout)
    token = secrets.token_urlsafe(24)
    hubble = os.environ.get("HUBBLE_SERVER") or f"unix://{agent_socket.with_name(_HUBBLE_SOCKET)}"
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise click.ClickException(
            f"--port {port}: {error.strerror}: name another, or leave it out"
        ) from error
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/"
    with orderly():
        try:
            anyio.run(_serve, listener, Bridge(token, agent_socket, hubble, timeout), address, no_browser)
        except KeyboardInterrupt:
            return


async def _serve(listener: socket.socket, bridge: Bridge, address: str, no_browser: bool) -> None:
    server = HttpServer(bridge.handle, grace=_GRACE, limits=ServerLimits(connections=32, body=0))
    await server.serve(listener)
    click.echo(f"The page, until ctrl-C:  {address}")
    try:
        if no_browser or not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            await anyio.sleep_forever()
        with tempfile.TemporaryDirectory(prefix="hive-ui-") as folder:
            # arguments of processes are seen by every user: the browser gets a file that only this one reads
            file = Path(folder) / "open.html"
            file.write_text(_REDIRECT.format(address, address), encoding="utf-8")
            await anyio.to_thread.run_sync(webbrowser.open, file.as_uri())
            await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            await server.close()
