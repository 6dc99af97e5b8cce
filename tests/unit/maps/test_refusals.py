"""Error messages when the kernel rejects a map."""

import errno
from pathlib import Path
from unittest import mock

import pytest

from cells.maps.bpf import BpfError
from cells.maps.map import MapSpec, MapType
from cells.maps.node_maps import open_or_create
from lifecycle import HiveError

CONNTRACK = MapSpec("cilium_ct4_global", MapType.LRU_HASH, 14, 56, 1 << 24)
NODE = MapSpec("hive_node", MapType.ARRAY, 4, 48, 1)


def refusal(spec: MapSpec, code: int, operation: str) -> str:
    """The text when opening finds nothing and then ``operation`` fails."""
    missing = BpfError(errno.ENOENT, "open", spec.name)
    error = BpfError(code, operation, f"map {spec.name}")
    with (
        mock.patch("cells.maps.node_maps.open_map", side_effect=missing),
        mock.patch("cells.maps.node_maps.create_map", side_effect=error if operation == "create" else None),
        mock.patch("cells.maps.node_maps.pin", side_effect=error),
        pytest.raises(HiveError) as refused,
    ):
        open_or_create(spec, Path("/nowhere"), mock.Mock())
    return str(refused.value)


def test_too_little_memory_names_the_map_and_the_option() -> None:
    text = refusal(CONNTRACK, errno.ENOMEM, "create")
    assert text.startswith("cannot create map cilium_ct4_global: Cannot allocate memory (ENOMEM)")
    assert text.endswith("lower bpf-ct-global-tcp-max")
    assert refusal(NODE, errno.ENOMEM, "create").endswith("(ENOMEM): not enough memory")


def test_missing_privileges_and_a_missing_bpffs_give_different_errors() -> None:
    assert refusal(NODE, errno.EPERM, "create").endswith("the agent needs root, or CAP_BPF and CAP_NET_ADMIN")
    assert "bpf-root must be a mounted bpffs" in refusal(NODE, errno.EPERM, "pin")


def test_an_unknown_errno_is_reported_unchanged() -> None:
    assert refusal(NODE, errno.EINVAL, "create") == "cannot create map hive_node: Invalid argument (EINVAL)"
