"""``cilium-dbg bpf policy``: the policy maps of endpoints.

Source: Cilium 1.17, cilium-dbg/cmd/bpf_policy_*.go and helpers.go, pkg/maps/policymap.
"""

import json
from typing import Final

import click

from cells.maps.bpf import BpfError
from cells.maps.records.endpoints import PolicyEntry, PolicyKey
from hive.dbg.bpf.maps import (
    GLOBALS,
    PROTOCOLS,
    LayoutError,
    auth_type,
    delete_entry,
    entries_of,
    missing,
    refused,
    swapped,
    update_entry,
)
from hive.dbg.endpoint import endpoint_id
from hive.dbg.go_text import aligned, output_option, parse_unsigned, printable_labels, printed
from hive.dbg.main import Group
from hive.dbg.requests import RequestFailedError, ask

policy = Group("policy", callback=lambda: None, help="Manage policy related BPF maps")
_DIGITS: Final = 20
"""A number with more of them is out of every range."""


@policy.command("get")
@click.argument("number", required=False)
@click.option("--all", "everything", is_flag=True, help="Dump all policy maps")
@click.option("-n", "--numeric", is_flag=True, help="Do not resolve IDs")
@output_option
def get_policy(number: str | None, everything: bool, numeric: bool, output: str) -> None:
    """List contents of a policy BPF map"""
    if everything:
        _print_all(numeric=numeric, output=output)
        return
    if not number:
        raise click.ClickException("Please provide an endpoint ID, or --all\n")
    rows = _rows(_map_name(endpoint_id(number)))
    if output:
        click.echo(printed([policy_model(*row) for row in rows], output))
    else:
        _print_table(rows, numeric)


def _print_all(*, numeric: bool, output: str) -> None:
    found = {path: _rows(path.name) for path in sorted(GLOBALS.glob("cilium_policy_[0-9]*"))}
    if not found:
        click.echo("no maps found")
    elif output:
        maps = [
            {
                "EndpointID": path.name.rpartition("_")[2].lstrip("0"),
                "Path": str(path),
                "Content": [policy_model(*row) for row in rows],
            }
            for path, rows in found.items()
        ]
        click.echo(printed(maps, output))
    else:
        for path, rows in found.items():
            number = path.name.rpartition("_")[2].lstrip("0")
            click.echo(f"Endpoint ID: {number}\nPath: {path}\n")
            _print_table(rows, numeric)
            click.echo("\n")


_Rows = list[tuple[PolicyKey, PolicyEntry, bytes]]


def _map_name(endpoint: str) -> str:
    """The policy map of an endpoint. Raises click.ClickException for other than its number."""
    if not _is_unsigned(endpoint, 0xFFFF):
        raise click.ClickException(f"Failed to parse endpointID {json.dumps(endpoint)}")
    return f"cilium_policy_{int(endpoint):05}"


