"""``cilium-dbg bpf lb``: services as they are in the kernel's maps.

Source: Cilium 1.17, cilium-dbg/cmd/bpf_lb*.go, pkg/maps/lbmap.
"""

import errno
import struct
from collections.abc import Callable, Iterator
from ipaddress import ip_address, ip_network
from typing import NamedTuple

import click

from cells.maps.bpf import BpfError
from cells.services import INTERNAL, ServiceFlag
from hive.dbg.bpf.maps import GLOBALS, PROTOCOLS, Table, entries_of, missing, show, swapped
from hive.dbg.go_text import output_option, parse_unsigned, socket_text
from hive.dbg.main import Group, needed
from hive.services.maps import flags_text

lb = Group("lb", callback=lambda: None, help="Load-balancing configuration")


@lb.command("list")
@click.option("--frontends", is_flag=True, help="List all service frontend entries")
@click.option("--backends", is_flag=True, help="List all service backend entries")
@click.option("--revnat", is_flag=True, help="List reverse NAT entries")
@click.option("--source-ranges", is_flag=True, help="List all source range entries")
@output_option
def list_services(frontends: bool, backends: bool, revnat: bool, source_ranges: bool, output: str) -> None:
    """List load-balancing configuration"""
    if revnat:
        show(_reverse_nat(), ("ID", "BACKEND ADDRESS (REVNAT_ID) (SLOT)"), output)
    elif source_ranges:
        show(_source_ranges(), ("SOURCE RANGE (REVNAT_ID)", ""), output)
    elif backends:
        table = {str(number): [one.text] for number, one in _backends("backend").items()}
        show(table, ("ID", "BACKEND ADDRESS (REVNAT_ID) (SLOT)"), output)
    elif frontends:
        show(_slots(_frontend_text, "frontend"), ("SERVICE ADDRESS", "BACKEND ID"), output)
    else:
        known = _backends()
        show(
            _slots(lambda slot: _service_text(slot, known)),
            ("SERVICE ADDRESS", "BACKEND ADDRESS (REVNAT_ID) (SLOT)"),
            output,
        )


def _of_both(kind: str, what: str) -> Iterator[tuple[int, bytes, bytes]]:
    """Entries of a load balancing map of both families, with an address's length; a missing map has none.

    Raises click.ClickException; for entries of other sizes it has ``what``, the client's word for the map.
    """
    for family, length in ((4, 4), (6, 16)):
        name = f"cilium_lb{family}_{kind}"
        try:
            entries = entries_of(name, f"Unable to dump IPv{family} {what} table")
        except BpfError as error:
            if error.errno == errno.ENOENT:
                continue
            raise click.ClickException(
                f"Unable to open {GLOBALS / name}: {missing(name, error)}\n"
            ) from error
        yield from ((length, key, value) for key, value in entries)


class ServiceSlot:
    """An entry of a map of services; slot 0 is the service itself."""

    def __init__(self, length: int, key: bytes, value: bytes) -> None:
        self.family = 4 if length == 4 else 6
        port = int.from_bytes(key[length : length + 2], "big")
        self.slot, _, scope = _SLOT.unpack_from(key, length + 2)
        self.address = socket_text(str(ip_address(key[:length])), port) + ("/i" if scope == INTERNAL else "")
        self.backend, self.count, number, flags, self.quarantined = _SERVICE.unpack(value)
        self.number = int.from_bytes(number, "big")
        self.flags = ServiceFlag(flags)


_SERVICE, _SLOT = struct.Struct("<IH2sHH"), struct.Struct("<HBB")


class _Backend(NamedTuple):
    """An entry of a map of backends."""

    ip: str
    port: int
    protocol: int
    cluster: int
    zone: int

    @property
    def text(self) -> str:
        """The entry as ``--backends`` lists it; the client does not know the names of zones."""
        cluster = f"@{self.cluster}" if self.cluster else ""
        protocol = PROTOCOLS.get(self.protocol, self.protocol)
        return f"{protocol}://{self.ip}{cluster}{'[]' if self.zone else ''}"


