"""The ranges in use, kept over a restart of the agent.

For:    Ipam. Needs: nothing. Gives: kept_ranges(), keep_ranges().
A range that follows the node's address would leave its pods behind when that address changes. The file is in
the state directory, and so lives as long as the pods do: until the node starts anew.
"""

from pathlib import Path
from typing import Final

import msgspec

from cells.ipam.addresses import Family, IPNetwork
from cells.ipam.settings import parse_range
from lifecycle import HiveError, Logger
from lifecycle.settings import read_regular

FILE: Final = "pod-ranges.json"


def kept_ranges(path: Path, log: Logger) -> dict[Family, IPNetwork]:
    """What keep_ranges wrote; nothing if there is no file, or none that can be used, which is logged."""
    try:
        kept = msgspec.json.decode(read_regular(path), type=dict[Family, str])
        return {family: parse_range(family, text) for family, text in kept.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        log.warning("ranges of pods' addresses are chosen anew", path=str(path), error=str(error))
        return {}


def keep_ranges(path: Path, ranges: dict[Family, IPNetwork]) -> None:
    """Write them, whole or not at all. Raises HiveError."""
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(msgspec.json.encode({family: str(network) for family, network in ranges.items()}))
        fresh.replace(path)
    except OSError as error:
        raise HiveError(f"cannot keep the ranges of pods' addresses in {path}: {error.strerror}") from error