def _is_unsigned(text: str, most: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS and int(text) <= most


def _rows(name: str) -> _Rows:
    """Sorted entries of a map. Raises click.ClickException."""
    try:
        entries = entries_of(name, "Error while opening bpf Map")
    except BpfError as error:
        raise click.ClickException(f"Failed to open map: {missing(name, error)}\n") from error
    rows = [(PolicyKey.unpack(key), PolicyEntry.unpack(value), key) for key, value in entries]
    rows.sort(key=lambda row: (not row[1].deny, row[0].egress, row[0].identity, row[0].protocol, row[0].port))
    return rows


def _print_table(rows: _Rows, numeric: bool) -> None:
    who = "IDENTITY" if numeric else "LABELS (source:key[=value])"
    lines = [f"POLICY\tDIRECTION\t{who}\tPORT/PROTO\tPROXY PORT\tAUTH TYPE\tBYTES\tPACKETS\tPREFIX\t\n"]
    for key, entry, data in rows:
        first, *others = [str(key.identity)] if numeric else _labels(key.identity)
        lines.append(_policy_text(key, entry, data, first))
        lines.extend(f"\t\t{label}\t\t\t\t\t\t\t\n" for label in others)
    click.echo(aligned("".join(lines)), nl=False)
    if not rows:
        click.echo("Policy stats empty. Perhaps the policy enforcement is disabled?")


def _policy_text(key: PolicyKey, entry: PolicyEntry, data: bytes, peer: str) -> str:
    """Return the line of an entry; ``data`` is its key, and ``peer`` the identity or its first label."""
    prefix = (int.from_bytes(data[:4], "little") - _STATIC_BITS) & 0xFF
    cells = (
        *("Deny" if entry.deny else "Allow", "Egress" if key.egress else "Ingress", peer),
        *(_port_text(key, prefix), entry.proxy_port or "NONE"),
        *(auth_type(entry.auth_type), entry.octets, entry.packets, prefix),
    )
    return "".join(f"{cell}\t" for cell in cells) + "\n"


_STATIC_BITS, _PROTOCOL_BITS, _PORT_BITS = 40, 8, 16
"""The parts of a key's prefix length: up to the protocol, the protocol, and the port."""


def _port_text(key: PolicyKey, prefix: int) -> str:
    """Return port and protocol of a key with ``prefix`` bits of them."""
    protocol = PROTOCOLS.get(key.protocol, str(key.protocol))
    if prefix in {0, _PROTOCOL_BITS}:
        return protocol
    bits = prefix - _PROTOCOL_BITS
    if bits == _PORT_BITS:
        return f"{key.port}/{protocol}"
    if 0 < bits < _PORT_BITS:
        return f"{key.port}-{(key.port + (0xFFFF >> bits)) & 0xFFFF}/{protocol}"
    return f"<INVALID PREFIX LENGTH: {prefix}>"


def policy_model(key: PolicyKey, entry: PolicyEntry, data: bytes) -> dict[str, object]:
    """A rule of a policy map as ``-o json`` has it: raw fields."""
    return {
        "ProxyPortNetwork": swapped(entry.proxy_port),
        "Flags": entry.pack(key)[2],
        "AuthType": entry.auth_type,
        "Pad1": 0,
        "Pad2": 0,
        "Packets": entry.packets,
        "Bytes": entry.octets,
        "Key": {
            "Prefixlen": int.from_bytes(data[:4], "little"),
            "Identity": key.identity,
            "TrafficDirection": int(key.egress),
            "Nexthdr": key.protocol,
            "DestPortNetwork": swapped(key.port),
        },
    }


def _labels(number: int) -> list[str]:
    try:
        found = ask("GET /identity/{id}", id=str(number))
    except RequestFailedError as error:
        click.echo(f"Was impossible to retrieve label ID {number}: {error}", err=True)
        return [str(number)]
    labels = printable_labels(found.get("labels") or ())
    return ["ANY" if label == "reserved:unknown" else label for label in labels] or [str(number)]


@policy.command("list")
@output_option
def list_policies(output: str) -> None:
    """Dump all policy maps"""
    _print_all(numeric=False, output=output)


_arguments = click.argument(
    "words", nargs=-1, metavar="<endpoint id> <traffic-direction> <identity> [port/proto]"
)


@policy.command("add")
@_arguments
@click.option("--deny", is_flag=True, help="Sets deny mode")
def add_policy(words: tuple[str, ...], deny: bool) -> None:
    """Add/update policy entry"""
    name, keys = _given(words)
    entry = PolicyEntry(deny=deny)
    for key in keys:
        try:
            update_entry(name, key.pack(), entry.pack(key))
        except (BpfError, LayoutError) as error:
            raise click.ClickException(_not_changed("add", name, key, error)) from error


@policy.command("delete")
@_arguments
@click.option("--deny", is_flag=True, help="An allowed and a denied peer have the same key: any entry goes")
def delete_policy(words: tuple[str, ...], deny: bool) -> None:
    """Delete a policy entry"""
    del deny
    name, keys = _given(words)
    for key in keys:
        try:
            delete_entry(name, key.pack())
        except (BpfError, LayoutError) as error:
            raise click.ClickException(_not_changed("delete", name, key, error)) from error


def _not_changed(doing: str, name: str, key: PolicyKey, error: BpfError | LayoutError) -> str:
    if isinstance(error, BpfError) and error.operation == "open":
        return f"Cannot open policymap {json.dumps(str(GLOBALS / name))} : {missing(name, error)}"
    text = f"{key.identity} {key.port}/{PROTOCOLS[key.protocol]}"
    return f"Cannot {doing} policy key '{text}': {refused(name, text, error)}"


def _given(words: tuple[str, ...]) -> tuple[str, list[PolicyKey]]:
    """The map, and its keys, that the words mean. Raises click.ClickException."""
    if not words:
        raise click.ClickException("Missing endpoint id argument")
    if len(words) < _LEAST:
        raise click.ClickException("<endpoint id>, <traffic-direction>, and <identity> required")
    name, direction, identity = _map_name(words[0]), words[1].lower(), words[2]
    if direction not in {"ingress", "egress"}:
        raise click.ClickException(
            f"Failed to convert {words[1]} to a valid traffic direction: "
            f"invalid direction {json.dumps(words[1])} provided"
        )
    if not _is_unsigned(identity, 0xFFFFFFFF):
        raise click.ClickException(f"Failed to convert {identity}")
    port, protocols = _port(words[_LEAST]) if len(words) > _LEAST else (0, [0])
    bits = 16 if port else 0
    return name, [
        PolicyKey(int(identity), direction == "egress", protocol, port, bits) for protocol in protocols
    ]


_LEAST: Final = 3


def _port(text: str) -> tuple[int, list[int]]:
    """A port, and the protocols that its entries are of; port 0 is every port of every protocol.

    Raises click.ClickException.
    """
    failure = "Failed to parse L4"
    number, slash, protocol = text.partition("/")
    if "/" in protocol:
        raise click.ClickException(
            f"{failure}: invalid format {json.dumps(text)}. Should be <port>[/<protocol>]"
        )
    numbers = {name.upper(): value for value, name in PROTOCOLS.items()}
    wanted = protocol.upper() if slash else "ANY"
    if wanted not in numbers:
        raise click.ClickException(f"{failure}: invalid protocol {json.dumps(wanted)}")
    try:
        port = parse_unsigned(number, 0xFFFF)
    except ValueError as error:
        raise click.ClickException(f"{failure}: invalid port {json.dumps(number)}: {error}") from error
    if not port:
        return 0, [0]
    return port, [numbers[wanted]] if numbers[wanted] else [one for one in PROTOCOLS if one]
