"""Where the config-dir came from, when an init container made it: the ConfigMaps mounted beside it.

For:    ConfigDrift. Needs: the keys that hive build-config leaves. Gives: mounted_sources().
Source: Cilium 1.17, the keys config-sources and config-sources-overrides; the kind "directory" is ours.

Such a config-dir is a copy that is never updated: an edit shows only in the mounted ConfigMap.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import msgspec

SOURCES: Final = "config-sources"
OVERRIDES: Final = "config-sources-overrides"


class _Source(msgspec.Struct, frozen=True):
    kind: str
    name: str


def mounted_sources(config_dir: Path) -> list[Path]:
    """The directories it was made of, the strongest last.

    None unless all of them are mounted here too, and all of them count whole: what a cluster says, and what
    was kept from overriding, cannot be followed from here. Raises OSError.
    """
    try:
        sources = msgspec.json.decode((config_dir / SOURCES).read_bytes(), type=list[_Source])
        overrides = json.loads((config_dir / OVERRIDES).read_bytes())
    except (FileNotFoundError, ValueError, RecursionError, msgspec.DecodeError):
        return []  # made by hand, or by another program
    if not isinstance(overrides, dict) or any(value is not None for value in overrides.values()):
        return []
    found = [Path(source.name) for source in sources if source.kind == "directory"]
    return found if len(found) == len(sources) and all(map(_here, found)) else []


def _here(path: Path) -> bool:
    return path.is_absolute() and path.is_dir()
