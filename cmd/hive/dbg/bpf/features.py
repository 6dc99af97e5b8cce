"""``cilium-dbg bpf`` for nodes and features: tunnels, metrics, egress gateways and the like.

Source: Cilium 1.17, cilium-dbg/cmd/bpf_*.go and String() of the maps' keys and values (pkg/maps).
"""

import errno
import struct
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Interface, ip_address, ip_network
from pathlib import Path
from typing import Final

import click

from cells.maps.bpf import BpfError
from cells.maps.records.cluster import NodeKey, NodeValue, TunnelKey, TunnelValue
from cells.maps.records.flows import MetricsKey, MetricsValue
from cells.observe.events import reason_name
from hive.dbg.bpf.maps import (
    DUMPING,
    GLOBALS,
    NO_ENTRIES,
    Entries,
    LayoutError,
    auth_type,
    entries_of,
    listed,
    missing,
    show,
    unreadable,
)
from hive.dbg.go_text import aligned, output_option, printed
from hive.dbg.main import Group

FILES: Final = {
    **dict(enumerate(("bpf_host.c", "bpf_lxc.c", "bpf_overlay.c", "bpf_xdp.c", "bpf_sock.c"), 1)),
    6: "bpf_network.c",
    7: "bpf_wireguard.c",
    **dict(enumerate(("arp.h", "drop.h", "srv6.h", "icmp6.h", "nodeport.h", "lb.h", "mcast.h"), 101)),
    **dict(enumerate(("ipv4.h", "conntrack.h", "l3.h", "trace.h", "encap.h", "encrypt.h"), 108)),
    114: "host_firewall.h",
    115: "nodeport_egress.h",
}
"""Source files of Cilium's datapath, by the numbers in events and counters."""
_DIRECTIONS: Final = {1: "INGRESS", 2: "EGRESS", 3: "SERVICE"}
_Counted = tuple[str, str, int, int, int, str]
"""Reason, direction, packets, bytes, line, file."""


tunnel = Group("tunnel", callback=lambda: None, help="Tunnel endpoint map")
metrics = Group("metrics", callback=lambda: None, help="BPF datapath traffic metrics")
nodeid = Group("nodeid", callback=lambda: None, help="Manage the node IDs")
ipmasq = Group("ipmasq", callback=lambda: None, help="ip-masq-agent CIDRs")
filesystem = Group("fs", callback=lambda: None, help="BPF filesystem mount")


@tunnel.command("list")
@output_option
def list_tunnels(output: str) -> int:
    """List tunnel endpoint entries"""
    try:
        rows = [
            (TunnelKey.unpack(key), TunnelValue.unpack(value))
            for key, value in entries_of("cilium_tunnel_map")
        ]
    except (BpfError, LayoutError):
        return 1
    table = {
        f"{key.network}{f'@{key.cluster_id}' if key.cluster_id else ''}": [
            f"{value.node}:{value.encrypt_key}"
        ]
        for key, value in rows
    }
    show(table, ("TUNNEL", "VALUE"), output)
    return 0


@metrics.command("list")
@output_option
def list_metrics(output: str) -> None:
    """List BPF datapath traffic metrics"""
    name = "cilium_metrics"
    try:
        entries = entries_of(name, f"Unable to read {GLOBALS / name}")
    except BpfError as error:
        raise click.ClickException(f"Unable to open {GLOBALS / name}: {missing(name, error)}\n") from error
    rows = [(MetricsKey.unpack(key), MetricsValue.unpack(value)) for key, value in entries]
    cells = [metrics_cells(key, value) for key, value in rows]
    if not cells:
        click.echo(NO_ENTRIES, err=True)
    elif output:
        click.echo(printed(_summed(cells), output))
    else:
        header = ("REASON", "DIRECTION", "PACKETS", "BYTES", "LINE", "FILE")
        texts = sorted(tuple(map(str, row)) for row in cells)
        click.echo(aligned("\n".join("\t".join(row) for row in (header, *texts))))


def _summed(rows: list[_Counted]) -> list[dict[str, object]]:
    """Return sums by line of a file: keys may differ in fields that the client does not show."""
    sums: dict[tuple[str, str, int, str], list[int]] = {}
    for reason, direction, packets, octets, line, file in rows:
        counts = sums.setdefault((reason, direction.lower(), line, file), [0, 0])
        counts[0] += packets
        counts[1] += octets
    keys = ("reason", "direction", "packets", "bytes", "line", "file")
    return [
        dict(zip(keys, (reason, direction, *counts, line, file), strict=True))
        for (reason, direction, line, file), counts in sorted(sums.items())
    ]


