"""``cilium-dbg debuginfo`` and ``version``: all state of the agent, and its version.

Source: Cilium 1.17, cilium-dbg/cmd/{debuginfo,version}.go, pkg/version.
"""

import contextlib
import io
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from datetime import datetime
from importlib import metadata
from typing import Any, Final, NoReturn

import click

from hive.dbg.endpoint import endpoint_table
from hive.dbg.go_text import DEBUGINFO, aligned, model, output_option, printed
from hive.dbg.main import run
from hive.dbg.requests import RequestFailedError, ask
from hive.dbg.service import service_table
from hive.dbg.status import ALL, status_text

_VERSION: Final = re.compile(r"(\S+) (\S+) (\S+) \S+ \S+ (\S+) (\S+)")
"""Version, revision, date, two words, runtime, platform."""
_KEYS: Final = ("Version", "Revision", "AuthorDate", "GoRuntimeVersion", "Arch")


@click.command()
@output_option
def version(output: str) -> None:
    """Print version information"""
    own = f"{_own()} python version {platform.python_version()} {sys.platform}/{platform.machine()}"
    try:
        daemon = ask("GET /debuginfo").get("cilium-version", "")
    except RequestFailedError:
        daemon = ""
    if output:
        click.echo(printed({"Client": _parts(own), "Daemon": _parts(daemon)}, output))
    else:
        click.echo(f"Client: {own}\nDaemon: {daemon or 'Not responding'}")


def _own() -> str:
    return metadata.version("hive-agent")


def _parts(text: str) -> dict[str, str]:
    """Return the parts of a version; empty for another format."""
    match = _VERSION.fullmatch(text)
    values = dict(zip(_KEYS, match.groups(), strict=True)) if match is not None else {}
    return {
        key: values.get(key, "") for key in ("Version", "Revision", "GoRuntimeVersion", "Arch", "AuthorDate")
    }


_HTML: Final = "html is not available with this agent: use markdown or json"
_PATH: Final = "jsonpath"


@click.command()
@click.option("-f", "--file", "to_file", is_flag=True, help="Redirect output to file(s)")
@click.option("--file-per-command", is_flag=True, help="Generate a single file per command")
@click.option("--output", "outputs", multiple=True, help="markdown| html| json| jsonpath='{}'")
@click.option("--output-directory", default="", help="directory for files (if specified will use directory)")
def debuginfo(to_file: bool, file_per_command: bool, outputs: tuple[str, ...], output_directory: str) -> None:
    """Request available debugging information from agent"""
    if output_directory and not to_file:
        directory = json.dumps(output_directory)
        _end(
            f"invalid option combination; specified output-directory {directory}, "
            "but did not specify for output to be redirected to file; exiting"
        )
    forms = [form for text in outputs for form in text.split(",")]
    for form in forms:
        _check_form(form, to_file, file_per_command)
    try:
        found = ask("GET /debuginfo")
    except RequestFailedError as error:
        _end(str(error))
    now = datetime.now().astimezone()
    stamp = f"{now:%Y%m%d-%H%M%S}.{now:%f}"[:-3].rstrip("0").rstrip(".") + f"{now:-%z-%Z}"
    for form in forms or ["markdown"]:
        name = form.lower().partition("=")[0]
        if name == "markdown":
            sections = dict(_sections(found))
            texts = sections if to_file and file_per_command else {"": "".join(sections.values())}
            texts = {part: f"# Cilium debug information\n{text}" for part, text in texts.items()}
        else:
            texts = {"": printed(model(found, DEBUGINFO), form if "=" in form else name)}
        for part, text in texts.items():
            if not to_file:
                click.echo(text)
                continue
            start = f"cilium-debuginfo-{stamp}" + (f"-{part}" if part else "")
            path = f"{output_directory}/{start}" if output_directory else start
            _write(f"{path}.{'md' if name == 'markdown' else name}", text, name)


def _end(reason: str) -> NoReturn:
    """Print why, without more. Raises click.exceptions.Exit."""
    click.echo(reason, err=True)
    raise click.exceptions.Exit(1)


