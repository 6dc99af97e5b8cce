"""``cilium-dbg bpf``: the maps in the kernel as Cilium's client prints them.

Source: Cilium 1.17, cilium-dbg/cmd/bpf_*.go and String() of the maps' keys and values (pkg/maps).
"""

import errno
import json
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from cells.maps.bpf import BpfError
from cells.maps.map import open_map
from cells.maps.records.endpoints import LxcKey, LxcValue
from cells.maps.records.flows import CT_IN, CT_RELATED, CT_SERVICE, CtEntry, CtKey, FragmentPorts, NatEntry
from hive.dbg.bpf.features import GROUPS
from hive.dbg.bpf.ipcache import ipcache
from hive.dbg.bpf.lb import lb
from hive.dbg.bpf.maps import (
    GLOBALS,
    NO_ENTRIES,
    PROTOCOLS,
    LayoutError,
    delete_entry,
    entries_of,
    missing,
    refused,
    show,
    swapped,
)
from hive.dbg.bpf.policy import policy
from hive.dbg.bpf.srv6_multicast import multicast, srv6
from hive.dbg.go_text import (
    address_fault,
    go_duration,
    output_option,
    parse_unsigned,
    printed,
    socket_text,
    table,
)
from hive.dbg.main import Group, needed, root_only
from hive.dbg.requests import RequestFailedError, ask

Entry = TypeVar("Entry")

_DUMPING: Final = "Error while dumping BPF Map"
_COLLECTING: Final = "Error while collecting BPF map entries"
_CT_FLAGS: Final = (
    *("RxClosing", "TxClosing", "Nat64", "LBLoopback", "SeenNonSyn", "NodePort", "ProxyRedirect"),
    *("DSRInternal", "FromL7LB", "", "FromTunnel"),
)
"""Names of the flags from bit 0; the reserved one has none. Higher bits are printed as a number."""


_NOT_BUILT: Final = {
    "recorder": "the recorder is not built: read cilium-dbg monitor",
    "sha": "programs have no templates: hive bpf list shows those that are loaded",
}


@click.group(cls=Group, not_built=_NOT_BUILT, aliases={"fragments": "frag", "mcast": "multicast"})
def command() -> None:
    """Direct access to local BPF maps"""
    root_only("cilium-dbg bpf")


def _group(name: str, help_text: str) -> Group:
    found = Group(name, callback=lambda: None, help=help_text)
    command.add_command(found)
    return found


endpoint = _group("endpoint", "Local endpoint map")
ct = _group("ct", "Connection tracking tables")
nat = _group("nat", "NAT mapping tables")
frag = _group("frag", "Manage the fragments of datagrams")
for each in (ipcache, policy, lb, srv6, multicast, *GROUPS):
    command.add_command(each)


@endpoint.command("list")
@output_option
def list_endpoints(output: str) -> int:
    """List local endpoint entries"""
    try:
        rows = [(LxcKey.unpack(key), LxcValue.unpack(value)) for key, value in entries_of("cilium_lxc")]
    except (BpfError, LayoutError):
        return 1
    found = {f"{key.ip}:0": [lxc_text(value)] for key, value in rows}
    show(found, ("IP ADDRESS", "LOCAL ENDPOINT INFO"), output)
    return 0


@endpoint.command("delete")
@click.argument("address")
def delete_endpoint(address: str) -> None:
    """Delete local endpoint entries"""
    name = "cilium_lxc"
    if not address:
        raise click.ClickException("Please specify the endpoint to delete")
    try:
        key = LxcKey(ip_address(address))
    except ValueError as error:
        reason = f"ParseAddr({json.dumps(address)}): {address_fault(address) or error}"
        raise click.ClickException(f"Unable to parse IP '{address}': {reason}") from error
    try:
        delete_entry(name, key.pack())
    except (BpfError, LayoutError) as error:
        reason = refused(name, f"{key.ip}:0", error)
        doing = "open map" if isinstance(error, BpfError) and error.operation == "open" else ""
        raise click.ClickException(f"Unable to {doing or 'delete endpoint entry'}: {reason}") from error


def lxc_text(value: LxcValue) -> str:
    """An endpoint of this node, or the node itself."""
    if value.is_host:
        return "(localhost)"
    mac, node_mac = value.mac.hex(":").upper(), value.node_mac.hex(":").upper()
    return (
        f"id={value.endpoint_id:<5} sec_id={value.identity:<5} flags=0x{value.flags:04X} "
        f"ifindex={value.ifindex:<3} mac={mac} nodemac={node_mac}"
    )


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
_NO_RUNTIME_CONFIG = f"open {_RUNTIME_CONFIG}: no such file or directory"

