"""Walkthroughs with several nodes: every command runs and prints what is shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hive.lab.cluster import Cluster
from hive.lab.node import exclusive
from tests.support.namespaces import need_root
from tests.support.pages import ROOT, blocks, play, shell

pytestmark = pytest.mark.node


@pytest.mark.parametrize("page", ["start/two-nodes.md", "operate/check.md", "operate/bgp-lab.md"])
def test_commands_of_the_pages_print_the_documented_output(page: str, tmp_path: Path) -> None:
    need_root()
    path = ROOT / "docs" / page
    cluster = Cluster(f"walk{os.getpid()}")
    try:
        with shell(tmp_path, {"HIVE_LAB": cluster.name}) as process:
            for block in blocks(path.read_text(encoding="utf-8")):
                if block.file:
                    (tmp_path / block.file).write_text(block.text, encoding="utf-8")
                else:
                    play(path, block, process, columns=False)
        assert not list(cluster.nodes()), "the page ends with hive lab down"
    finally:
        with exclusive():
            cluster.remove(cluster.nodes())