def _slots(text: Callable[[ServiceSlot], str], what: str = "services") -> Table:
    found: Table = {}
    for length, key, value in _of_both("services_v2", what):
        slot = ServiceSlot(length, key, value)
        found.setdefault(f"{slot.address} ({slot.slot})", []).append(text(slot))
    return found


def _frontend_text(slot: ServiceSlot) -> str:
    low, high = int(slot.flags) & 0xFF, int(slot.flags) >> 8
    return f"{slot.backend} {slot.count}[{slot.quarantined}] ({slot.number}) [0x{low:x} 0x{high:x}]"


def _service_text(slot: ServiceSlot, backends: dict[int, _Backend]) -> str:
    if slot.slot == 0:
        nothing = "0.0.0.0:0" if slot.family == 4 else "[::]:0"
        proxy = ""
        if ServiceFlag.L7_LOAD_BALANCER in slot.flags:
            proxy = f"(L7LB Proxy Port: {swapped(slot.backend & 0xFFFF)})"
        return f"{nothing} ({slot.number}) (0) [{flags_text(slot.flags)}] {proxy}"
    if slot.backend not in backends:
        return f"backend {slot.backend} not found"
    backend = backends[slot.backend]
    # The brackets are those of the service's family: behind a NAT64 service are IPv4 backends.
    ip = backend.ip if slot.family == 4 else f"[{backend.ip}]"
    return f"{ip}:{backend.port} ({slot.number}) ({slot.slot})"


def _backends(what: str = "backends") -> dict[int, _Backend]:
    """Return the backends by number."""
    found = {}
    for length, key, value in _of_both("backends_v3", what):
        port, protocol = struct.unpack_from(">HB", value, length)
        cluster, zone = struct.unpack_from("<HB", value, length + 4)
        ip = str(ip_address(value[:length]))
        found[int.from_bytes(key, "little")] = _Backend(ip, port, protocol, cluster, zone)
    return found


def _reverse_nat() -> Table:
    return {
        str(int.from_bytes(key, "big")): [
            socket_text(str(ip_address(value[:length])), int.from_bytes(value[length : length + 2], "big"))
        ]
        for length, key, value in _of_both("reverse_nat", "reverse NAT")
    }


def _source_ranges() -> Table:
    found = {}
    for _, key, _ in _of_both("source_range", "source range"):
        network = ip_network((ip_address(key[8:]), int.from_bytes(key[:4], "little") - 32), strict=False)
        found[f"{network} ({int.from_bytes(key[4:6], 'big')})"] = [""]
    return found


maglev = Group("maglev", callback=lambda: None, help="Maglev lookup table")
lb.add_command(maglev)


@maglev.command("list")
@output_option
def list_maglev(output: str) -> None:
    """List Maglev lookup tables"""
    from hive.services.lookup import tables

    found = {
        f"[{number}]/v{family}": [f"[{' '.join(map(str, row))}]"]
        for (number, family), row in tables().items()
    }
    show(found, ("SVC ID", "LOOKUP TABLE"), output)


@maglev.command("get")
@needed("number", "Missing service id argument\n")
@output_option
def get_maglev(number: str, output: str) -> None:
    """Get Maglev lookup table for given service by ID"""
    from hive.services.lookup import tables

    try:
        service = parse_unsigned(number, 0xFFFF)
    except ValueError as error:
        raise click.ClickException(f"Unable to parse {number}: {error}") from error
    found = {
        f"[{number}]/v{family}": [f"[{' '.join(map(str, row))}]"]
        for (number, family), row in tables().items()
        if number == service
    }
    if not found:
        raise click.ClickException(f"No entry found for service {service}")
    show(found, ("SVC ID", "LOOKUP TABLE"), output)
