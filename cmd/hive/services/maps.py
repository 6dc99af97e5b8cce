"""``hive bpf lb``: services in the kernel's maps, with or without a running agent.

Source: cilium-dbg bpf lb list; load balancing maps of Cilium 1.17.
"""

import errno
import struct
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import NamedTuple

import click

from cells.maps.bpf import BpfError
from cells.maps.map import open_map
from cells.services import PROTOCOLS, ServiceFlag
from hive.client import agent_options
from hive.names import Names
from hive.output import fitted, shown_as_document, table_width

GLOBALS = Path("tc", "globals")
_PROTOCOLS = {number: name for name, number in PROTOCOLS.items()}
_TYPES = (
    (ServiceFlag.EXTERNAL_IP, "ExternalIPs"),
    (ServiceFlag.NODE_PORT, "NodePort"),
    (ServiceFlag.LOAD_BALANCER, "LoadBalancer"),
    (ServiceFlag.HOST_PORT, "HostPort"),
    (ServiceFlag.LOCAL_REDIRECT, "LocalRedirect"),
)
_WORDS = (
    (ServiceFlag.EXT_LOCAL_SCOPE, "Local"),
    (ServiceFlag.INT_LOCAL_SCOPE, "InternalLocal"),
    (ServiceFlag.TWO_SCOPES, "two-scopes"),
    (ServiceFlag.AFFINITY, "sessionAffinity"),
    (ServiceFlag.SOURCE_RANGE, "check source-range"),
    (ServiceFlag.NAT_46X64, "46x64"),
    (ServiceFlag.L7_LOAD_BALANCER, "l7-load-balancer"),
    (ServiceFlag.LOOPBACK, "loopback"),
)
_DENY = ServiceFlag.SOURCE_RANGE | ServiceFlag.QUARANTINED
"""The flags of a service that refuses its source ranges."""
_SERVICE, _SLOT_KEY = struct.Struct("<IH2sHH"), struct.Struct("<HBB")

Rows = list[dict[str, object]]


class Slot(NamedTuple):
    """An entry of a service map: slot 0 is the service itself."""

    address: str
    slot: int
    backend: int
    backends: int
    number: int
    flags: ServiceFlag
    quarantined: int


bpf_root_option = click.option(
    "--bpf-root",
    type=click.Path(path_type=Path, file_okay=False, readable=False),
    default=Path("/sys/fs/bpf"),
    show_default=True,
    help="Mount point of bpffs.",
)


@click.group()
def command() -> None:
    """Show the services in the kernel's maps."""


@command.command("list")
@click.option(
    "--frontends", "what", flag_value="frontends", help="The stored slots of frontends, with their numbers."
)
@click.option("--backends", "what", flag_value="backends", help="Backends by number, with their state.")
@click.option(
    "--revnat", "what", flag_value="revnat", help="Source addresses of replies (reverse NAT), by number."
)
@click.option(
    "--source-ranges", "what", flag_value="source-ranges", help="Allowed client networks of services."
)
@bpf_root_option
@agent_options
def list_entries(what: str | None, bpf_root: Path, agent_socket: Path, timeout: float, output: str) -> None:
    """List services with their backends; slot 0 has a service's flags and number of backends.

    Names come from the agent; without an agent only addresses are shown.
    """
    maps = {name: _entries(bpf_root / GLOBALS / name) for name in _names(what)}
    rows = _VIEWS[what or "services"](maps)
    if shown_as_document(rows, output):
        return
    if what is None:
        names = Names(agent_socket, timeout, quiet=True)
        rows = [_named(row, names) for row in rows]
    show(rows, output)


def _named(row: dict[str, object], names: Names) -> dict[str, object]:
    """Return a row with the name of the service or of the backend's pod."""
    address = str(row["BACKEND"] if row["SLOT"] else row["SERVICE"]).partition("/")[0]
    name = names.address(address.rpartition(":")[0].strip("[]"))
    ordered = {"SERVICE": row["SERVICE"], "SLOT": row["SLOT"], "BACKEND": row["BACKEND"], "NAME": name}
    return ordered | row


def show(rows: Rows, output: str) -> None:
    """Print rows as a table; without rows, a sentence on standard error."""
    if not rows:
        click.echo("No entries: these maps are empty, or not there.", err=True)
        return
    for line in fitted(rows, table_width(output), "-o wide", first=("SERVICE", "BACKEND", "NAME")):
        click.echo(line)


def _names(what: str | None) -> list[str]:
    kinds = {
        "backends": ("backends_v3",),
        "revnat": ("reverse_nat",),
        "source-ranges": ("source_range",),
    }.get(what or "", ("services_v2", "backends_v3"))
    return [f"cilium_lb{version}_{kind}" for kind in kinds for version in (4, 6)]


def _entries(path: Path) -> Mapping[bytes, bytes]:
    """Return the entries of a map; none if it does not exist, like Cilium's tool. Raises
    click.ClickException.
    """
    try:
        with open_map(path) as opened:
            return dict(opened.items())
    except BpfError as error:
        if error.errno == errno.ENOENT:
            return {}
        raise click.ClickException(f"{error}; is this run as root?") from error


