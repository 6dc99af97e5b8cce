"""``cilium-dbg bpf ipcache``: prefixes and their identities in the kernel.

Source: Cilium 1.17, cilium-dbg/cmd/bpf_ipcache_*.go, pkg/maps/ipcache.
"""

import json
import re
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Final

import click

from cells.maps.bpf import BpfError
from cells.maps.records.cluster import IpcacheKey, IpcacheValue, ipcache_text
from hive.dbg.bpf.maps import (
    NO_ENTRIES,
    LayoutError,
    Table,
    delete_entry,
    entries_of,
    missing,
    refused,
    show,
    unreadable,
    update_entry,
)
from hive.dbg.go_text import output_option
from hive.dbg.main import Group, needed

ipcache = Group("ipcache", callback=lambda: None, help="Manage the IPCache mappings for IP/CIDR <-> Identity")
_NAME: Final = "cilium_ipcache"
_PREFIX: Final = re.compile(r"([^%/]+)/(0|[1-9][0-9]{0,2})")


@ipcache.command("list")
@output_option
def list_ipcache(output: str) -> int:
    """List individual entries in the IPCache BPF map"""
    try:
        table = _ipcache("error dumping contents of map")
    except LayoutError as error:
        return unreadable(error)
    if table or output:
        show(table, ("IP PREFIX/ADDRESS", "IDENTITY"), output)
    else:
        click.echo(NO_ENTRIES, err=True)
    return 0


def _ipcache(failure: str = "unable to dump IPCache") -> Table:
    """Return the entries as text. Raises LayoutError that begins with ``failure`` if there is no such map."""
    try:
        entries = entries_of(_NAME, failure)
    except BpfError as error:
        raise LayoutError(f"{failure}: {missing(_NAME, error)}") from error
    return {
        _key_text(IpcacheKey.unpack(key)): [ipcache_text(IpcacheValue.unpack(value))]
        for key, value in entries
    }


def _key_text(key: IpcacheKey) -> str:
    return f"{key.ip}/{key.bits}{f'@{key.cluster_id}' if key.cluster_id else ''}"


_FORM: Final = "IP address must be in dotted decimal (192.168.1.1) or IPv6 (feab::f02b) form\n"


@ipcache.command("get")
@needed("address", f"No ip provided. {_FORM}")
def get_ipcache(address: str) -> int:
    """Retrieve identity for an ip"""
    try:
        wanted = ip_address(address)
    except ValueError:
        raise click.ClickException(f"Invalid ip address. {_FORM}") from None
    table = _ipcache()
    if not table:
        click.echo(NO_ENTRIES, err=True)
        return 1
    networks = {
        ip_network(prefix, strict=False): texts[0]
        for prefix, texts in table.items()
        if "@" not in prefix  # of another cluster
    }
    found = [network for network in networks if network.version == wanted.version and wanted in network]
    if not found:
        click.echo(f"{address} does not map to any identity")
        return 1
    longest = max(found, key=lambda network: network.prefixlen)
    click.echo(f"{address} maps to identity {networks[longest]}")
    return 0


@ipcache.command("match")
@click.argument("prefix", default="")
def match_ipcache(prefix: str) -> int:
    """Retrieve identity for a prefix with an exact match"""
    wanted = _key_text(_key(prefix, 0, mask=False))
    table = _ipcache()
    if not table:
        click.echo(NO_ENTRIES, err=True)
        return 1
    if wanted not in table:
        click.echo(f"{prefix} does not match to any ipcache entry")
        return 1
    click.echo(f"key {wanted} has value {json.dumps(','.join(table[wanted]))}")
    return 0


_cluster_option = click.option("--clusterid", type=click.IntRange(0, 0xFFFF), default=0, help="Cluster ID")


@ipcache.command("update")
@click.argument("prefix", default="")
@click.option("--tunnelendpoint", default="", help="Tunnel endpoint")
@click.option("--identity", type=click.IntRange(0, 0xFFFFFFFF), default=0, help="Identity")
@click.option("--encryptkey", type=click.IntRange(0, 0xFF), default=0, help="Encrypt key")
@click.option("--skiptunnel", is_flag=True, help="Skip tunnel")
@_cluster_option
def update_ipcache(
    prefix: str, tunnelendpoint: str, identity: int, encryptkey: int, skiptunnel: bool, clusterid: int
) -> int:
    """Update an entry for a prefix"""
    key = _key(prefix, clusterid)
    try:
        node = IPv4Address(tunnelendpoint)
    except ValueError as error:
        raise click.ClickException(
            f"Invalid tunnel endpoint. Expected --tunnelendpoint=172.21.0.2, got {json.dumps(tunnelendpoint)}"
        ) from error
    value = IpcacheValue(identity, node, encryptkey, int(skiptunnel))
    text = _key_text(key)
    try:
        update_entry(_NAME, key.pack(), value.pack())
    except (BpfError, LayoutError) as error:
        click.echo(f"Error updating entry {text}: {refused(_NAME, text, error)}", err=True)
        return 1
    click.echo(f"Updated entry {text} => {ipcache_text(value)}")
    return 0


@ipcache.command("delete")
@click.argument("prefix", default="")
@_cluster_option
def delete_ipcache(prefix: str, clusterid: int) -> int:
    """Delete an entry for a prefix"""
    key = _key(prefix, clusterid)
    text = _key_text(key)
    try:
        delete_entry(_NAME, key.pack())
    except (BpfError, LayoutError) as error:
        click.echo(f"Error deleting entry {text}: {refused(_NAME, text, error)}", err=True)
        return 1
    click.echo(f"Deleted entry {text}")
    return 0


def _key(text: str, cluster_id: int, *, mask: bool = True) -> IpcacheKey:
    """The key of a prefix, without its host bits if they are to be masked. Raises click.ClickException."""
    if not text:
        raise click.ClickException("No prefix provided. Expected one such as 10.244.3.110/32")
    found = _PREFIX.fullmatch(text)
    address, bits = found.groups() if found else ("", "")
    try:
        ip = ip_address(address)
        network = ip_network((ip, int(bits)), strict=False)
    except ValueError as error:
        raise click.ClickException(
            f"Invalid prefix address. Expected one such as 10.244.3.110/32, got {json.dumps(text)}"
        ) from error
    return IpcacheKey(network.network_address if mask else ip, network.prefixlen, cluster_id)
