"""The datapath cell in a hive, without a kernel."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from cells import config, datapath, maps, netlink
from cells.datapath.datapath import Datapath
from cells.datapath.generation import read_object
from cells.datapath.settings import PACKAGED_OBJECTS, DatapathSettings
from lifecycle import Hive, HiveError, Lifecycle, NotStartedError, UsageError, invoke


def root(_datapath: Datapath) -> None:
    """What the hive is asked for."""


@pytest.fixture
def made(tmp_path: Path) -> Datapath:
    agent: Any = SimpleNamespace(programs_dir=tmp_path)
    other: Any = None
    return Datapath(DatapathSettings(), agent, other, other, Lifecycle("datapath"), structlog.get_logger())


def test_the_datapath_cell_has_all_dependencies() -> None:
    Hive(config.cell, maps.cell, netlink.cell, datapath.cell, invoke(root)).check()


def test_use_before_the_start_raises_an_error(made: Datapath) -> None:
    for read in (lambda: made.generation, lambda: made.build, lambda: made.programs):
        with pytest.raises(NotStartedError, match="depend on Datapath"):
            read()
    with pytest.raises(NotStartedError, match="depend on Datapath"):
        made.attach_endpoint(1)


def test_a_missing_object_file_is_reported_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"datapath-object=.*/absent.o: No such file or directory; expected"):
        read_object(tmp_path / "absent.o")


def test_a_missing_packaged_object_is_reported_with_the_make_target() -> None:
    with pytest.raises(HiveError, match=r"absent.o is missing .* compile it with: make install"):
        read_object(PACKAGED_OBJECTS / "absent.o")