def _slots(maps: Mapping[str, Mapping[bytes, bytes]]) -> Iterator[Slot]:
    for version, length in ((4, 4), (6, 16)):
        found = []
        for key, value in maps[f"cilium_lb{version}_services_v2"].items():
            slot, protocol, scope = _SLOT_KEY.unpack_from(key, length + 2)
            backend, count, number, flags, quarantined = _SERVICE.unpack(value)
            address = _address(key, length, protocol) + ("/i" if scope else "")
            place = (key[:length], key[length : length + 2], protocol, scope, slot)
            one = Slot(
                *(address, slot, backend, count, int.from_bytes(number, "big")),
                *(ServiceFlag(flags), quarantined),
            )
            found.append((place, one))
        yield from (one for _, one in sorted(found, key=lambda pair: pair[0]))


def _backends(maps: Mapping[str, Mapping[bytes, bytes]]) -> dict[int, tuple[str, int]]:
    """Return address and state by backend id."""
    found = {}
    for version, length in ((4, 4), (6, 16)):
        for key, value in maps[f"cilium_lb{version}_backends_v3"].items():
            address = _address(value, length, value[length + 2])
            found[int.from_bytes(key, "little")] = (address, value[length + 3])
    return dict(sorted(found.items()))


def _address(data: bytes, length: int, protocol: int) -> str:
    ip, port = ip_address(data[:length]), int.from_bytes(data[length : length + 2], "big")
    text = f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"
    return text if not protocol else f"{text}/{_PROTOCOLS.get(protocol, protocol)}"


def flags_text(flags: ServiceFlag) -> str:
    """Return the flags of a service in Cilium's words."""
    words = [next((name for flag, name in _TYPES if flag in flags), "ClusterIP")]
    words += [word for flag, word in _WORDS[:4] if flag in flags]
    words += [] if ServiceFlag.ROUTABLE in flags else ["non-routable"]
    words += [word for flag, word in _WORDS[4:5] if flag in flags]
    words += ["deny"] if _DENY in flags else []
    words += [word for flag, word in _WORDS[5:] if flag in flags]
    words += ["quarantined"] if flags & _DENY == ServiceFlag.QUARANTINED else []
    words += ["dsr"] if ServiceFlag.DSR in flags else []
    return ", ".join(words)


def _services(maps: Mapping[str, Mapping[bytes, bytes]]) -> Rows:
    backends = _backends(maps)
    rows: Rows = []
    for one in _slots(maps):
        if one.slot:
            address, _ = backends.get(one.backend, (f"backend {one.backend} is missing", 0))
            flags = "quarantined" if ServiceFlag.QUARANTINED in one.flags else ""
        else:
            address, flags = f"{one.backends} backends", flags_text(one.flags)
        rows.append(
            {"SERVICE": one.address, "SLOT": one.slot, "BACKEND": address, "ID": one.number, "FLAGS": flags}
        )
    return rows


def _frontends(maps: Mapping[str, Mapping[bytes, bytes]]) -> Rows:
    return [
        {
            "SERVICE": one.address,
            "SLOT": one.slot,
            "BACKEND ID": one.backend,
            "COUNT": one.backends,
            "QUARANTINED": one.quarantined,
            "ID": one.number,
            "FLAGS": f"{int(one.flags):#06x}",
        }
        for one in _slots(maps)
    ]


def _backend_rows(maps: Mapping[str, Mapping[bytes, bytes]]) -> Rows:
    states = ("active", "terminating", "quarantined", "maintenance")
    return [
        {"ID": number, "BACKEND": address, "STATE": states[state] if state < len(states) else state}
        for number, (address, state) in _backends(maps).items()
    ]


def _reverse(maps: Mapping[str, Mapping[bytes, bytes]]) -> Rows:
    found = [
        (int.from_bytes(key, "big"), _address(value, length, 0))
        for version, length in ((4, 4), (6, 16))
        for key, value in maps[f"cilium_lb{version}_reverse_nat"].items()
    ]
    return [{"ID": number, "SERVICE": address} for number, address in sorted(found)]


def _ranges(maps: Mapping[str, Mapping[bytes, bytes]]) -> Rows:
    found = []
    for version in (4, 6):
        for key in maps[f"cilium_lb{version}_source_range"]:
            bits = int.from_bytes(key[:4], "little") - 32
            network = ip_network((ip_address(key[8:]), bits), strict=False)
            found.append((int.from_bytes(key[4:6], "big"), str(network)))
    return [{"ID": number, "CLIENTS": network} for number, network in sorted(found)]


_VIEWS: Mapping[str, Callable[[Mapping[str, Mapping[bytes, bytes]]], Rows]] = {
    "services": _services,
    "frontends": _frontends,
    "backends": _backend_rows,
    "revnat": _reverse,
    "source-ranges": _ranges,
}