Remaining = Callable[[int], int]
"""The seconds from now until a time in a map."""


def _agents_clock() -> tuple[dict[str, Any], str]:
    """The clock of the maps as the agent reports it, empty with the reason if it does not."""
    try:
        source = ask("GET /healthz", headers={"Brief": "false"}).get("clock-source") or {}
    except RequestFailedError as error:
        return {}, str(error).splitlines()[0]
    return source, "" if source else "could not determine clocksource"


def _clock_of_last_start() -> dict[str, Any]:
    """The clock of the maps by the settings of the agent's last start, empty without them."""
    settings = _runtime_config()
    if "ClockSource" not in settings:
        return {}
    mode = "jiffies" if settings["ClockSource"] else "ktime"
    return {"mode": mode, "hertz": settings.get("KernelHz", 0)}


def _remaining(mode: str, hertz: int) -> Remaining:
    """How long entries have by the clock of the maps, which the agent knows if ``mode`` is empty.

    Raises click.ClickException for a clock that is not known.
    """
    source: dict[str, Any] = {"mode": mode, "hertz": hertz}
    if not mode:
        source = _agents_clock()[0] or _clock_of_last_start()
    reason = "" if source else _NO_RUNTIME_CONFIG
    if source and source.get("mode") not in {"ktime", "jiffies"}:
        reason = "invalid clocksource"
    elif source and source["mode"] == "jiffies" and not source.get("hertz"):
        reason = "invalid HZ value"
    if reason:
        raise click.ClickException(f"could not determine clocksource: {reason}\n")
    if source["mode"] == "ktime":
        now = _uptime()
        return lambda time: time - now
    ticks, per_second = _jiffies() >> 8, int(source["hertz"])  # maps have every 256th
    return lambda time: int((time - ticks) * 256 / per_second)


def _uptime() -> int:
    return int(float(Path("/proc/uptime").read_text().split()[0]))


def _jiffies() -> int:
    """Ticks of the kernel. Raises click.ClickException where it does not show them."""
    for file, word in (("/proc/schedstat", "timestamp"), ("/proc/timer_list", "jiffies:")):
        try:
            lines = Path(file).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith(word):
                return int(line.split()[1])
    raise click.ClickException(
        f"{_DUMPING}: jiffies are not in /proc/schedstat or /proc/timer_list of this kernel\n"
    )


@ct.command("list")
@needed("scope", "Missing endpoint id or 'global' argument\n")
@click.argument("number", required=False)
@click.option("-d", "--time-diff", is_flag=True, help="Calculate time difference for table entries")
@click.option("--time-diff-clocksource-mode", default="", help="manually set clock source mode")
@click.option("--time-diff-clocksource-hz", default=250, help="manually set clock source Hz")
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
    try:
        which, families = _scope(scope, number)
    except ValueError as error:
        click.echo(f"Invalid argument: {error}", err=True, nl=False)
        return
    names = [f"cilium_ct{kind}{family}_{which}" for family in families for kind in ("", "_any")]
    found: list[dict[str, Any]] = []
    remaining: Remaining | None = None
    for name in names:
        rows = _rows(name, CtEntry.unpack, output)
        if output:
            found += [{"Key": tuple_model(key), "Value": ct_model(entry)} for key, entry in rows]
        else:
            if time_diff:
                remaining = _remaining(time_diff_clocksource_mode, time_diff_clocksource_hz)
            click.echo("".join(f"{ct_text(key, entry, remaining)} \n" for key, entry in _of_protocol(rows)))
    if output:
        click.echo(printed(found, output))


def _scope(kind: str, number: str | None) -> tuple[str, list[str]]:
    """Return the end of the maps' names, and the families. Raises ValueError for an unknown scope."""
    if kind == "global":
        return kind, _families()
    if kind not in {"endpoint", "cluster"}:
        raise ValueError(f"unknown type {kind}")
    if number is None:
        raise ValueError(f"missing {kind}ID")
    try:
        found = parse_unsigned(number, 0xFFFFFFFF)
    except ValueError as error:
        raise ValueError(f"invalid {kind}ID: {error}") from error
    if kind == "cluster":
        raise click.ClickException("clusters share one table of connections: use global")
    return f"{found:05}", ["4", "6"]


def _rows(name: str, unpack: Callable[[bytes], Entry], output: str) -> list[tuple[CtKey, Entry]]:
    """Return the entries of a conntrack or NAT map. Raises click.ClickException if it cannot be read."""
    failure = _COLLECTING if output else _DUMPING
    try:
        return [(CtKey.unpack(key), unpack(value)) for key, value in entries_of(name, failure)]
    except BpfError as error:
        raise click.ClickException(f"Unable to open {GLOBALS / name}: {missing(name, error)}\n") from error


