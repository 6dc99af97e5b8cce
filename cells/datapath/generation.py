"""One generation of the datapath: an object loaded onto the node's maps and put in force.

The programs in force are the entries of hive_entry, and nothing else: no file has it, no attachment changes.
Replacing the entries is therefore the whole upgrade; the kernel frees the old programs once the last packet
has left them.
"""

import hashlib
import os
import struct
from collections.abc import Collection, Iterable, Mapping
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final, Self

import msgspec
from msgspec.structs import replace

from cells.datapath.libbpf import LoadedObject, LoadError
from cells.datapath.programs import ENTRIES
from cells.datapath.settings import PACKAGED_OBJECTS, DatapathSettings, ProgramSettings
from cells.maps.bpf import BpfError, ProgramInfo, program_by_id, program_info
from cells.maps.map import Map, MapType, map_by_id
from lifecycle import HiveError, UsageError

__all__ = ["read_object"]


SECTION: Final = ".rodata.cfg"
MAGIC: Final = 0x48495645  # CONFIG_MAGIC of bpf/lib/config.h
FEATURE_SCTP: Final = 1
FEATURE_UNREACHABLE: Final = 2
FEATURE_HOST_ROUTING: Final = 4
FEATURE_OWN_EXTERNAL_IPS: Final = 8
FEATURE_IPSEC: Final = 16

WITHOUT_IPV6: Final = 32
WITHOUT_HOST_POLICY: Final = 64
WITHOUT_NODE_PORTS: Final = 128
WITHOUT_GATEWAYS: Final = 256
WITHOUT_TUNNEL: Final = 512
_BY_MAPS: Final = WITHOUT_IPV6 | WITHOUT_HOST_POLICY | WITHOUT_GATEWAYS | WITHOUT_TUNNEL

_CONSTANTS = struct.Struct("<9I4sI2HI16s32s")  # struct config of bpf/lib/config.h
KERNEL_NAME = 15
"""What the kernel keeps of a program's name (BPF_OBJ_NAME_LEN)."""


