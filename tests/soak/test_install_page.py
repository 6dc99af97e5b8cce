"""The first section of docs/operate/install.md: its commands build the images, in about the shown sizes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.machine import outside
from tests.support.pages import ROOT, blocks, commands, matches, run, shell, squeezed

pytestmark = pytest.mark.timeout(900)
NUMBER = re.compile(r"\d+\.\d MB")


def test_the_images_are_built_as_the_page_shows(tmp_path: Path) -> None:
    for name in ("configs", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    page = (ROOT / "docs" / "operate" / "install.md").read_text(encoding="utf-8")
    section = page.partition("## 1. The image")[2].partition("\n## ")[0]
    found = [each for block in blocks(section) for each in commands(block.text)]
    builds = [each for each in found if "build.py" in each[0]]
    assert len(builds) == 2
    with shell(tmp_path) as process:
        for command, shown in builds:
            printed = run(process, shlex.join(outside("bash", "-c", command)))
            assert matches(*(NUMBER.sub("N MB", squeezed(text)) for text in (shown, printed))), printed
            if "--envoy" not in command:
                for spoken, is_now in zip(megabytes(shown), megabytes(printed), strict=True):
                    assert abs(spoken - is_now) <= max(1.0, 0.1 * spoken), f"the page is old:\n{printed}"


def megabytes(text: str) -> list[float]:
    """The sizes, in the order of the page."""
    return [float(one.removesuffix(" MB")) for one in NUMBER.findall(text)]
