"""What the maps say of frontends and backends that an earlier agent installed.

Names, annotations and session affinity do not come back; the sources tell them anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from cells.services.balancer.entries import MapKey
from cells.services.model import (
    Address,
    Backend,
    BackendState,
    Frontend,
    FrontendKey,
    ServiceFlag,
    ServiceName,
)
from cells.services.model.types import ServiceType

Maps = Mapping[str, Mapping[bytes, bytes]]
"""Every entry of the load-balancing maps, by map."""

FAMILIES = {4: 4, 6: 16}
"""Bytes of an address by family."""

NAMELESS = ServiceName("", "")


class RestoredFrontend(NamedTuple):
    """A frontend that the maps hold, with its number and its slots as they are; a missing one is empty."""

    id: int
    frontend: Frontend
    slots: tuple[bytes, ...]
    master: bytes


class Restored(NamedTuple):
    """What the maps hold. ``ranges`` and ``affinity`` are keyed by the frontend's number."""

    frontends: list[RestoredFrontend]
    backends: dict[int, Backend]
    zones: dict[int, int]
    ranges: dict[int, dict[MapKey, str]]
    affinity: dict[int, set[MapKey]]


def read(maps: Maps, families: tuple[int, ...]) -> Restored:
    """Read the maps of the families that are in use. A slot without its backend is left out."""
    backends: dict[int, Backend] = {}
    zones: dict[int, int] = {}
    for family in families:
        for key, value in maps.get(f"cilium_lb{family}_backends_v3", {}).items():
            length = FAMILIES[family]
            address = Address.read(bytes([family]) + value[: length + 3])
            number = int.from_bytes(key, "little")
            backends[number] = Backend(address, BackendState(value[length + 3]))
            zones[number] = value[length + 6]
    ranges = _ranges(maps, families)
    frontends = [one for family in families for one in _frontends(maps, family, backends, ranges)]
    return Restored(frontends, backends, zones, ranges, _affinity(maps))


def _frontends(
    maps: Maps, family: int, backends: Mapping[int, Backend], ranges: Mapping[int, Mapping[MapKey, str]]
) -> list[RestoredFrontend]:
    masters: dict[FrontendKey, bytes] = {}
    slots: dict[FrontendKey, dict[int, bytes]] = {}
    length = FAMILIES[family]
    for key, value in maps.get(f"cilium_lb{family}_services_v2", {}).items():
        address = Address.read(bytes([family]) + key[: length + 2] + key[length + 4 : length + 5])
        where = FrontendKey(address, key[length + 5])
        slot = int.from_bytes(key[length + 2 : length + 4], "little")
        if slot:
            slots.setdefault(where, {})[slot] = value
        else:
            masters[where] = value
    found = []
    for where, master in sorted(masters.items()):
        number = int.from_bytes(master[6:8], "big")
        held = slots.get(where, {})
        own = tuple(held.get(slot, b"") for slot in range(1, max(held, default=0) + 1))
        texts = tuple(sorted(ranges.get(number, {}).values()))
        found.append(RestoredFrontend(number, _frontend(where, master, own, backends, texts), own, master))
    return found


def _frontend(
    key: FrontendKey,
    master: bytes,
    slots: tuple[bytes, ...],
    backends: Mapping[int, Backend],
    ranges: tuple[str, ...],
) -> Frontend:
    flags = ServiceFlag(int.from_bytes(master[8:10], "little"))
    attached: dict[Address, Backend] = {}
    for value in slots:
        backend = backends.get(int.from_bytes(value[:4], "little")) if value else None
        if backend is not None:
            attached.setdefault(backend.address, _with_slot_state(backend, value))
    return Frontend(
        key=key,
        type=_type(flags),
        service=NAMELESS,
        backends=tuple(attached.values()),
        ext_local=ServiceFlag.EXT_LOCAL_SCOPE in flags,
        int_local=ServiceFlag.INT_LOCAL_SCOPE in flags,
        two_scopes=ServiceFlag.TWO_SCOPES in flags,
        source_ranges=ranges,
        source_ranges_deny=ServiceFlag.QUARANTINED in flags,
        routable=ServiceFlag.ROUTABLE in flags,
        direct=ServiceFlag.DSR in flags,
    )


def _with_slot_state(backend: Backend, slot: bytes) -> Backend:
    """A slot may be quarantined although the shared entry of the backend is active."""
    flags = ServiceFlag(int.from_bytes(slot[8:10], "little"))
    if ServiceFlag.QUARANTINED in flags and backend.state is BackendState.ACTIVE:
        return Backend(backend.address, BackendState.QUARANTINED)
    return backend


def _type(flags: ServiceFlag) -> ServiceType:
    for flag, type_ in (
        (ServiceFlag.EXTERNAL_IP, ServiceType.EXTERNAL_IPS),
        (ServiceFlag.NODE_PORT, ServiceType.NODE_PORT),
        (ServiceFlag.LOAD_BALANCER, ServiceType.LOAD_BALANCER),
        (ServiceFlag.HOST_PORT, ServiceType.HOST_PORT),
        (ServiceFlag.LOCAL_REDIRECT, ServiceType.LOCAL_REDIRECT),
    ):
        if flag in flags:
            return type_
    return ServiceType.CLUSTER_IP


def _ranges(maps: Maps, families: tuple[int, ...]) -> dict[int, dict[MapKey, str]]:
    found: dict[int, dict[MapKey, str]] = {}
    for family in families:
        name = f"cilium_lb{family}_source_range"
        for key in maps.get(name, {}):
            bits = int.from_bytes(key[:4], "little") - 32
            prefix = ip_network((ip_address(key[8:]), bits), strict=False)
            found.setdefault(int.from_bytes(key[4:6], "big"), {})[MapKey(name, key)] = str(prefix)
    return found


def _affinity(maps: Maps) -> dict[int, set[MapKey]]:
    found: dict[int, set[MapKey]] = {}
    for key in maps.get("cilium_lb_affinity_match", {}):
        where = MapKey("cilium_lb_affinity_match", key)
        found.setdefault(int.from_bytes(key[4:6], "big"), set()).add(where)
    return found