class Constants(msgspec.Struct, frozen=True):
    """What the loader writes into the programs. Lifetimes in seconds."""

    generation: int
    lifetime_tcp: int
    lifetime_syn: int
    lifetime_any: int
    lifetime_closed: int
    lifetime_service_tcp: int
    lifetime_service_any: int
    service_grace: int
    service_loopback: IPv4Address
    features: int
    """FEATURE_* of bpf/lib/config.h."""
    nat_ports: tuple[int, int]
    """The first and the last that translated flows may get."""
    maglev_size: int
    """Numbers in a lookup table of backends."""
    build: str
    """Digest of the object, 12 hexadecimal digits."""
    tag: str
    """What this build is called; empty as it was compiled."""

    def pack(self) -> bytes:
        """The bytes of ``.rodata.cfg``."""
        return _CONSTANTS.pack(
            *(MAGIC, self.generation),
            *(self.lifetime_tcp, self.lifetime_syn, self.lifetime_any, self.lifetime_closed),
            *(self.lifetime_service_tcp, self.lifetime_service_any, self.service_grace),
            *(
                self.service_loopback.packed,
                self.features,
                *self.nat_ports,
                self.maglev_size,
                self.build.encode(),
                self.tag.encode(),
            ),
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self | None:
        """Read them back; None if these are not ours."""
        if len(data) != _CONSTANTS.size:
            return None
        magic, generation, *rest = _CONSTANTS.unpack(data)
        if magic != MAGIC:
            return None
        tcp, syn, other, closed, service_tcp, service_any, grace, loopback, *rest = rest
        features, low, high, maglev_size, *texts = rest
        return cls(
            *(generation, tcp, syn, other, closed, service_tcp, service_any, grace),
            *(IPv4Address(loopback), features, (low, high), maglev_size),
            build=texts[0].rstrip(b"\0").decode(),
            tag=texts[1].rstrip(b"\0").decode(),
        )

    def configured(self, settings: DatapathSettings) -> Self:
        """The same with the lifetimes and features of the settings."""
        return replace(
            self,
            lifetime_tcp=int(settings.bpf_ct_timeout_regular_tcp),
            lifetime_syn=int(settings.bpf_ct_timeout_regular_tcp_syn),
            lifetime_any=int(settings.bpf_ct_timeout_regular_any),
            lifetime_closed=int(settings.bpf_ct_timeout_regular_tcp_fin),
            lifetime_service_tcp=int(settings.bpf_ct_timeout_service_tcp),
            lifetime_service_any=int(settings.bpf_ct_timeout_service_any),
            service_grace=int(settings.bpf_ct_timeout_service_tcp_grace),
            service_loopback=settings.ipv4_service_loopback_address,
            features=self.features & _BY_MAPS
            | FEATURE_SCTP * settings.enable_sctp
            | FEATURE_UNREACHABLE * (settings.service_no_backend_response == "reject")
            | FEATURE_HOST_ROUTING * (settings.enable_host_legacy_routing is False)
            | FEATURE_OWN_EXTERNAL_IPS * (not settings.disable_external_ip_mitigation)
            | FEATURE_IPSEC * (isinstance(settings, ProgramSettings) and settings.marks_for_xfrm)
            | WITHOUT_NODE_PORTS * (isinstance(settings, ProgramSettings) and not settings.serves_outside),
            nat_ports=(settings.node_port_range[1] + 1, 65535),
        )


def build_of(data: bytes) -> str:
    """The name of a build: the first 12 hexadecimal digits of the object's SHA-256."""
    return hashlib.sha256(data).hexdigest()[:12]


def load(
    data: bytes,
    name: str,
    tables: Iterable[Map],
    generation: int,
    settings: DatapathSettings,
    programs: Collection[str] = ENTRIES.keys(),
) -> tuple[LoadedObject, Constants]:
    """Load these programs of an object onto these maps; nothing uses them yet. The caller closes it.

    Raises LoadError.
    """
    loaded = LoadedObject(data, name)
    tables = list(tables)
    try:
        compiled = compiled_constants(loaded)
        size = maglev_size(tables) or compiled.maglev_size
        wanted = replace(
            compiled,
            generation=generation,
            build=build_of(data),
            maglev_size=size,
            features=done_without(tables),
        )
        constants = wanted.configured(settings)
        loaded.set_constants(SECTION, constants.pack())
        loaded.use_maps({table.spec.name: table.fd for table in tables})
        loaded.use_programs(programs)
        loaded.load()
        loaded.expect(programs)
    except BaseException:
        loaded.close()
        raise
    return loaded, constants


def maglev_size(tables: Iterable[Map]) -> int:
    """The numbers in each lookup table of these maps, 0 without any."""
    inner = [table.spec.inner for table in tables if table.spec.name == "cilium_lb4_maglev"]
    return sum(spec.value_size // 4 for spec in inner if spec is not None)


def done_without(tables: Iterable[Map]) -> int:
    """The features without their maps, which are stand-ins (WITHOUT_*): the verifier need not follow them.

    A host policy is about the node's IPv6, too: without conntrack maps for it there is none.
    """
    spare = {table.spec.name for table in tables if table.spec.max_entries == 1}
    gateways, tunnel = "cilium_egress_gw_policy_v4" in spare, "cilium_tunnel_map" in spare
    return (
        (WITHOUT_IPV6 | WITHOUT_HOST_POLICY) * ("cilium_ct6_global" in spare)
        | WITHOUT_GATEWAYS * gateways
        | WITHOUT_TUNNEL * (gateways and tunnel)
    )


def compiled_constants(loaded: LoadedObject) -> Constants:
    """The constants an object was compiled with. LoadError if it is not one of this agent's."""
    constants = Constants.unpack(loaded.constants(SECTION))
    if constants is None:
        raise LoadError(f"{loaded.name}: {SECTION} is of another version of the agent")
    return constants


def publish(entry: Map, programs: Mapping[str, int], entries: Mapping[str, int] = ENTRIES) -> None:
    """Put programs (name to descriptor) in force. All of them or, on an error, those that were before."""
    previous: dict[int, int] = {}
    try:
        for name, slot in entries.items():
            previous[slot] = descriptor_in(entry, slot)
            set_entry(entry, slot, programs[name])
    except BaseException:
        for slot, descriptor in previous.items():
            if descriptor >= 0:
                set_entry(entry, slot, descriptor)
            else:
                entry.delete(struct.pack("<I", slot))
        raise
    finally:
        for descriptor in previous.values():
            if descriptor >= 0:
                os.close(descriptor)


def enter(
    entry: Map,
    entries: Mapping[str, int],
    data: bytes,
    name: str,
    tables: tuple[Map, ...],
    generation: int,
    settings: DatapathSettings,
) -> None:
    """Put these programs of an object in force on these maps, as of that generation; nothing if they are.

    Raises LoadError and BpfError.
    """
    known = in_force(entry, min(entries.values()))
    if (
        known is not None
        and known.build == build_of(data)
        and known == known.configured(settings)
        and known.generation == generation
        and serves(entry, tables, known, entries)
    ):
        return
    loaded, _ = load(data, name, tables, generation, settings, programs=entries.keys())
    with loaded:
        publish(entry, loaded.programs(), entries)


def set_entry(entry: Map, slot: int, descriptor: int) -> None:
    """Point one entry at a program."""
    entry.update(struct.pack("<I", slot), struct.pack("<I", descriptor))


def descriptor_in(entry: Map, slot: int) -> int:
    """A descriptor of the program in an entry, -1 if it is empty. The caller closes it."""
    value = entry.lookup(struct.pack("<I", slot))
    return -1 if value is None else program_by_id(*struct.unpack("<I", value))


def in_force(entry: Map, slot: int = ENTRIES["hive_from_pod"]) -> Constants | None:
    """The constants of the programs that forward now, read from one; None if no program of ours is there."""
    info = program_in(entry, slot)
    for map_id in info.map_ids if info else ():
        if constants := read_constants(map_id):
            return constants
    return None


def serves(
    entry: Map, tables: Iterable[Map], constants: Constants, entries: Mapping[str, int] = ENTRIES
) -> bool:
    """Whether every entry holds its program with these constants, and all of them work on these very maps.

    One may not: an agent killed while it published has replaced some entries and not the others.
    """
    known = {table.id for table in tables}
    for name, slot in entries.items():
        info = program_in(entry, slot)
        if info is None or info.name != name[:KERNEL_NAME]:
            return False
        if any(read_constants(map_id) != constants for map_id in set(info.map_ids) - known):
            return False
    return True


def ids_in_force(entry: Map, entries: Mapping[str, int] = ENTRIES) -> dict[str, int]:
    """Kernel ids of the programs in the entries, by name."""
    found = {name: program_in(entry, slot) for name, slot in entries.items()}
    return {name: info.id for name, info in found.items() if info}


def program_in(entry: Map, slot: int) -> ProgramInfo | None:
    """The program in an entry, or None."""
    descriptor = descriptor_in(entry, slot)
    if descriptor < 0:
        return None
    try:
        return program_info(descriptor)
    finally:
        os.close(descriptor)


def read_constants(map_id: int) -> Constants | None:
    """The constants in a map of a program, if it is that map."""
    try:
        table = map_by_id(map_id)
    except BpfError:  # removed meanwhile
        return None
    with table:
        if table.spec.type != MapType.ARRAY or table.spec.value_size != _CONSTANTS.size:
            return None
        return Constants.unpack(table.lookup(bytes(4)) or b"")


def read_object(path: Path) -> bytes:
    """The bytes of a compiled object; HiveError explains how to get it."""
    try:
        return path.read_bytes()
    except OSError as error:
        if path.parent == PACKAGED_OBJECTS:
            raise HiveError(f"{path} is missing ({error.strerror}): compile it with: make install") from error
        raise UsageError(
            f"datapath-object={path}: {error.strerror}; expected a compiled datapath, or leave it out"
        ) from error