def metrics_cells(key: MetricsKey, value: MetricsValue) -> _Counted:
    """What happened how often, and which line of the datapath counted it."""
    direction = _DIRECTIONS.get(key.direction, "UNKNOWN")
    file = FILES.get(key.file, f"unknown({key.file})")
    return reason_name(key.reason), direction, value.packets, value.octets, key.line, file


@nodeid.command("list")
@output_option
def list_node_ids(output: str) -> None:
    """List node IDs and their IP addresses"""
    try:
        rows = [
            (NodeKey.unpack(key), NodeValue.unpack(value)) for key, value in entries_of("cilium_node_map_v2")
        ]
    except LayoutError:  # as Cilium's client
        rows = []
    except BpfError:
        click.echo("Cannot find node bpf map", err=True)
        return
    if output:
        found = [{"ID": value.id, "Address": str(key.ip), "SPI": value.spi} for key, value in rows]
        click.echo(printed(found, output))
    elif not rows:
        click.echo(NO_ENTRIES, err=True)
    else:
        lines = ["NODE ID\tIP ADDRESSES\tSPI"]
        lines += [f"{value.id:#x}\t{key.ip}\t{value.spi}" for key, value in rows]
        click.echo(aligned("\n".join(lines)))


def _egress(key: bytes, value: bytes) -> tuple[object, ...]:
    bits, source, destination = int.from_bytes(key[:4], "little"), key[4:8], key[8:12]
    gateways = {bytes(4): "Not Found", bytes((0, 0, 0, 1)): "Excluded CIDR"}
    gateway = gateways.get(value[4:8]) or ip_address(value[4:8])
    return ip_address(source), IPv4Interface((destination, bits - 32)), ip_address(value[:4]), gateway


def _egress_model(entries: Entries) -> object:
    names = ("SourceIP", "DestCIDR", "EgressIP", "GatewayIP")
    return [dict(zip(names, map(str, _egress(*one)), strict=True)) for one in entries]


_AUTH_KEY: Final = struct.Struct("<IIHBx")


def _auth(key: bytes, value: bytes) -> tuple[object, ...]:
    local, remote, node, kind = _AUTH_KEY.unpack(key)
    return local, remote, node, auth_type(kind), _expiration(value, "%Y-%m-%d %H:%M:%S", " +0000 UTC")


def _auth_model(entries: Entries) -> object:
    """As Go: null without entries."""
    names = ("LocalIdentity", "RemoteIdentity", "RemoteNodeID", "AuthType", "Expiration")
    rows = [(*_AUTH_KEY.unpack(key), _expiration(value, "%Y-%m-%dT%H:%M:%S", "Z")) for key, value in entries]
    return [dict(zip(names, cells, strict=True)) for cells in rows] or None


def _expiration(value: bytes, form: str, zone: str) -> str:
    """A time in units of 512 ns since the epoch, with as many digits of nanoseconds as it has."""
    seconds, nanoseconds = divmod(512 * int.from_bytes(value, "little"), 1_000_000_000)
    fraction = f".{nanoseconds:09}".rstrip("0").rstrip(".")
    try:
        text = (datetime.fromtimestamp(0, UTC) + timedelta(seconds=seconds)).strftime(form)
    except OverflowError:  # after 9999, which no agent writes
        return f"{seconds}{fraction}s after 1970"
    return f"{text}{fraction}{zone}"


def _bandwidth_model(entries: Entries) -> object:
    """Bytes per second by endpoint, as the text of the map's rows."""
    rates = {
        str(int.from_bytes(key, "little")): int.from_bytes(value[:8], "little") for key, value in entries
    }
    return {endpoint: [str(rate)] for endpoint, rate in sorted(rates.items())}


def _bandwidth(key: bytes, value: bytes) -> tuple[object, ...]:
    """Return the endpoint and its bits per second, as Kubernetes prints a decimal quantity."""
    endpoint, rate, unit = int.from_bytes(key, "little"), 8 * int.from_bytes(value[:8], "little"), 0
    while rate and not rate % 1000 and unit < len(_QUANTITIES) - 1:
        rate, unit = rate // 1000, unit + 1
    return endpoint, f"{rate}{_QUANTITIES[unit]}"


_QUANTITIES: Final = ("", "k", "M", "G", "T", "P", "E")
"""Suffixes of quantities, by the power of 1000."""


def _bandwidth_rows(entries: Entries) -> Entries:
    """Return the entries in the order of their texts."""
    return sorted(entries, key=lambda one: tuple(map(str, _bandwidth(*one))))


def _config(key: bytes, value: bytes) -> tuple[object, ...]:
    return _CONFIG[int.from_bytes(key, "little")], int.from_bytes(value, "little")


