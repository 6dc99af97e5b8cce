"""``cilium-dbg bpf``: the maps in the kernel as Cilium's client prints them.

Source: Cilium 1.17, cilium-dbg/cmd/bpf_*.go and String() of the maps' keys and values (pkg/maps).
"""

import json
from collections.abc import Iterable
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final

import click

from cells.maps.bpf import BpfError
from cells.maps.map import open_map
from cells.maps.records.cluster import IpcacheKey, IpcacheValue, ipcache_text
from cells.maps.records.endpoints import LxcKey, LxcValue, PolicyEntry, PolicyKey
from cells.maps.records.flows import CT_IN, CT_RELATED, CT_SERVICE, CtEntry, CtKey, NatEntry
from hive.dbg.bpf.features import GROUPS
from hive.dbg.bpf.lb import lb
from hive.dbg.bpf.maps import (
    AUTH,
    GLOBALS,
    NO_ENTRIES,
    PROTOCOLS,
    LayoutError,
    Table,
    entries_of,
    missing,
    show,
    unreadable,
)
from hive.dbg.go_text import aligned, duration, output_option, printed, socket_text
from hive.dbg.main import Group, root_only
from hive.dbg.requests import RequestFailedError, ask

_DUMPING: Final = "Error while dumping BPF Map"
_CT_FLAGS: Final = (
    *("RxClosing", "TxClosing", "Nat64", "LBLoopback", "SeenNonSyn", "NodePort", "ProxyRedirect"),
    *("DSRInternal", "FromL7LB", "Reserved1", "FromTunnel"),
)


@click.group(cls=Group, not_built={"multicast": "multicast is not built"})
def command() -> None:
    """Direct access to local BPF maps"""
    root_only("cilium-dbg bpf")


def _group(name: str, help_text: str) -> Group:
    found = Group(name, callback=lambda: None, help=help_text)
    command.add_command(found)
    return found


endpoint = _group("endpoint", "Local endpoint map")
ipcache = _group("ipcache", "Manage the IPCache mappings for IP/CIDR <-> Identity")
policy = _group("policy", "Manage policy related BPF maps")
ct = _group("ct", "Connection tracking tables")
nat = _group("nat", "NAT mapping tables")
command.add_command(lb)
for each in GROUPS:
    command.add_command(each)


@endpoint.command("list")
@output_option
def list_endpoints(output: str) -> int:
    """List local endpoint entries"""
    try:
        rows = [(LxcKey.unpack(key), LxcValue.unpack(value)) for key, value in entries_of("cilium_lxc")]
    except (BpfError, LayoutError):
        return 1
    table = {f"{key.ip}:0": [lxc_text(value)] for key, value in rows}
    show(table, ("IP ADDRESS", "LOCAL ENDPOINT INFO"), output)
    return 0


def lxc_text(value: LxcValue) -> str:
    """An endpoint of this node, or the node itself."""
    if value.is_host:
        return "(localhost)"
    mac, node_mac = value.mac.hex(":").upper(), value.node_mac.hex(":").upper()
    return (
        f"id={value.endpoint_id:<5} sec_id={value.identity:<5} flags=0x{value.flags:04X} "
        f"ifindex={value.ifindex:<3} mac={mac} nodemac={node_mac}"
    )


@ipcache.command("list")
@output_option
def list_ipcache(output: str) -> int:
    """List individual entries in the IPCache BPF map"""
    try:
        table = _ipcache()
    except LayoutError as error:
        return unreadable(error)
    if table or output:
        show(table, ("IP PREFIX/ADDRESS", "IDENTITY"), output)
    else:
        click.echo(NO_ENTRIES, err=True)
    return 0


def _ipcache() -> Table:
    failure = "error dumping contents of map"
    try:
        entries = entries_of("cilium_ipcache", failure)
    except BpfError as error:
        raise LayoutError(f"{failure}: {missing('cilium_ipcache', error)}") from error
    return {
        str(IpcacheKey.unpack(key).network): [ipcache_text(IpcacheValue.unpack(value))]
        for key, value in entries
    }


