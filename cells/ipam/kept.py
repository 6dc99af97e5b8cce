"""The ranges in use, kept over a restart of the agent.

For:    Ipam, and the wait for what Kubernetes assigns. Needs: nothing.
Gives:  KeptRanges, kept_ranges(), keep_ranges(), kept_pools(), keep_pools().
A range that follows the node's address would leave its pods behind when that address changes. The file is in
the state directory, so it lives as long as the pods do: until the node reboots.
"""

from collections.abc import Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from cells.ipam.addresses import Family, IPNetwork
from cells.ipam.settings import parse_range
from lifecycle import HiveError, Logger
from lifecycle.settings import read_regular

FILE: Final = "pod-ranges.json"
POOLS_FILE: Final = "pod-pools.json"


class KeptRanges(NamedTuple):
    """What an earlier run of the agent used."""

    primary: Mapping[Family, IPNetwork]
    """The range of each family that addresses came from."""
    assigned: frozenset[Family]
    """Families whose range was assigned by Kubernetes or the operator."""


class _File(msgspec.Struct, omit_defaults=True):
    ipv4: str = ""
    ipv6: str = ""
    assigned: tuple[Family, ...] = ()


def kept_ranges(state_dir: Path, log: Logger) -> KeptRanges:
    """What keep_ranges wrote; nothing if there is no file, or none that can be used, which is logged."""
    path = state_dir / FILE
    try:
        kept = msgspec.json.decode(read_regular(path), type=_File)
        told = {Family.IPV4: kept.ipv4, Family.IPV6: kept.ipv6}
        ranges = {family: parse_range(family, text) for family, text in told.items() if text}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        log.warning("pod ranges are chosen again", path=str(path), error=str(error))
    else:
        return KeptRanges(ranges, frozenset(kept.assigned) & ranges.keys())
    return KeptRanges({}, frozenset())


def keep_ranges(state_dir: Path, ranges: KeptRanges) -> None:
    """Write them, whole or not at all. Raises HiveError."""
    path = state_dir / FILE
    ipv4, ipv6 = (str(ranges.primary.get(family, "")) for family in (Family.IPV4, Family.IPV6))
    _write(path, _File(ipv4, ipv6, tuple(sorted(ranges.assigned))))


def kept_pools(state_dir: Path, log: Logger) -> dict[str, tuple[IPNetwork, ...]]:
    """The ranges by pool that keep_pools wrote; nothing if there is no file, or none that can be used."""
    path = state_dir / POOLS_FILE
    try:
        kept = msgspec.json.decode(read_regular(path), type=dict[str, list[str]])
        return {pool: tuple(map(ip_network, texts)) for pool, texts in kept.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("ranges of earlier pools are not known", path=str(path), error=str(error))
        return {}


def keep_pools(state_dir: Path, pools: Mapping[str, Sequence[IPNetwork]]) -> None:
    """Write them, whole or not at all. Raises HiveError."""
    _write(state_dir / POOLS_FILE, {pool: [str(one) for one in networks] for pool, networks in pools.items()})


def _write(path: Path, kept: object) -> None:
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(msgspec.json.encode(kept))
        fresh.replace(path)
    except OSError as error:
        raise HiveError(f"cannot keep the ranges of pods' addresses in {path}: {error.strerror}") from error