_CONFIG: Final = {1: "AgentLiveness", 0: "UTimeOffset"}


def _config_wanted(entries: Entries) -> Entries:
    """Those with a meaning, of an array of 256."""
    found = dict(entries)
    keys = [number.to_bytes(4, "little") for number in _CONFIG]
    return [(key, found[key]) for key in keys if key in found]


def _config_model(entries: Entries) -> object:
    return [dict(zip(("Key", "Value"), _config(*one), strict=True)) for one in entries]


def _vtep(key: bytes, value: bytes) -> tuple[object, ...]:
    mac, endpoint = value[:6].hex(":").upper(), ip_address(value[8:12])
    return ip_address(key), f"vtepmac={mac} tunnelendpoint={endpoint}"


def _vtep_model(entries: Entries) -> object:
    rows = sorted((str(prefix), text) for prefix, text in (_vtep(*one) for one in entries))
    return {prefix: [text] for prefix, text in rows}


@ipmasq.command("list")
@output_option
def list_unmasqueraded(output: str) -> int:
    """List ip-masq-agent CIDRs"""
    names = ("cilium_ipmasq_v4", "cilium_ipmasq_v6")
    keys, absent = [], []
    for name in names:
        try:
            keys += [key for key, _ in entries_of(name, DUMPING)]
        except LayoutError as error:
            return unreadable(error)
        except BpfError as error:
            if error.errno != errno.ENOENT:
                return unreadable(LayoutError(f"{DUMPING}: {missing(name, error)}"))
            absent.append(missing(name, error))
    if len(absent) == len(names):  # a family that is off has no map
        return unreadable(LayoutError(f"{DUMPING}: {absent[0]}"))
    networks = [
        str(ip_network((ip_address(key[4:]), int.from_bytes(key[:4], "little")), strict=False))
        for key in keys
    ]
    if output:
        click.echo(printed(networks, output))
    elif networks:
        show({network: [""] for network in networks}, ("IP PREFIX/ADDRESS", ""), output)
    else:
        click.echo(NO_ENTRIES, err=True)
    return 0


@filesystem.command("show")
def show_filesystem() -> int:
    """Display bpf filesystem mount details"""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        number, parent, _, _, point, options, *optional = before.split()
        kind, source, super_options = after.split()
        if kind == "bpf":
            rows = {
                "MountID": number,
                "ParentID": parent,
                "Mounted State": "true",
                "MountPoint": point,
                "MountOptions": options,
                "OptionFields": f"[{' '.join(optional)}]",
                "FilesystemType": kind,
                "MountSource": source,
                "SuperOptions": super_options,
            }
            click.echo(aligned("\n".join(f"{name}:\t{value}" for name, value in rows.items())))
            return 0
    click.echo("BPF filesystem is not mounted", err=True)
    return 1


GROUPS: Final = (
    tunnel,
    metrics,
    nodeid,
    filesystem,
    listed(
        "egress",
        "cilium_egress_gw_policy_v4",
        "egress policy entries",
        ("Source IP", "Destination CIDR", "Egress IP", "Gateway IP"),
        _egress,
        _egress_model,
        "Error dumping contents of egress policy map",
        absent="Cannot find egress gateway bpf maps",
    ),
    listed(
        "auth",
        "cilium_auth_map",
        "authenticated connections between identities",
        ("SRC IDENTITY", "DST IDENTITY", "REMOTE NODE ID", "AUTH TYPE", "EXPIRATION"),
        _auth,
        _auth_model,
        absent="Cannot find auth bpf map",
        not_built={"flush": "mutual authentication is not built"},
    ),
    listed(
        "bandwidth",
        "cilium_throttle",
        "BPF datapath bandwidth settings",
        ("IDENTITY", "EGRESS BANDWIDTH (BitsPerSec)"),
        _bandwidth,
        _bandwidth_model,
        DUMPING,
        _bandwidth_rows,
    ),
    listed(
        "config",
        "cilium_runtime_config",
        "runtime config entries",
        ("KEY", "VALUE"),
        _config,
        _config_model,
        'Cannot load value with index "AgentLiveness" from config bpf map',
        _config_wanted,
        absent="Cannot find config bpf map",
    ),
    listed(
        "vtep",
        "cilium_vtep_map",
        "VTEP entries",
        ("IP PREFIX/ADDRESS", "VTEP"),
        _vtep,
        _vtep_model,
        DUMPING,
        not_built=dict.fromkeys(("add", "update", "delete"), "VTEP integration is not built"),
    ),
    ipmasq,
)
"""What ``cilium-dbg bpf`` has of features."""