@ipcache.command("get")
@click.argument("address")
def get_ipcache(address: str) -> None:
    """Retrieve identity for an ip"""
    try:
        wanted = ip_address(address.partition("/")[0])
    except ValueError:
        raise click.ClickException(
            "Error parsing IP address; please provide an IP address without prefix\n"
        ) from None
    table = {ip_network(prefix): texts[0] for prefix, texts in _ipcache().items()}
    found = [network for network in table if network.version == wanted.version and wanted in network]
    if not found:
        raise click.ClickException(f"{address} does not map to any identity\n")
    longest = max(found, key=lambda network: network.prefixlen)
    click.echo(f"{address} maps to identity {table[longest]}")


@policy.command("get")
@click.argument("number", required=False)
@click.option("--all", "everything", is_flag=True, help="Dump all policy maps")
@click.option("-n", "--numeric", is_flag=True, help="Do not resolve IDs")
@output_option
def get_policy(number: str | None, everything: bool, numeric: bool, output: str) -> None:
    """List contents of a policy BPF map"""
    if everything:
        for path in sorted(GLOBALS.glob("cilium_policy_[0-9]*")):
            click.echo(f"Endpoint ID: {int(path.name.rpartition('_')[2])}\nPath: {path}\n")
            _print_policy(path.name, numeric, output)
            click.echo("")
        return
    if not number or not number.isdigit():
        raise click.ClickException("Please provide an endpoint ID, or --all\n")
    _print_policy(f"cilium_policy_{int(number):05}", numeric, output)


def _print_policy(name: str, numeric: bool, output: str) -> None:
    try:
        entries = entries_of(name, "Error while opening bpf Map")
    except BpfError as error:
        raise click.ClickException(f"Failed to open map: {missing(name, error)}\n") from error
    rows = [(PolicyKey.unpack(key), PolicyEntry.unpack(value), key) for key, value in entries]
    rows.sort(key=lambda row: (not row[1].deny, row[0].egress, row[0].identity, row[0].protocol, row[0].port))
    if output:
        click.echo(printed([policy_model(*row) for row in rows], output))
        return
    who = "IDENTITY" if numeric else "LABELS (source:key[=value])"
    lines = [f"POLICY\tDIRECTION\t{who}\tPORT/PROTO\tPROXY PORT\tAUTH TYPE\tBYTES\tPACKETS\tPREFIX\t\n"]
    for key, entry, _ in rows:
        first, *others = [str(key.identity)] if numeric else _labels(key.identity)
        lines.append(policy_text(key, entry, first))
        lines.extend(f"\t\t{label}\t\t\t\t\t\t\t\n" for label in others)
    click.echo(aligned("".join(lines)), nl=False)
    if not rows:
        click.echo("Policy stats empty. Perhaps the policy enforcement is disabled?")


def policy_text(key: PolicyKey, entry: PolicyEntry, peer: str) -> str:
    """A rule of a policy map, of the peer in words."""
    last = key.port | 0xFFFF >> key.port_bits
    ports = f"{key.port}-{last}" if last != key.port else str(key.port)
    protocol = PROTOCOLS.get(key.protocol, str(key.protocol))
    cells = (
        *("Deny" if entry.deny else "Allow", "Egress" if key.egress else "Ingress", peer),
        *(f"{ports}/{protocol}" if key.port_bits else protocol, entry.proxy_port or "NONE"),
        *(AUTH.get(entry.auth_type, entry.auth_type), entry.octets, entry.packets),
        8 + key.port_bits if key.protocol else 0,
    )
    return "".join(f"{cell}\t" for cell in cells) + "\n"


def policy_model(key: PolicyKey, entry: PolicyEntry, data: bytes) -> dict[str, object]:
    """A rule of a policy map as ``-o json`` has it: raw fields."""
    return {
        "ProxyPortNetwork": _swapped(entry.proxy_port),
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
            "DestPortNetwork": _swapped(key.port),
        },
    }


