"""``cilium-dbg prefilter`` and ``recorder``: filters of packets, captures.

Source: Cilium 1.17, cilium-dbg/cmd/{prefilter,recorder}*.go.
"""

import http
from typing import Any, Final

import click

from hive.dbg.go_text import (
    Shape,
    Unsigned,
    aligned,
    is_prefix,
    listed_words,
    model,
    output_option,
    printed,
)
from hive.dbg.main import Group, needed
from hive.dbg.requests import RequestFailedError, ask, ask_or_fail, ask_status

_RULES: Final[Shape] = {"status": {"realized": {"deny[]": {}}}}


@click.group(cls=Group)
def prefilter() -> None:
    """Manage XDP CIDR filters"""


@prefilter.command("list")
@output_option
def list_prefilters(output: str) -> None:
    """List CIDR filters"""
    try:
        found = ask("GET /prefilter")
    except RequestFailedError as error:
        raise click.ClickException(f"Cannot get CIDR list: {error}") from error
    if output:
        click.echo(printed(model(found, _RULES), output))
        return
    realized = (found.get("status") or {}).get("realized")
    if realized is None:
        raise click.ClickException("Cannot get CIDR list: empty response")
    click.echo("\n".join((f"Revision: {realized.get('revision', 0)}", *(realized.get("deny") or ()))))


_revision = click.option("--revision", type=click.IntRange(0), default=0, help="Update revision")


@prefilter.command("update")
@click.option("--cidr", multiple=True, help="List of CIDR prefixes to block")
@_revision
def update_prefilters(cidr: tuple[str, ...], revision: int) -> None:
    """Update CIDR filters"""
    _change_filters("PATCH", cidr, revision)


@prefilter.command("delete")
@click.option("--cidr", multiple=True, help="List of CIDR prefixes to delete")
@_revision
def delete_prefilters(cidr: tuple[str, ...], revision: int) -> None:
    """Delete CIDR filters"""
    _change_filters("DELETE", cidr, revision)


def _change_filters(method: str, cidr: tuple[str, ...], revision: int) -> None:
    prefixes = [one for text in cidr for one in text.split(",")]
    for prefix in prefixes:
        if not is_prefix(prefix):
            raise click.ClickException(f'Cannot parse CIDR "{prefix}": invalid CIDR address: {prefix}')
    body = {"deny": prefixes, "revision": revision}
    doing, done = {"PATCH": ("add/update", "Updated"), "DELETE": ("delete", "Deleted")}[method]
    try:
        ask(f"{method} /prefilter", body={key: value for key, value in body.items() if value})
    except RequestFailedError as error:
        raise click.ClickException(f"Cannot {doing} prefilter: {error}") from error
    click.echo(f"{done} {len(prefixes)} prefilter entries")


@click.group(cls=Group)
def recorder() -> None:
    """Introspect or mangle pcap recorder"""


@recorder.command("list")
@output_option
def list_recorders(output: str) -> None:
    """List current pcap recorders"""
    found = _listed("recorder", "GET /recorder")
    click.echo(printed(model(found), output) if output else _recorders(found), nl=bool(output))
    masks = _listed("recorder mask", "GET /recorder/masks")
    click.echo(printed(model(masks), output) if output else _masks(masks))