def _check_form(form: str, to_file: bool, file_per_command: bool) -> None:
    """End the command for a form that Cilium's refuses, too. Raises click.exceptions.Exit."""
    name = form.lower()
    if name == "html":
        requires = "if HTML is specified as the output format, it is required that you provide the `--file`"
        _end(_HTML if to_file else f"{requires} argument as well")
    if name in {"json", _PATH} and file_per_command:
        _end(f"{form} does not support dumping a file per command; exiting")
    if name not in {"markdown", "json", _PATH} and not form.startswith(f"{_PATH}="):
        _end(f"{form} is not a valid output format; exiting")


def _write(path: str, text: str, form: str) -> None:
    try:
        with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(text)
    except OSError:
        _end(f"Could not create file {path}")
    click.echo(f"{form} output at {path}")


def _block(title: str, text: str) -> str:
    return f"\n#### {title}\n\n```\n{text}\n```\n\n" if text else f"\n#### {title}\n\n"


def _of_endpoint(one: dict[str, Any]) -> str:
    """Return what commands print about an endpoint, each under a title."""
    number = str(one.get("id", 0))
    commands = {
        f"BPF Policy Get {number}": f"bpf policy get {number} -n",
        f"BPF CT List {number}": f"bpf ct list {number}",
        f"Endpoint Get {number}": f"endpoint get {number}",
        f"Endpoint Health {number}": f"endpoint health {number}",
        f"Endpoint Log {number}": f"endpoint log {number}",
    }
    identity = (one.get("status") or {}).get("identity")
    if identity is not None:
        who = str(identity.get("id", 0))
        commands[f"Identity get {who}"] = f"identity get {who}"
    return "".join(_block(title, _printed_by(words)) for title, words in commands.items())


def _printed_by(words: str) -> str:
    """Return what a command prints on both streams; nothing without `cilium`, as in Cilium."""
    if shutil.which("cilium") is None:
        return ""
    with io.StringIO() as text, contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        run(words.split())
        return text.getvalue()


def _sections(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return each part in Markdown, by title."""
    yield "cilium-version", _block("Cilium version", found.get("cilium-version", ""))
    yield "kernel-version", _block("Kernel version", found.get("kernel-version", ""))
    status = aligned(status_text(found.get("cilium-status") or {}, ALL), 2).rstrip("\n")
    yield "cilium-status", _block("Cilium status", status)
    variables = "\n".join(found.get("environment-variables") or ())
    yield "cilium-environment-keys", _block("Cilium environment keys", variables)
    endpoints = endpoint_table(found.get("endpoint-list") or []).rstrip("\n")
    more = "".join(map(_of_endpoint, found.get("endpoint-list") or ()))
    yield "cilium-endpoint-list", _block("Endpoint list", endpoints) + more
    services = service_table(found.get("service-list") or []).rstrip("\n")
    yield "cilium-service-list", _block("Service list", services)
    policy = found.get("policy") or {}
    rules = f":\n {policy.get('policy', '')}\nRevision: {policy.get('revision', 0)}\n"
    yield "cilium-policy", _block("Policy get", rules)
    yield "cilium-memory-map", _block("Cilium memory map\n", found.get("cilium-memory-map", ""))
    subsystems = sorted((found.get("subsystem") or {}).items())
    yield "cilium-subsystems", "".join(_block(name, text) for name, text in subsystems)
    encryption = _wireguard(found.get("encryption") or {})
    yield "cilium-encryption", f"{_block(f'Cilium encryption{chr(10)}', '')}{encryption}"


def _wireguard(encryption: dict[str, Any]) -> str:
    lines = []
    for one in (encryption.get("wireguard") or {}).get("interfaces") or ():
        lines.append(f"interface: {one.get('name', '')}")
        lines.append(f"  public key: {one.get('public-key', '')}")
        lines.append(f"  listening port: {one.get('listen-port', 0)}\n")
        for peer in one.get("peers") or ():
            lines.append(f"peer: {peer.get('public-key', '')}")
            lines.append(f"  endpoint: {peer.get('endpoint', '')}")
            lines.append(f"  allowed ips: {', '.join(peer.get('allowed-ips') or ())}")
            lines.append(f"  latest handshake: {peer.get('last-handshake-time', '')}")
            received, sent = peer.get("transfer-rx", 0), peer.get("transfer-tx", 0)
            lines.append(f"  transfer: {received} B received, {sent} B sent\n")
    text = "\n".join(lines)
    return f"##### WireGuard\n\n```\n{text}\n```\n" if lines else ""


COMMANDS: Final = {"version": version, "debuginfo": debuginfo}