def _swapped(port: int) -> int:
    return int.from_bytes(port.to_bytes(2, "big"), "little")


def _labels(number: int) -> list[str]:
    try:
        found = ask("GET /identity/{id}", id=str(number))
    except RequestFailedError as error:
        click.echo(f"Was impossible to retrieve label ID {number}: {error}", err=True)
        return [str(number)]
    return found.get("labels") or [str(number)]


@policy.command("list")
@output_option
def list_policies(output: str) -> None:
    """List all policy maps"""
    paths = [str(path) for path in sorted(GLOBALS.glob("cilium_policy_[0-9]*"))]
    click.echo(printed(paths, output) if output else "\n".join(paths or [NO_ENTRIES]))


def _families() -> list[str]:
    """Which families the agent serves: 4, or 4 and 6; without an agent those of its last start.

    Raises click.ClickException.
    """
    try:
        ask("GET /healthz", headers={"Brief": "true"})
    except RequestFailedError:
        return ["4", "6"] if _runtime_config().get("EnableIPv6", True) else ["4"]
    try:
        status = ask("GET /config").get("status") or {}
    except RequestFailedError as error:
        raise click.ClickException(f"Cannot get configuration: {error}\n") from error
    ipv6 = ((status.get("addressing") or {}).get("ipv6") or {}).get("enabled")
    return ["4", "6"] if ipv6 else ["4"]


def _runtime_config() -> dict[str, Any]:
    """The settings of the agent's last start, empty without them."""
    try:
        found: dict[str, Any] = json.loads(_RUNTIME_CONFIG.read_text())
    except (OSError, ValueError):
        return {}
    return found


_RUNTIME_CONFIG = Path("/var/run/cilium/state/agent-runtime-config.json")


@ct.command("list")
@click.argument("scope", default="global")
@click.argument("number", required=False)
@click.option("-d", "--time-diff", is_flag=True, help="Calculate time difference for table entries")
@click.option("--time-diff-clocksource-mode", default="", help="manually set clock source mode")
@click.option("--time-diff-clocksource-hz", default=0, help="manually set clock source Hz")
@output_option
def list_connections(
    scope: str,
    number: str | None,
    time_diff: bool,
    time_diff_clocksource_mode: str,
    time_diff_clocksource_hz: int,
    output: str,
) -> None:
    """List connection tracking entries"""
    del time_diff, time_diff_clocksource_mode, time_diff_clocksource_hz, number
    if scope != "global":
        raise click.ClickException(f"there is one table for all endpoints: use global instead of {scope}\n")
    names = [f"cilium_ct{kind}{family}_global" for family in _families() for kind in ("", "_any")]
    found: list[dict[str, Any]] = []
    for name in names:
        try:
            rows = [(CtKey.unpack(key), CtEntry.unpack(value)) for key, value in entries_of(name, _DUMPING)]
        except BpfError as error:
            raise click.ClickException(
                f"Unable to open {GLOBALS / name}: {missing(name, error)}\n"
            ) from error
        if output:
            found += [{"Key": str(key), "Value": ct_text(key, entry)} for key, entry in rows]
        else:
            click.echo("".join(f"{ct_text(key, entry)} \n" for key, entry in rows))
    if output:
        click.echo(printed(found, output))


