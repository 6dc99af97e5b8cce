"""The BPF maps of the node, pinned where Cilium's tools look for them."""

from cells.maps.bpf import BpfError, pin, replace_pin, unpin
from cells.maps.map import (
    ANY,
    EXIST,
    NO_PREALLOC,
    NOEXIST,
    Map,
    MapSpec,
    MapType,
    create_map,
    map_by_id,
    open_map,
)
from cells.maps.programs import ProgramInfo, TestRun, open_program, program_by_id, program_info, test_run

__all__ = [
    "ANY",
    "EXIST",
    "NOEXIST",
    "NO_PREALLOC",
    "BpfError",
    "Map",
    "MapSpec",
    "MapType",
    "ProgramInfo",
    "TestRun",
    "create_map",
    "map_by_id",
    "open_map",
    "open_program",
    "pin",
    "program_by_id",
    "program_info",
    "replace_pin",
    "test_run",
    "unpin",
]
