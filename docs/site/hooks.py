"""Adds what the code describes to the site: settings, the REST API, the framework, forms of JSON."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.site.api_reference import COMMANDS, FRAMEWORK, reference


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the files of the reference, which are in no repository."""
    hive = Path(sys.executable).with_name("hive")
    for path, words in COMMANDS.items():
        made = subprocess.run([hive, *words], capture_output=True, text=True, check=True)
        files.append(File.generated(config, path, content=made.stdout))
    files.append(File.generated(config, FRAMEWORK, content=reference()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Writes links to files of the repository that are no pages as their paths."""
    here = Path(config.docs_dir, page.file.src_uri).parent
    repository = Path(config.docs_dir).parent

    def rewritten(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(here / link[2]))
        if "://" in link[2] or files.get_file_from_path(os.path.relpath(target, config.docs_dir)):
            return link[0]
        if not target.is_relative_to(repository) or not target.exists():
            return link[0]  # a broken link: left for mkdocs to report
        path = f"`{target.relative_to(repository)}`"
        return path if link[1].strip("`") == path.strip("`") else f"{link[1]} ({path})"

    return re.sub(r"\[([^\]\n]+)\]\(([^)#\s]+)\)", rewritten, markdown)
