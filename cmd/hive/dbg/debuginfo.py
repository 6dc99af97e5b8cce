"""``cilium-dbg debuginfo`` and ``version``: all state of the agent, and its version.

Source: Cilium 1.17, cilium-dbg/cmd/{debuginfo,version}.go, pkg/version.
"""

import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import click

from hive.dbg.endpoint import endpoint_table
from hive.dbg.go_text import DEBUGINFO, aligned, model, output_option, printed
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


@click.command()
@click.option("-f", "--file", "file", is_flag=True, help="Redirect output to file(s)")
@click.option("--file-per-command", is_flag=True, help="Generate a single file per command")
@click.option("--output", "forms", default="", help='"markdown", "html", "json" or "jsonpath"')
@click.option("--output-directory", default="", help="directory for files (if specified will use directory)")
def debuginfo(file: bool, file_per_command: bool, forms: str, output_directory: str) -> None:
    """Request available debugging information from agent"""
    try:
        found = ask("GET /debuginfo")
    except RequestFailedError as error:
        raise click.ClickException(str(error)) from error
    for form in forms.split(",") if forms else ["markdown"]:
        if form == "markdown":
            texts = dict(_sections(found))
            document = "# Cilium debug information\n\n" + "".join(texts.values())
        elif form == "html":
            raise click.ClickException("html is not available with this agent: use markdown or json")
        elif form == "json" or form.startswith("jsonpath="):
            document = printed(model(found, DEBUGINFO), form)
            texts = {"debuginfo": document}
        else:
            raise click.ClickException(f"{form!r}: expected markdown, json or jsonpath={{.path}}")
        if not (file or output_directory):
            click.echo(document)
            continue
        suffix = "md" if form == "markdown" else "json"
        files = texts if file_per_command else {"cilium-debuginfo": document}
        for name, text in files.items():
            path = Path(output_directory or ".") / f"{name}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            click.echo(f"{'File' if file_per_command else suffix} output at {path}")


def _block(title: str, text: str, level: str = "####") -> str:
    return f"{level} {title}\n\n```\n{text}\n```\n\n"


def _sections(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return each part in Markdown, by title."""
    texts = {
        "cilium-version": "Cilium version",
        "kernel-version": "Kernel version",
        "cilium-memory-map": "Cilium memory map",
    }
    for name, title in texts.items():
        if text := found.get(name):
            yield name, _block(title, text)
    if (status := found.get("cilium-status")) is not None:
        yield "cilium-status", _block("Cilium status", aligned(status_text(status, ALL), 2).rstrip("\n"))
    if (environment := found.get("environment-variables")) is not None:
        yield "environment-variables", _block("Cilium environment keys", "\n".join(environment))
    if (endpoints := found.get("endpoint-list")) is not None:
        yield "endpoint-list", _block("Endpoint list", endpoint_table(endpoints).rstrip("\n"))
    if (services := found.get("service-list")) is not None:
        yield "service-list", _block("Service list", service_table(services).rstrip("\n"))
    if (policy := found.get("policy")) is not None:
        rules = f":\n {policy.get('policy', '')}\nRevision: {policy.get('revision', 0)}\n"
        yield "policy", _block("Policy get", rules)
    for name, text in sorted((found.get("subsystem") or {}).items()):
        yield name, _block(name, text)
    if (encryption := found.get("encryption")) is not None:
        yield "encryption", f"#### Cilium encryption\n\n\n{_wireguard(encryption)}"


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
    return _block("WireGuard", "\n".join(lines), "#####") if lines else ""


COMMANDS: Final = {"version": version, "debuginfo": debuginfo}
