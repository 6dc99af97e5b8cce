"""Pages for learners and operators: every command runs in a lab node and prints what is shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hive.lab.node import Lab, destroy
from tests.support.pages import ROOT, blocks, play, shell

pytestmark = pytest.mark.node

PAGES = (
    *("start/default-deny.md", "start/first-incident.md", "operate/names.md", "operate/hubble.md"),
    *("operate/operating.md", "operate/troubleshooting.md"),
    *("understand/follow-a-packet.md", "understand/follow-a-pod.md", "understand/startup.md"),
)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_pages_print_the_documented_output(page: str, tmp_path: Path) -> None:
    path = ROOT / "docs" / page
    lab = Lab(f"pages-{os.getpid()}")
    try:
        with shell(tmp_path, {"HIVE_LAB": lab.name}) as process:
            for block in blocks(path.read_text(encoding="utf-8")):
                if block.file:
                    (tmp_path / block.file).write_text(block.text, encoding="utf-8")
                elif block.language == "console":
                    play(path, block, process, columns=False)
        assert not lab.exists, "the page ends with hive lab down"
    finally:
        destroy(lab)