def _listed(what: str, operation: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = ask(operation)
    except RequestFailedError as error:
        raise click.ClickException(f"Cannot get {what} list: {error}") from error
    return found


def _realized(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the realized specifications; report each entry without one on standard error."""
    specs = [(one.get("status") or {}).get("realized") for one in found]
    for spec in specs:
        if spec is None:
            click.echo("error parsing recorder: empty state", err=True, nl=False)
    return [spec for spec in specs if spec is not None]


_HALF: Final = 8
"""Hexadecimal digits of a mask of IPv4."""


def _masks(found: list[dict[str, Any]]) -> str:
    masks = _realized(found)
    masks.sort(key=lambda one: (len(one.get("src-prefix-mask", "")) == _HALF, -one.get("priority", 0)))
    lines = ["Users\tPriority   \tWildcard Masks\t"]
    lines += [
        f"{mask.get('users', 0)}\t{mask.get('priority', 0)}\t{mask.get('src-prefix-mask', '')}:"
        f"{mask.get('src-port-mask', '')}\t->\t{mask.get('dst-prefix-mask', '')}:"
        f"{mask.get('dst-port-mask', '')}\t{mask.get('protocol-mask', '')}"
        for mask in masks
    ]
    return aligned("\n".join(lines))


def _recorders(found: list[dict[str, Any]]) -> str:
    lines = ["ID\tCapture Length\tWildcard Filters\t"]
    for spec in sorted(_realized(found), key=lambda one: one.get("id", 0)):
        length = spec.get("capture-length", 0)
        before = f"{spec.get('id', 0)}\t{f'<= {length}' if length else 'full'}"
        filters = spec.get("filters") or ()
        if not filters:
            lines.append(f"{before}\t(none)")
        for each in filters:
            source = f"{each.get('src-prefix', '')}:{each.get('src-port', '')}"
            destination = f"{each.get('dst-prefix', '')}:{each.get('dst-port', '')}"
            lines.append(f"{before}\t{source}\t->\t{destination}\t{each.get('protocol', '')}")
            before = "\t"
    return aligned("\n".join(lines) + "\n\n")


@recorder.command("get")
@needed("number", "Missing recorder id argument\n")
@output_option
def get_recorder(number: str, output: str) -> None:
    """Display individual pcap recorder"""
    found = ask_or_fail(f"Cannot get recorder '{number}'", "GET /recorder/{id}", id=_recorder_number(number))
    if output:
        click.echo(printed(model(found), output))
        return
    if not (found.get("status") or {}).get("realized"):
        raise click.ClickException(f"Cannot get recorder '{number}': empty response\n")
    click.echo(_recorders([found]), nl=False)


def _recorder_number(text: str) -> str:
    if not text.isdigit():
        raise click.ClickException(f"Unable to parse recorder ID: {text}")
    return text


@recorder.command("delete")
@needed("number", "Missing recorder id argument\n")
def delete_recorder(number: str) -> None:
    """Delete individual pcap recorder"""
    failure = f"Cannot delete recorder '{number}'"
    ask_or_fail(failure, "DELETE /recorder/{id}", id=_recorder_number(number))


@recorder.command("update")
@click.option("--id", "number", type=Unsigned((1 << 64) - 1), default=0, help="Identifier")
@click.option("--caplen", type=Unsigned((1 << 64) - 1), default=0, help="Capture Length (0 is full capture)")
@click.option(
    "--filters", multiple=True, help="List of filters ('<srcCIDR> <srcPort> <dstCIDR> <dstPort> <proto>')"
)
def update_recorder(number: int, caplen: int, filters: tuple[str, ...]) -> None:
    """Update individual pcap recorder"""
    if not number:
        raise click.ClickException("Empty recorder id argument\n")
    try:
        known = ask("GET /recorder/{id}", id=str(number))
    except RequestFailedError:
        click.echo(f"Creating new recorder with id '{number}'")
    else:
        if not (known.get("status") or {}).get("realized"):
            raise click.ClickException(f"Cannot update recorder {number}: empty state")
        click.echo(f"Updating existing recorder with id '{number}'")
    rules = [_filter(text) for text in listed_words(filters)]
    body = {"id": number, **({"capture-length": caplen} if caplen else {}), "filters": rules}
    try:
        created = ask_status("PUT /recorder/{id}", id=str(number), body=body) == http.HTTPStatus.CREATED
    except RequestFailedError as error:
        raise click.ClickException(f"Cannot add/update recorder: {error}") from error
    click.echo(f"{'Added' if created else 'Updated'} recorder with {len(rules)} filter")


_FILTER: Final = ("src-prefix", "src-port", "dst-prefix", "dst-port", "protocol")


def _filter(text: str) -> dict[str, str]:
    """Return the model of a filter. Raises click.ClickException."""
    words = text.split()[: len(_FILTER)]
    if len(words) < len(_FILTER):
        raise click.ClickException("Cannot parse filter: unexpected EOF")
    found = dict(zip(_FILTER, words, strict=True)) | {"protocol": words[-1].upper()}
    if found["protocol"] not in {"TCP", "UDP", "ANY"}:
        raise click.ClickException(f"Cannot parse filter: unknown protocol {words[-1]}")
    return found


COMMANDS: Final = {"prefilter": prefilter, "recorder": recorder}
