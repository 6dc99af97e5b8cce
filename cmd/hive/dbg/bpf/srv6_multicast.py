"""``cilium-dbg bpf srv6`` and ``bpf multicast``: maps of features that this agent does not have.

Another agent of the node may have pinned them: they are listed as Cilium's client lists them, not written.

Source: Cilium 1.17, cilium-dbg/cmd/bpf_srv6_*.go and bpf_multicast_*.go, pkg/maps/srv6map and multicast.
"""

import errno
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, ip_address
from typing import Final

import click

from cells.maps.bpf import BpfError
from cells.maps.map import map_by_id
from hive.dbg.bpf.maps import NO_ENTRIES, entries_of, missing
from hive.dbg.go_text import address_fault, aligned, output_option, printed, table
from hive.dbg.main import Group

srv6 = Group(
    "srv6",
    callback=lambda: None,
    help="Manage the SRv6 routing rules",
    aliases={"pol": "policy", "ctx": "vrf"},
)
_STATIC_BITS: Final = {"policy": 32, "vrf4": 32, "vrf6": 128}
"""Bits of a prefix length before the destination."""

_Row = tuple[object, ...]


def _listed(
    name: str,
    pins: Sequence[str],
    what: str,
    header: Sequence[str],
    fields: Sequence[str],
    row: Callable[[bytes, bytes], _Row],
) -> None:
    """Add ``bpf srv6 NAME``; ``what`` names the map in messages, ``fields`` are the keys in JSON."""

    opened = f"{what}s" if len(pins) > 1 else what

    @output_option
    def list_all(output: str) -> None:
        rows = []
        for pin in pins:
            family = {"4": "IPv4 ", "6": "IPv6 "}.get(pin[-1], "")
            try:
                entries = entries_of(pin, f"Error dumping contents of the {family}SRv6 {what}")
            except BpfError as error:
                if error.errno == errno.ENOENT:
                    click.echo(f"Cannot find SRv6 {opened}", err=True)
                    return
                raise click.ClickException(f"Cannot open SRv6 {opened}: {missing(pin, error)}") from error
            rows += [row(key, value) for key, value in entries]
        if output:
            click.echo(printed([dict(zip(fields, cells, strict=True)) for cells in rows], output))
        elif rows:
            click.echo(table(header, rows))
        else:
            click.echo(NO_ENTRIES, err=True)

    srv6.add_command(click.command(name, help=f"List SRv6 {what} entries")(list_all))


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _policy_row(key: bytes, value: bytes) -> _Row:
    bits = _number(key[:4]) - _STATIC_BITS["policy"]
    return _number(key[4:8]), f"{ip_address(key[8:])}/{bits}", str(ip_address(value))


def _vrf_row(key: bytes, value: bytes) -> _Row:
    length = (len(key) - 4) // 2
    bits = _number(key[:4]) - _STATIC_BITS["vrf4" if length == 4 else "vrf6"]
    source, destination = ip_address(key[4 : 4 + length]), ip_address(key[4 + length :])
    return str(source), f"{destination}/{bits}", _number(value)


def _sid_row(key: bytes, value: bytes) -> _Row:
    return str(ip_address(key)), _number(value)


_listed(
    "policy",
    ("cilium_srv6_policy_v4", "cilium_srv6_policy_v6"),
    "policy map",
    ("VRF ID", "Destination CIDR", "SID"),
    ("VRFID", "DestCIDR", "SID"),
    _policy_row,
)
_listed("sid", ("cilium_srv6_sid",), "SID map", ("SID", "VRF ID"), ("SID", "VRFID"), _sid_row)
_listed(
    "vrf",
    ("cilium_srv6_vrf_v4", "cilium_srv6_vrf_v6"),
    "VRF mapping map",
    ("Source IP", "Destination CIDR", "VRF ID"),
    ("SourceIP", "DestCIDR", "ID"),
    _vrf_row,
)

_NOT_BUILT: Final = dict.fromkeys(("add", "delete", "del"), "multicast is not built")
_GROUPS: Final = "cilium_mcast_group_outer_v4_map"
multicast = Group(
    "multicast", callback=lambda: None, help="Manage multicast BPF programs", aliases={"sub": "subscriber"}
)
group = Group("group", callback=lambda: None, help="Manage the multicast groups.", not_built=_NOT_BUILT)
subscriber = Group(
    "subscriber", callback=lambda: None, help="Manage the multicast subscribers.", not_built=_NOT_BUILT
)
multicast.add_command(group)
multicast.add_command(subscriber)


def _groups(failure: str) -> dict[IPv4Address, int]:
    """Return the number of each group's inner map. Raises click.ClickException without the outer map."""
    try:
        entries = entries_of(_GROUPS, failure)
    except BpfError as error:
        absent = error.errno == errno.ENOENT
        reason = "multicast not enabled" if absent else f"cannot open multicast bpf maps: {error}"
        raise click.ClickException(f"{failure}: {reason}") from error
    return {IPv4Address(key): _number(value) for key, value in sorted(entries)}


@group.command("list")
@output_option
def list_groups(output: str) -> None:
    """List the multicast groups."""
    found = list(map(str, _groups("failed to get multicast bpf map")))
    click.echo(printed(found, output) if output else "\n".join(["Group Address", *found]))


@subscriber.command("list")
@click.argument("wanted", metavar="< group | all >", nargs=-1)
@output_option
def list_subscribers(wanted: tuple[str, ...], output: str) -> None:
    """List the multicast subscribers for the given group."""
    address = _wanted(wanted)
    groups = _groups("Failed to get multicast bpf map")
    if address is not None:
        if address not in groups:
            reason = f"failed to lookup multicast group {address}"
            raise click.ClickException(
                f"Failed to list multicast subscribers: {reason}: {reason}: key does not exist"
            )
        groups = {address: groups[address]}
    if output:  # the fields of the client's model are private
        click.echo(printed([{} for _ in groups] or None, output))
        return
    lines = ["Group\tSubscriber\tType\t"]
    for each, number in groups.items():
        with map_by_id(number) as inner:
            found = sorted(value for _, value in inner.items())
        kinds = ("Remote Node" if value[-1] else "Local Endpoint" for value in found)
        rows = [f"{IPv4Address(value[:4])}\t{kind}\t" for value, kind in zip(found, kinds, strict=True)]
        lines += [f"{'' if at else each}\t{text}" for at, text in enumerate(rows or [""])]
    click.echo(aligned("\n".join(lines), least=16, gap=0))


def _wanted(words: tuple[str, ...]) -> IPv4Address | None:
    """Return the group that is asked for, None for all. Raises click.ClickException."""
    failure = "invalid argument: "
    if len(words) != 1:
        raise click.ClickException(
            f"{failure}expected group address or 'all' as argument, got {len(words)} arguments"
        )
    if words[0] == "all":
        return None
    failure += "invalid group address: "
    try:
        address = ip_address(words[0])
    except ValueError as error:
        reason = address_fault(words[0]) or str(error)
        raise click.ClickException(
            f'{failure}invalid IP address format: ParseAddr("{words[0]}"): {reason}'
        ) from error
    if not isinstance(address, IPv4Address) or not address.is_multicast:
        raise click.ClickException(f"{failure}invalid multicast IP: {address}")
    return address
