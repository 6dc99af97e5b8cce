"""Pinned maps, and how ``cilium-dbg bpf`` lists what is in them."""

import errno
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import click

from cells.maps.bpf import BpfError
from cells.maps.map import open_map
from hive.dbg.go_text import aligned, output_option, printed
from hive.dbg.main import Group

GLOBALS: Final = Path("/sys/fs/bpf/tc/globals")
PROTOCOLS: Final = {0: "ANY", 1: "ICMP", 6: "TCP", 17: "UDP", 58: "ICMPv6", 132: "SCTP"}
_AUTH: Final = {0: "disabled", 1: "spire", 2: "test-always-fail"}
NO_ENTRIES: Final = "No entries found."
DUMPING: Final = "error dumping contents of map"

LAYOUTS: Final = (
    ("cilium_auth_map", "authmap.AuthKey", 12, "authmap.AuthInfo", 8),
    ("cilium_ct4_*", "ctmap.CtKey4Global", 14, "ctmap.CtEntry", 56),
    ("cilium_ct_any4_*", "ctmap.CtKey4Global", 14, "ctmap.CtEntry", 56),
    ("cilium_ct6_*", "ctmap.CtKey6Global", 38, "ctmap.CtEntry", 56),
    ("cilium_ct_any6_*", "ctmap.CtKey6Global", 38, "ctmap.CtEntry", 56),
    ("cilium_egress_gw_policy_v4", "egressmap.EgressPolicyKey4", 12, "egressmap.EgressPolicyVal4", 8),
    ("cilium_ipv4_frag_datagrams", "fragmap.FragmentKey", 12, "fragmap.FragmentValue", 4),
    ("cilium_ipv6_frag_datagrams", "fragmap.FragmentKey6", 40, "fragmap.FragmentValue6", 4),
    ("cilium_ipcache", "ipcache.Key", 24, "ipcache.RemoteEndpointInfo", 12),
    ("cilium_ipmasq_v4", "ipmasq.Key4", 8, "ipmasq.Value", 1),
    ("cilium_ipmasq_v6", "ipmasq.Key6", 20, "ipmasq.Value", 1),
    ("cilium_lb4_backends_v3", "lbmap.Backend4KeyV3", 4, "lbmap.Backend4ValueV3", 12),
    ("cilium_lb6_backends_v3", "lbmap.Backend6KeyV3", 4, "lbmap.Backend6ValueV3", 24),
    ("cilium_lb4_reverse_nat", "lbmap.RevNat4Key", 2, "lbmap.RevNat4Value", 6),
    ("cilium_lb6_reverse_nat", "lbmap.RevNat6Key", 2, "lbmap.RevNat6Value", 18),
    ("cilium_lb4_services_v2", "lbmap.Service4Key", 12, "lbmap.Service4Value", 12),
    ("cilium_lb6_services_v2", "lbmap.Service6Key", 24, "lbmap.Service6Value", 12),
    ("cilium_lb4_source_range", "lbmap.SourceRangeKey4", 12, "lbmap.SourceRangeValue", 1),
    ("cilium_lb6_source_range", "lbmap.SourceRangeKey6", 24, "lbmap.SourceRangeValue", 1),
    ("cilium_lxc", "lxcmap.EndpointKey", 20, "lxcmap.EndpointInfo", 48),
    ("cilium_metrics", "metricsmap.Key", 8, "metricsmap.Value", 16),
    ("cilium_node_map_v2", "nodemap.NodeKey", 20, "nodemap.NodeValueV2", 4),
    ("cilium_policy_[0-9]*", "policymap.PolicyKey", 12, "policymap.PolicyEntry", 24),
    ("cilium_runtime_config", "configmap.Index", 4, "configmap.Value", 8),
    ("cilium_snat_v4_external", "nat.NatKey4", 14, "nat.NatEntry4", 40),
    ("cilium_snat_v6_external", "nat.NatKey6", 38, "nat.NatEntry6", 56),
    ("cilium_srv6_policy_v4", "srv6map.PolicyKey4", 12, "srv6map.PolicyValue", 16),
    ("cilium_srv6_policy_v6", "srv6map.PolicyKey6", 24, "srv6map.PolicyValue", 16),
    ("cilium_srv6_sid", "srv6map.SIDKey", 16, "srv6map.SIDValue", 4),
    ("cilium_srv6_vrf_v4", "srv6map.VRFKey4", 12, "srv6map.VRFValue", 4),
    ("cilium_srv6_vrf_v6", "srv6map.VRFKey6", 36, "srv6map.VRFValue", 4),
    ("cilium_throttle", "bwmap.EdtId", 8, "bwmap.EdtInfo", 56),
    ("cilium_tunnel_map", "tunnel.TunnelKey", 20, "tunnel.TunnelValue", 20),
    ("cilium_vtep_map", "vtep.Key", 4, "vtep.VtepEndpointInfo", 16),
)
"""Pins, and what Cilium's client reads their keys and values into, with sizes in bytes."""

Entries = list[tuple[bytes, bytes]]
Table = dict[str, list[str]]


def auth_type(number: int) -> str:
    """Return the name of an authentication type."""
    return _AUTH.get(number, f"Unknown-auth-type-{number}")


class LayoutError(click.ClickException):
    """A map has entries of other sizes: another version of Cilium pinned it."""


