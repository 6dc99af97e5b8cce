"""``hive fqdn``: names that pods have looked up, and names that policies select.

Source of the columns: cilium-dbg fqdn cache list.
"""

from pathlib import Path
from urllib.parse import quote, urlencode

import click

from hive.client import agent_options, ask, socket_option, timeout_option
from hive.names import Names, endpoint_number
from hive.output import fitted, shown_as_document, table_width

PATTERN = "Only names like PATTERN, such as *.example.org."


@click.group()
def command() -> None:
    """Show DNS names that pods have looked up, and names that policies select."""


@command.group()
def cache() -> None:
    """Show or delete the DNS answers that pods received."""


@cache.command("list")
@click.option("-e", "--endpoint", default="", help="Only names of this endpoint: a number, pod or address.")
@click.option("-p", "--matchpattern", default="", metavar="PATTERN", help=PATTERN)
@click.option(
    "-s", "--source", type=click.Choice(["lookup", "connection"]), help="Only names from this source."
)
@click.option("-c", "--cidr", default="", help="Only addresses inside CIDR.")
@agent_options
def list_names(
    endpoint: str,
    matchpattern: str,
    source: str | None,
    cidr: str,
    agent_socket: Path,
    timeout: float,
    output: str,
) -> None:
    """List names and their addresses; source connection: the TTL has expired, the pod is connected."""
    asked = {"matchpattern": matchpattern, "source": source or "", "cidr": cidr}
    query = urlencode({name: value for name, value in asked.items() if value})
    if endpoint:
        endpoint = endpoint_number(endpoint, agent_socket, timeout)
    path = f"/v1/fqdn/cache/{quote(endpoint, safe='')}" if endpoint else "/v1/fqdn/cache"
    missing = f"there is no endpoint {endpoint}"
    found = ask(f"{path}?{query}" if query else path, agent_socket, timeout=timeout, missing=missing)
    if shown_as_document(found, output):
        return
    if not found:
        click.echo("No names: pods have looked up none through the DNS proxy.", err=True)
        return
    pods = Names(agent_socket, timeout)
    rows = [
        {
            "endpoint": one["endpoint-id"],
            "pod": pods.endpoint(one["endpoint-id"]),
            "source": one["source"],
            "fqdn": one["fqdn"],
            "ttl": one["ttl"],
            "expiration time": one["expiration-time"],
            "ips": ",".join(one["ips"]),
        }
        for one in found
    ]
    first = ("endpoint", "pod", "fqdn", "ips")
    click.echo("\n".join(fitted(rows, table_width(output), "-o wide", first=first)))


@cache.command()
@click.option("-p", "--matchpattern", default="", metavar="PATTERN", help=PATTERN)
@click.option("-f", "--force", is_flag=True, help="Do not ask for confirmation.")
@socket_option
@timeout_option
def clean(matchpattern: str, force: bool, agent_socket: Path, timeout: float) -> None:
    """Delete names: connections to their addresses are cut until pods look them up again."""
    if not force:
        click.confirm("Connections that toFQDNs allows are cut until pods ask again. Go on?", abort=True)
    query = f"?{urlencode({'matchpattern': matchpattern})}" if matchpattern else ""
    ask(f"/v1/fqdn/cache{query}", agent_socket, timeout=timeout, method="DELETE")
    click.echo("FQDN proxy cache cleared")


@command.command()
@agent_options
def names(agent_socket: Path, timeout: float, output: str) -> None:
    """List the names that policies select."""
    found = ask("/v1/fqdn/names", agent_socket, timeout=timeout)
    if shown_as_document(found, output):
        return
    if not found["FQDNPolicySelectors"]:
        click.echo("No names: no policy selects any (toFQDNs).", err=True)
        return
    rows = [
        {"selector": _name(one["selectorString"]), "expression": one["regexString"]}
        for one in found["FQDNPolicySelectors"]
    ]
    click.echo("\n".join(fitted(rows, table_width(output), "-o wide", first=("selector",))))


def _name(selector: str) -> str:
    """Return the name or the pattern of ``MatchName: NAME, MatchPattern: PATTERN``, of which one is empty."""
    return " ".join(selector.removeprefix("MatchName: ").split(", MatchPattern: ")).strip()
