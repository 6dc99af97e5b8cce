"""The page of tables and maps names every map, and existing files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cells.maps.specs import MapSettings, map_specs, sizes

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "understand" / "tables-and-maps.md").read_text(encoding="utf-8")
CODE = set(re.findall(r"`([^`\n]+)`", PAGE))


def test_every_map_is_named() -> None:
    names = {spec.name for spec in map_specs(sizes(MapSettings(), 0), preallocate=False, cpus=1).values()}
    assert names - CODE == set()


@pytest.mark.parametrize("path", sorted(name for name in CODE if name.startswith("cells/")))
def test_every_documented_file_exists(path: str) -> None:
    assert (ROOT / path).exists()