def entries_of(name: str, failure: str = "") -> Entries:
    """All entries of a pinned map.

    Raises BpfError if it cannot be opened, LayoutError that begins with ``failure`` for other sizes.
    """
    with open_map(GLOBALS / name) as opened:
        entries = list(opened.items())
    if entries and (reason := _misfit(name, *entries[0])):
        raise LayoutError(f"{failure}: {reason}")
    return entries


def _misfit(name: str, key: bytes, value: bytes) -> str:
    """Why the client cannot read an entry, in the words of github.com/cilium/ebpf; empty if it can."""
    lookup = "failed to lookup entry: " if name == "cilium_runtime_config" else "look up next key: "
    for pattern, key_type, key_size, value_type, value_size in LAYOUTS:
        if fnmatchcase(name, pattern):
            for what, kind, size, data in (
                (lookup, value_type, value_size, value),
                ("", key_type, key_size, key),
            ):
                if len(data) != size and not (name == "cilium_metrics" and len(data) % size == 0):  # per CPU
                    more = len(data) > size
                    return what + (
                        f"unmarshaling *{kind} doesn't consume all data" if more else "unexpected EOF"
                    )
    return ""


def update_entry(name: str, key: bytes, value: bytes) -> None:
    """Set an entry of a pinned map. Raises BpfError, LayoutError for a map with entries of other sizes."""
    with open_map(GLOBALS / name) as opened:
        try:
            opened.update(key, value)
        except ValueError as error:
            raise LayoutError(str(error)) from error


def delete_entry(name: str, key: bytes) -> None:
    """Remove an entry of a pinned map.

    Raises BpfError, also for an entry that is not there; LayoutError for a map with entries of other sizes.
    """
    with open_map(GLOBALS / name) as opened:
        try:
            found = opened.delete(key)
        except ValueError as error:
            raise LayoutError(str(error)) from error
    if not found:
        raise BpfError(errno.ENOENT, "delete", f"map {name}")


def refused(name: str, text: str, error: BpfError | LayoutError) -> str:
    """Why an entry, given as text, was not written, in the words of the client."""
    if isinstance(error, LayoutError):
        return error.message
    reason = "key does not exist" if error.errno == errno.ENOENT else (error.strerror or str(error)).lower()
    if error.operation == "update":
        return f"update map {name}: update: {reason}"
    if error.operation.startswith("delete"):
        return f"unable to delete element {text} from map {name}: delete: {reason}"
    return missing(name, error)


def swapped(number: int) -> int:
    """A number of 16 bits in network order as the client's structs have it."""
    return int.from_bytes(number.to_bytes(2, "big"), "little")


def missing(name: str, error: BpfError) -> str:
    """Why a pinned map could not be opened, in the words of the client."""
    reason = (error.strerror or str(error)).lower()
    return f"loading pinned map {GLOBALS / name}: {reason}"


def show(table: Table, header: tuple[str, str], output: str) -> None:
    """Rows by their key, each key in the first of its lines."""
    if output:
        click.echo(printed(dict(sorted(table.items())), output))
        return
    lines = ["\t".join(header) + "\t\n"]
    for key, values in sorted(table.items()):
        lines.extend(f"{key if not number else ''}\t{value}\t\n" for number, value in enumerate(values))
    click.echo(aligned("".join(lines)), nl=False)


def listed(
    name: str,
    pin: str,
    help_text: str,
    header: tuple[str, ...],
    row: Callable[[bytes, bytes], tuple[object, ...]],
    model: Callable[[Entries], object],
    failure: str = "",
    wanted: Callable[[Entries], Entries] = list,
    absent: str = "",
    not_built: dict[str, str] | None = None,
) -> Group:
    """A group with ``bpf NAME list`` for a map of a feature.

    ``model`` is what JSON has of the entries; ``failure`` begins the error for entries of other sizes,
    without one they are passed over; ``wanted`` picks and sorts entries; ``absent`` is printed if the map
    does not exist, which is an error only without that text; ``not_built`` are commands of the group that
    are refused, and why.
    """

    @output_option
    def list_all(output: str) -> int:
        try:
            entries = wanted(entries_of(pin, failure))
        except LayoutError as error:
            if failure:
                return unreadable(error)
            entries = []
        except BpfError as error:
            if not absent:
                return unreadable(LayoutError(f"{DUMPING}: {missing(pin, error)}"))
            if error.errno == errno.ENOENT:
                click.echo(absent, err=True)
                return 0
            raise click.ClickException(f"Unable to open {GLOBALS / pin}: {missing(pin, error)}\n") from error
        if output:
            click.echo(printed(model(entries), output))
            return 0
        rows = [row(key, value) for key, value in entries]
        if not rows:
            click.echo(NO_ENTRIES, err=True)
        else:
            click.echo(aligned("\n".join("\t".join(map(str, cells)) for cells in (header, *rows))))
        return 0

    group = Group(name, callback=lambda: None, help=help_text, not_built=not_built)
    group.add_command(click.command("list", help=f"List {help_text}")(list_all))
    return group


def unreadable(error: LayoutError) -> int:
    """Print why a map cannot be read, as the client does: some commands without ``Error:``; the exit code."""
    text = error.message
    click.echo(text if text.startswith("error dumping") else f"Error: {text}", err=True)
    return 1