def ct_text(key: CtKey, entry: CtEntry) -> str:
    """A connection."""
    way = "SVC" if key.flags & CT_SERVICE else "IN" if key.flags & CT_IN else "OUT"
    names = [name for bit, name in enumerate(_CT_FLAGS) if entry.flags >> bit & 1]
    source, destination = (key.saddr, key.daddr) if way == "SVC" else (key.daddr, key.saddr)
    ports = (key.dport, key.sport) if way == "SVC" else (key.sport, key.dport)
    words = [
        f"{PROTOCOLS.get(key.protocol, key.protocol)} {way} {source}:{ports[0]} -> {destination}:{ports[1]}",
        *(["related"] if key.flags & CT_RELATED else []),
        f"expires={entry.lifetime} Packets={entry.packets} Bytes={entry.octets}",
        f"RxFlagsSeen=0x{entry.rx_flags_seen:02x} LastRxReport={entry.last_rx_report}",
        f"TxFlagsSeen=0x{entry.tx_flags_seen:02x} LastTxReport={entry.last_tx_report}",
        f"Flags=0x{entry.flags:04x} [ {' '.join([*names, ']'])} RevNAT={entry.rev_nat_index}",
        f"SourceSecurityID={entry.source_identity} IfIndex={entry.ifindex} BackendID={entry.backend_id}",
    ]
    return " ".join(words)


@nat.command("list")
@output_option
def list_translations(output: str) -> None:
    """List all NAT mapping entries"""
    families = _families()
    found: list[dict[str, Any]] = []
    for family in families:
        name = f"cilium_snat_v{family}_external"
        now = _clock()
        try:
            rows = [(CtKey.unpack(key), NatEntry.unpack(value)) for key, value in entries_of(name, _DUMPING)]
        except BpfError as error:
            raise click.ClickException(
                f"Unable to open {GLOBALS / name}: {missing(name, error)}\n"
            ) from error
        if output:
            found += [{"Key": str(key), "Value": nat_text(key, entry, now)} for key, entry in rows]
        else:
            click.echo("".join(f"{nat_text(key, entry, now)}\n" for key, entry in rows))
    if output:
        click.echo(printed(found, output))


def _clock() -> int:
    """Seconds of the clock that maps have, by the agent or by the settings of its last start.

    Raises click.ClickException where neither shows which clock that is.
    """
    reason = "could not determine clocksource"
    try:
        known = bool(ask("GET /healthz", headers={"Brief": "false"}).get("clock-source"))
    except RequestFailedError as error:
        known, reason = False, str(error).splitlines()[0]
    if not known:
        click.echo(f"Failed to get clocksource from agent: {reason}", err=True, nl=False)
        if "ClockSource" not in _runtime_config():
            missing = f"open {_RUNTIME_CONFIG}: no such file or directory"
            raise click.ClickException(f"Error while dumping BPF Map: {missing}")
    return int(float(Path("/proc/uptime").read_text().split()[0]))


def nat_text(key: CtKey, entry: NatEntry, now: int) -> str:
    """A translation of addresses; ``now`` in seconds of the maps' clock."""
    way, what = ("IN", "DST") if key.flags & CT_IN else ("OUT", "SRC")
    source, destination, to = (
        socket_text(str(ip), port)
        for ip, port in ((key.saddr, key.sport), (key.daddr, key.dport), (entry.address, entry.port))
    )
    age = duration(max(0, now - entry.created))
    return (
        f"{PROTOCOLS.get(key.protocol, key.protocol)} {way} {source} -> {destination} XLATE_{what} {to} "
        f"Created={age} ago NeedsCT={int(entry.needs_ct)}"
    )


def _flush(names: Iterable[str]) -> None:
    for name in names:
        try:
            with open_map(GLOBALS / name) as opened:
                keys = [key for key, _ in opened.items()]
                for key in keys:
                    opened.delete(key)
        except BpfError as error:
            raise click.ClickException(
                f"Unable to flush {GLOBALS / name}: {missing(name, error)}\n"
            ) from error
        click.echo(f"Flushed {len(keys)} entries from {GLOBALS / name}")


@ct.command("flush")
@click.argument("scope", default="global")
def flush_connections(scope: str) -> None:
    """Flush all connection tracking entries"""
    if scope != "global":
        raise click.ClickException(f"there is one table for all endpoints: use global instead of {scope}\n")
    _flush(f"cilium_ct{kind}{family}_global" for family in _families() for kind in ("", "_any"))


@nat.command("flush")
def flush_translations() -> None:
    """Flush all NAT mapping entries"""
    _flush(f"cilium_snat_v{family}_external" for family in _families())