def _of_protocol(rows: list[tuple[CtKey, Entry]]) -> list[tuple[CtKey, Entry]]:
    """Return the entries that the client prints as text: those with a protocol."""
    return [row for row in rows if row[0].protocol]


def tuple_model(key: CtKey) -> dict[str, object]:
    """A key of connections or translations as ``-o json`` has it: raw fields, ports in network order."""
    return {
        "DestAddr": list(key.daddr.packed),
        "SourceAddr": list(key.saddr.packed),
        "DestPort": swapped(key.dport),
        "SourcePort": swapped(key.sport),
        "NextHeader": key.protocol,
        "Flags": key.flags,
    }


def ct_model(entry: CtEntry) -> dict[str, object]:
    """A connection as ``-o json`` has it: raw fields, the number of reverse NAT in network order."""
    return {
        "Union0": [entry.reserved, entry.backend_id],
        "Packets": entry.packets,
        "Bytes": entry.octets,
        "Lifetime": entry.lifetime,
        "Flags": entry.flags,
        "RevNAT": swapped(entry.rev_nat_index),
        "IfIndex": entry.ifindex,
        "TxFlagsSeen": entry.tx_flags_seen,
        "RxFlagsSeen": entry.rx_flags_seen,
        "SourceSecurityID": entry.source_identity,
        "LastTxReport": entry.last_tx_report,
        "LastRxReport": entry.last_rx_report,
    }


def ct_text(key: CtKey, entry: CtEntry, remaining: Remaining | None = None) -> str:
    """A connection; with ``remaining`` also the seconds until it expires."""
    way = "SVC" if key.flags & CT_SERVICE else "IN" if key.flags & CT_IN else "OUT"
    names = [name for bit, name in enumerate(_CT_FLAGS) if name and entry.flags >> bit & 1]
    if unknown := entry.flags >> len(_CT_FLAGS) << len(_CT_FLAGS):
        names.append(f"Unknown=0x{unknown:04x}")
    source, destination = (key.saddr, key.daddr) if way == "SVC" else (key.daddr, key.saddr)
    ports = (key.dport, key.sport) if way == "SVC" else (key.sport, key.dport)
    left = "" if remaining is None else f" (remaining: {remaining(entry.lifetime)} sec(s))"
    words = [
        f"{PROTOCOLS.get(key.protocol, key.protocol)} {way} {source}:{ports[0]} -> {destination}:{ports[1]}",
        *(["related"] if key.flags & CT_RELATED else []),
        f"expires={entry.lifetime}{left} Packets={entry.packets} Bytes={entry.octets}",
        f"RxFlagsSeen=0x{entry.rx_flags_seen:02x} LastRxReport={entry.last_rx_report}",
        f"TxFlagsSeen=0x{entry.tx_flags_seen:02x} LastTxReport={entry.last_tx_report}",
        f"Flags=0x{entry.flags:04x} [ {' '.join([*names, ']'])} RevNAT={entry.rev_nat_index}",
        f"SourceSecurityID={entry.source_identity} IfIndex={entry.ifindex} BackendID={entry.backend_id}",
    ]
    return " ".join(words)


@nat.command("list")
@click.argument("scope", nargs=-1)
@output_option
def list_translations(scope: tuple[str, ...], output: str) -> None:
    """List all NAT mapping entries"""
    if scope:
        click.echo(_no_scope(scope), err=True, nl=False)
        return
    families = _families()
    found: list[dict[str, Any]] = []
    for family in families:
        name = f"cilium_snat_v{family}_external"
        now = 0 if output else _clock()
        rows = _rows(name, NatEntry.unpack, output)
        if output:
            found += [{"Key": tuple_model(key), "Value": nat_model(entry)} for key, entry in rows]
        else:
            click.echo("".join(f"{nat_text(key, entry, now)}\n" for key, entry in _of_protocol(rows)))
    if output:
        click.echo(printed(found, output))


def _no_scope(words: tuple[str, ...]) -> str:
    """Return why translations are not listed of a part of the table, in the words of the client."""
    if len(words) != 2 or words[0] != "cluster":
        return "Invalid argument"
    try:
        parse_unsigned(words[1], 0xFFFFFFFF)
    except ValueError as error:
        return f"Invalid ClusterID: {error}"
    return "Failed to retrieve cluster maps: Per-cluster NAT maps are not initialized"


