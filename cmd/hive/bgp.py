"""``hive bgp``: sessions, routes and policies of this node's BGP speakers.

Source: RFC 4271; texts of attributes are those of cilium-dbg.
"""

from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import click

from hive.client import RefusedError, agent_options, ask
from hive.dbg.bgp import policy_actions, route_rows, uptime
from hive.output import detailed, shown_as_document, table_width

_OFF: Final = 501
_TABLES: Final = {"known": "loc-rib", "sent": "adj-rib-out", "received": "adj-rib-in"}
_FAMILIES: Final = ("ipv4", "ipv6")
_WRONG: Final = {
    "virtual router with ASN": "expected --router as in hive bgp peers",
    "neighbor that has": "expected --peer as in hive bgp peers",
    "multiple virtual routers": "expected --router with --peer",
}
"""What to do about errors that the agent reports in Cilium's words."""


class _Address(click.ParamType[str]):
    """The address of a peer."""

    name = "address"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See click.ParamType."""
        try:
            return str(ip_address(value))
        except ValueError:
            self.fail(f"{value!r}: expected an IP address", param, ctx)


router_option = click.option(
    "--router",
    type=click.IntRange(1, 4294967295),
    metavar="ASN",
    help="Only of the router with this AS number.",
)


@click.group()
def command() -> None:
    """Show the BGP sessions of this node, and its announcements."""


@command.command()
@agent_options
def peers(agent_socket: Path, timeout: float, output: str) -> None:
    """Show sessions: state, uptime, numbers of routes, and why they ended."""
    found = _asked("/v1/bgp/peers", agent_socket, timeout)
    if shown_as_document(found, output):
        return
    if not found:
        click.echo("No sessions: no CiliumBGPNodeConfig of this node has peers.", err=True)
        return
    rows = []
    for one in found:
        counts = [
            f"{family['afi']}/{family['safi']}: {family.get('advertised', 0)} sent,"
            f" {family.get('received', 0)} received"
            for family in one.get("families") or ()
        ]
        if error := one.get("session-error", ""):
            counts = [error]
        if own := one.get("isolated-since", ""):
            crashes = one.get("speaker-crashes", 0)
            often = f", crashed {crashes} time{'s' if crashes > 1 else ''}" if crashes else ""
            counts.append(f"its own gobgpd since {own}{often}")
        since = one.get("uptime-nanoseconds", 0)
        cells = (
            str(one["local-asn"]),
            _with_port(one["peer-address"], one.get("peer-port", 0)),
            str(one["peer-asn"]),
            one["session-state"],
            uptime(since) if since else "",
        )
        rows.append((cells, counts))
    header = ("ROUTER", "PEER", "PEER AS", "SESSION", "SINCE", "ROUTES OR ERROR")
    for line in detailed(header, rows, table_width(output)):
        click.echo(line)


@command.command()
@click.argument("table", type=click.Choice(list(_TABLES)), default="known")
@router_option
@click.option("--peer", type=_Address(), metavar="ADDRESS", help="Only routes to or from this peer.")
@click.option("-f", "--family", type=click.Choice(_FAMILIES), help="Only routes of this family.")
@agent_options
def routes(
    table: str,
    router: int | None,
    peer: str | None,
    family: str | None,
    agent_socket: Path,
    timeout: float,
    output: str,
) -> None:
    """Show routes: this node's, those sent to peers, or those received from them.

    Received routes are never used: this node only announces.
    """
    if peer and table == "known":
        raise click.UsageError(
            "--peer: expected with sent or received; routes of the table known have no peer"
        )
    given = {"table_type": _TABLES[table], "safi": "unicast"}
    given |= {"router_asn": str(router)} if router is not None else {}
    given |= {"neighbor": peer} if peer else {}
    found = [
        route
        for each in ([family] if family is not None else _FAMILIES)
        for route in _asked(f"/v1/bgp/routes?{urlencode({**given, 'afi': each})}", agent_socket, timeout)
    ]
    if shown_as_document(found, output):
        return
    if not found:
        click.echo(f"No routes are {table}{f' of {peer}' if peer else ''}.", err=True)
        return
    rows = []
    for route in found:
        for number, neighbor, prefix, hop, age, attributes in route_rows(route):
            cells = (str(number), *(() if table == "known" else (neighbor,)), prefix, hop, age)
            rows.append((cells, [attributes.strip("[]")]))
    header = ("ROUTER", *(() if table == "known" else ("PEER",)), "PREFIX", "NEXT HOP", "SINCE", "ATTRIBUTES")
    for line in detailed(header, rows, table_width(output)):
        click.echo(line)


@command.command("route-policies")
@router_option
@agent_options
def route_policies(router: int | None, agent_socket: Path, timeout: float, output: str) -> None:
    """Show route policies: which routes go to which peers, with which attributes."""
    query = f"?router_asn={router}" if router is not None else ""
    found = _asked(f"/v1/bgp/route-policies{query}", agent_socket, timeout)
    if shown_as_document(found, output):
        return
    if not found:
        click.echo("No policies: no BGP instance runs on this node.", err=True)
        return
    rows = []
    for one in found:
        statements = [_statement(each) for each in one.get("statements") or ()]
        rows.append(((str(one["router-asn"]), one["name"], one["type"]), statements))
    for line in detailed(("ROUTER", "POLICY", "TYPE", "ROUTES"), rows, table_width(output)):
        click.echo(line)


def _statement(statement: dict[str, Any]) -> str:
    prefixes = [_match(one) for one in statement.get("match-prefixes") or ()]
    neighbors = [one.partition("/")[0] for one in statement.get("match-neighbors") or ()]
    text = f"{', '.join(prefixes) or 'its own routes'}{' to ' + ', '.join(neighbors) if neighbors else ''}"
    return f"{text}; {'; '.join(added)}" if (added := list(policy_actions(statement))) else text


def _match(one: dict[str, Any]) -> str:
    length = one["cidr"].rpartition("/")[2]
    least, most = one["prefix-len-min"], one["prefix-len-max"]
    return (
        str(one["cidr"])
        if (str(least), str(most)) == (length, length)
        else f"{one['cidr']} ({least}..{most})"
    )


def _with_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _asked(path: str, agent_socket: Path, timeout: float) -> list[dict[str, Any]]:
    """Query the agent. Raises click.ClickException with one line."""
    try:
        found: list[dict[str, Any]] = ask(path, agent_socket, timeout=timeout) or []
    except RefusedError as error:
        if error.status == _OFF:
            raise click.ClickException(
                "BGP is off: expected enable-bgp-control-plane=true (bgpControlPlane.enabled of the chart)"
            ) from error
        for words, hint in _WRONG.items():
            if words in error.reason:
                raise click.UsageError(f"{error.reason.partition(': ')[2]}: {hint}") from error
        raise
    return found
