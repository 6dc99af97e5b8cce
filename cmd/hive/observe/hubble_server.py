"""Flags for the address of a Hubble server, and the connection to it.

Source: the hubble CLI of Cilium 1.17.
"""

from __future__ import annotations

import os
import ssl
import sys
from base64 import b64encode
from collections.abc import Callable, Sequence
from textwrap import fill
from typing import Final, TypeVar

from cells.hubble.codec import WireMessage, decode, encode
from hive.observe.hubble_client import HubbleClient
from hive.observe.hubble_flags import CommandLineError, Flag, Flags, go_seconds, parse_list, switch

LOCAL: Final = "unix:///var/run/cilium/hubble.sock"
_Message = TypeVar("_Message", bound=WireMessage)


class CommandError(Exception):
    """Raised if a command fails; the text is for stderr."""


SERVER_FLAGS: Final = (
    Flag(
        "server",
        "Where Hubble is served: unix:///path, host:port or tls://host:port (HUBBLE_SERVER).",
        default=LOCAL,
    ),
    Flag("timeout", "Time to connect.", parse=go_seconds, default=5.0),
    Flag("request-timeout", "Time for an answer that is not a stream.", parse=go_seconds, default=12.0),
    switch("tls", "Use TLS with an address that does not begin with tls://."),
    switch("tls-allow-insecure", "Accept any certificate of the server."),
    Flag(
        "tls-ca-cert-files",
        "Files of CA certificates, in place of the system's.",
        parse=parse_list,
        default=(),
    ),
    Flag("tls-client-cert-file", "File of the client's certificate."),
    Flag("tls-client-key-file", "File of the client's key."),
    Flag("tls-server-name", "Name that the server's certificate has to cover."),
    Flag("basic-auth-username", "User name for a proxy before the server."),
    Flag("basic-auth-password", "Its password."),
    switch("debug", "Print what is asked, and what a relay reports of its nodes.", "D"),
    switch("help", "Show this.", "h"),
)
_ENVIRONMENT: Final = tuple(flag.name for flag in SERVER_FLAGS[:-1])

HELP_WIDTH, TEXT_AT = 80, 32
"""Columns of help, and where the texts of flags begin."""


def parsed(words: Sequence[str], flags: Sequence[Flag], command: str, about: str) -> Flags | None:
    """Return the flags of a command line, or None if only help was requested."""
    found = Flags((*flags, *SERVER_FLAGS))
    arguments = found.parse(words)
    if found["help"]:
        print(f"{wrapped(about)}\n\nUsage: {command} [FLAGS]\n")
        for name, text in found.help():
            if len(name) > TEXT_AT - 4:
                print(f"  {name}")
            print(wrapped(text, f"  {name}" if len(name) <= TEXT_AT - 4 else " "))
        return None
    if arguments:
        raise CommandLineError(f'unknown command "{arguments[0]}" for "{command}"')
    found.from_environment(os.environ, _ENVIRONMENT)
    return found


def wrapped(text: str, before: str = "") -> str:
    """Wrap help text; ``before`` is left of the first line of a flag."""
    return fill(
        text,
        HELP_WIDTH,
        initial_indent=before.ljust(TEXT_AT) if before else "",
        subsequent_indent=" " * TEXT_AT if before else "",
        break_on_hyphens=False,
    )


def connected(flags: Flags) -> HubbleClient:
    server = flags["server"]
    files = flags["tls-client-cert-file"], flags["tls-client-key-file"]
    tls = None
    if server.startswith("tls://") or flags["tls"] or any(files):
        tls = _context(flags["tls-ca-cert-files"], files, verified=not flags["tls-allow-insecure"])
    metadata = {}
    if flags["basic-auth-username"]:
        pair = f"{flags['basic-auth-username']}:{flags['basic-auth-password']}"
        metadata["authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
    client = HubbleClient(
        server, flags["timeout"], tls=tls, server_name=flags["tls-server-name"], metadata=metadata
    )
    if flags["debug"]:
        print(f"connected to {server}", file=sys.stderr)
    return client


def _context(authorities: Sequence[str], files: tuple[str, str], *, verified: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None)
        if authorities:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            for path in authorities:
                context.load_verify_locations(path)
        if any(files):
            if not all(files):
                raise CommandError("tls-client-cert-file and tls-client-key-file must be given together")
            context.load_cert_chain(*files)
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        raise CommandError(f"TLS files cannot be used: {name}{error.strerror or error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    if not verified:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def follow(
    client: HubbleClient,
    method: str,
    request: WireMessage,
    kind: type[_Message],
    show: Callable[[_Message], None],
) -> None:
    """Print the answers of a stream as they are received."""
    for batch in client.stream(method, encode(request)):
        for message in batch:
            show(decode(kind, message))
        sys.stdout.flush()
