"""The documentation site builds without a warning and requests nothing from other servers."""

import os
import re
import subprocess
import sys
from pathlib import Path

from docs.site.api_reference import COMMANDS, FRAMEWORK

ROOT = Path(__file__).resolve().parents[3]


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = subprocess.run(
        [Path(sys.executable).with_name("mkdocs"), "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr + built.stdout
    for path in (*COMMANDS, FRAMEWORK):
        assert (tmp_path / path.replace(".md", ".html")).stat().st_size > 1000, path
    loads = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\s\">]+)")
    pages = {page: page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    assert len(pages) > 40
    assert {str(page): loads.findall(text) for page, text in pages.items() if loads.search(text)} == {}
