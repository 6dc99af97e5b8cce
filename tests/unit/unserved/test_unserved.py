"""Options of Cilium's of what is not built yet."""

from pathlib import Path

import pytest

from cells import unserved
from cells.unserved import FAMILIES
from lifecycle import Duration, Hive, SettingsError, Sources


def refused(directory: Path, **values: str) -> list[str]:
    """What an agent says of a config-dir with these files."""
    for name, value in values.items():
        (directory / name.replace("_", "-")).write_text(value)
    hive = Hive(unserved.cell, settings=Sources(config_dir=directory))
    try:
        hive.check()
    except SettingsError as error:
        return [fault.text for fault in error.faults]
    return []


def test_all_that_is_not_there_is_told_at_once_with_its_place(tmp_path: Path) -> None:
    told = refused(
        tmp_path,
        enable_ipsec="true",
        cluster_id="3",
    )
    assert sorted(told) == [
        f"{tmp_path}/cluster-id: '3': not supported yet, expected 0, or leave it unset",
        f"{tmp_path}/enable-ipsec: 'true': not supported yet, expected false, or leave it unset",
    ]


def test_what_this_agent_does_anyway_is_accepted(tmp_path: Path) -> None:
    assert not refused(
        tmp_path,
        enable_ipsec="false",
        restore="true",
        container_ip_local_reserved_ports="",
    )


OPTIONS = {
    name: default
    for family in FAMILIES
    for name, default in zip(family.__struct_encode_fields__, family.__struct_defaults__, strict=True)
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_refuses_something(option: str, tmp_path: Path) -> None:
    """Not one of them is only read and then forgotten."""
    default = OPTIONS[option]
    other = str(not default).lower() if isinstance(default, bool) else "7"
    if isinstance(default, Duration):
        other = "7s"
    (tmp_path / option).write_text(other)
    assert [line.startswith(f"{tmp_path}/{option}: '{other}'") for line in refused(tmp_path)] == [True]
