"""A generation of the datapath: an object loaded onto the node's maps, and entered into hive_entry.

The active programs are the entries of hive_entry; no file and no attachment records them. So replacing the
entries is the whole upgrade; the kernel frees the old programs after the last packet has left them.
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
"""Characters of a program's name that the kernel stores (BPF_OBJ_NAME_LEN)."""


class Constants(msgspec.Struct, frozen=True):
    """The constants that the loader writes into the programs (struct config). Lifetimes in seconds."""

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
    """FEATURE_* and WITHOUT_* of bpf/lib/config.h."""
    nat_ports: tuple[int, int]
    """First and last source port of NAT."""
    maglev_size: int
    """Entries of a Maglev table."""
    build: str
    """First 12 hexadecimal digits of the object's SHA-256."""
    tag: str
    """Build tag (see build.tagged()); empty by default."""

    def pack(self) -> bytes:
        """Encode the contents of ``.rodata.cfg``."""
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
        """Decode them; None if they are not ours."""
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
        """Return a copy with the lifetimes and features of the settings."""
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
    """Return the name of a build: the first 12 hexadecimal digits of the object's SHA-256."""
    return hashlib.sha256(data).hexdigest()[:12]


def load(
    data: bytes,
    name: str,
    tables: Iterable[Map],
    generation: int,
    settings: DatapathSettings,
    programs: Collection[str] = ENTRIES.keys(),
) -> tuple[LoadedObject, Constants]:
    """Load these programs of an object onto these maps, without activating them.

    The caller closes the object. Raises LoadError.
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
            features=unused_features(tables),
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
    """Return the entries of each Maglev table in these maps; 0 without Maglev maps."""
    inner = [table.spec.inner for table in tables if table.spec.name == "cilium_lb4_maglev"]
    return sum(spec.value_size // 4 for spec in inner if spec is not None)


def unused_features(tables: Iterable[Map]) -> int:
    """Return WITHOUT_* flags of features with placeholder maps, so that the verifier skips their code.

    The host policy covers the node's IPv6, too: it needs the IPv6 conntrack maps.
    """
    spare = {table.spec.name for table in tables if table.spec.max_entries == 1}
    gateways, tunnel = "cilium_egress_gw_policy_v4" in spare, "cilium_tunnel_map" in spare
    return (
        (WITHOUT_IPV6 | WITHOUT_HOST_POLICY) * ("cilium_ct6_global" in spare)
        | WITHOUT_GATEWAYS * gateways
        | WITHOUT_TUNNEL * (gateways and tunnel)
    )


def compiled_constants(loaded: LoadedObject) -> Constants:
    """Return the constants of a compiled object. Raises LoadError if it is not this agent's."""
    constants = Constants.unpack(loaded.constants(SECTION))
    if constants is None:
        raise LoadError(f"{loaded.name}: {SECTION} is of another version of the agent")
    return constants


def publish(entry: Map, programs: Mapping[str, int], entries: Mapping[str, int] = ENTRIES) -> None:
    """Enter programs (name to descriptor) into the entry map; on an error restore the previous ones."""
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


def load_and_publish(
    entry: Map,
    entries: Mapping[str, int],
    data: bytes,
    name: str,
    tables: tuple[Map, ...],
    generation: int,
    settings: DatapathSettings,
) -> None:
    """Load these programs of an object and enter them, unless they are active already.

    Raises LoadError and BpfError.
    """
    known = active_constants(entry, min(entries.values()))
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
    """Write the descriptor of a program to a slot."""
    entry.update(struct.pack("<I", slot), struct.pack("<I", descriptor))


def descriptor_in(entry: Map, slot: int) -> int:
    """Open the program in a slot; -1 if it is empty. The caller closes the descriptor."""
    value = entry.lookup(struct.pack("<I", slot))
    return -1 if value is None else program_by_id(*struct.unpack("<I", value))


def active_constants(entry: Map, slot: int = ENTRIES["hive_from_pod"]) -> Constants | None:
    """Return the constants of the program in a slot; None if it is empty or not ours."""
    info = program_in(entry, slot)
    for map_id in info.map_ids if info else ():
        if constants := read_constants(map_id):
            return constants
    return None


def serves(
    entry: Map, tables: Iterable[Map], constants: Constants, entries: Mapping[str, int] = ENTRIES
) -> bool:
    """Return whether all slots have their program, with these constants and these maps.

    They may differ after an agent was killed in publish(): some slots are new and some old.
    """
    known = {table.id for table in tables}
    for name, slot in entries.items():
        info = program_in(entry, slot)
        if info is None or info.name != name[:KERNEL_NAME]:
            return False
        if any(read_constants(map_id) != constants for map_id in set(info.map_ids) - known):
            return False
    return True


def active_program_ids(entry: Map, entries: Mapping[str, int] = ENTRIES) -> dict[str, int]:
    """Return the kernel ids of the programs in the slots, by name."""
    found = {name: program_in(entry, slot) for name, slot in entries.items()}
    return {name: info.id for name, info in found.items() if info}


def program_in(entry: Map, slot: int) -> ProgramInfo | None:
    """Return the program in a slot, or None."""
    descriptor = descriptor_in(entry, slot)
    if descriptor < 0:
        return None
    try:
        return program_info(descriptor)
    finally:
        os.close(descriptor)


def read_constants(map_id: int) -> Constants | None:
    """Return the constants in this map if it is the ``.rodata.cfg`` of a program."""
    try:
        table = map_by_id(map_id)
    except BpfError:  # removed in the meantime
        return None
    with table:
        if table.spec.type != MapType.ARRAY or table.spec.value_size != _CONSTANTS.size:
            return None
        return Constants.unpack(table.lookup(bytes(4)) or b"")


def read_object(path: Path) -> bytes:
    """Read a compiled object. Raises HiveError that explains how to compile it."""
    try:
        return path.read_bytes()
    except OSError as error:
        if path.parent == PACKAGED_OBJECTS:
            raise HiveError(f"{path} is missing ({error.strerror}): compile it with: make install") from error
        raise UsageError(
            f"datapath-object={path}: {error.strerror}; expected a compiled datapath, or leave it out"
        ) from error