def _clock() -> int:
    """Seconds of the clock that maps have, by the agent or by the settings of its last start.

    Raises click.ClickException where neither shows which clock that is.
    """
    source, reason = _agents_clock()
    if not source:
        click.echo(f"Failed to get clocksource from agent: {reason}", err=True, nl=False)
        if not _clock_of_last_start():
            raise click.ClickException(f"Error while dumping BPF Map: {_NO_RUNTIME_CONFIG}")
    return _uptime()


def nat_model(entry: NatEntry) -> dict[str, object]:
    """A translation as ``-o json`` has it: raw fields, the port in network order."""
    return {
        "Created": entry.created,
        "NeedsCT": int(entry.needs_ct),
        "Pad1": 0,
        "Pad2": 0,
        "Addr": list(entry.address.packed),
        "Port": swapped(entry.port),
    }


_NAT_FLAGS: Final = ((CT_RELATED, "related"), (CT_SERVICE, "service"))


def nat_text(key: CtKey, entry: NatEntry, now: int) -> str:
    """A translation of addresses; ``now`` in seconds of the maps' clock."""
    way, what = ("IN", "DST") if key.flags & CT_IN else ("OUT", "SRC")
    source, destination, to = (
        socket_text(str(ip), port)
        for ip, port in ((key.saddr, key.sport), (key.daddr, key.dport), (entry.address, entry.port))
    )
    age = go_duration(max(0, now - entry.created) * 10**9)
    kinds = "".join(f"{name} " for flag, name in _NAT_FLAGS if key.flags & flag)
    return (
        f"{PROTOCOLS.get(key.protocol, key.protocol)} {way} {source} -> {destination} "
        f"{kinds}XLATE_{what} {to} Created={age} ago NeedsCT={int(entry.needs_ct)}"
    )


@frag.command("list")
@output_option
def list_fragments(output: str) -> None:
    """List IPv4 and IPv6 fragments"""
    names = ("cilium_ipv4_frag_datagrams", "cilium_ipv6_frag_datagrams")
    found, absent = [], []
    for name in names:
        try:
            found += [fragment_cells(*row) for row in entries_of(name, "failed to dump contents of map")]
        except BpfError as error:
            if error.errno != errno.ENOENT:
                raise click.ClickException(f"failed to open map: {missing(name, error)}\n") from error
            absent.append(missing(name, error))
    if len(absent) == len(names):  # a family that is off has no map
        raise click.ClickException(f"failed to open map: {absent[0]}\n")
    if output:
        keys = ("ID", "Proto", "SourceAddress", "DestAddress")
        click.echo(printed([dict(zip(keys, cells, strict=True)) for cells in found] or None, output))
    elif found:
        rows = [(number, PROTOCOLS.get(protocol, protocol), *ends) for number, protocol, *ends in found]
        click.echo(table(("ID", "PROTO", "SOURCE ADDRESS:PORT", "DEST ADDRESS:PORT"), rows))
    else:
        click.echo(NO_ENTRIES, err=True)


def fragment_cells(key: bytes, value: bytes) -> tuple[int, int, str, str]:
    """Return the id, protocol, source and destination of a fragmented datagram.

    Cilium's client prints the id and the ports with swapped bytes.
    """
    length, digits = (4, 2) if len(key) == _FRAGMENT_KEY4 else (16, 4)
    ends = ip_address(key[length : 2 * length]), ip_address(key[:length])
    ports = FragmentPorts.unpack(value)
    source, destination = (
        socket_text(str(ip), port) for ip, port in zip(ends, (ports.sport, ports.dport), strict=True)
    )
    number = int.from_bytes(key[2 * length : 2 * length + digits], "big")
    return number, key[2 * length + digits], source, destination


_FRAGMENT_KEY4: Final = 12


def _flush(names: Iterable[str]) -> None:
    for name in names:
        try:
            with open_map(GLOBALS / name) as opened:
                keys = [key for key, _ in opened.items()]
                for key in keys:
                    opened.delete(key)
        except BpfError as error:
            raise click.ClickException(f"Unable to open {GLOBALS / name}: {missing(name, error)}") from error
        click.echo(f"Flushed {len(keys)} entries from {GLOBALS / name}")


@ct.command("flush")
@needed("scope", "Missing endpoint id or 'global' argument\n")
def flush_connections(scope: str) -> None:
    """Flush all connection tracking entries"""
    if scope != "global":
        raise click.ClickException(f"there is one table for all endpoints: use global instead of {scope}\n")
    _flush(f"cilium_ct{kind}{family}_global" for family in _families() for kind in ("", "_any"))


@nat.command("flush")
def flush_translations() -> None:
    """Flush all NAT mapping entries"""
    _flush(f"cilium_snat_v{family}_external" for family in _families())
