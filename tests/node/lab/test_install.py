"""docs/operate/install.md: every command runs at a cluster of two lab nodes, and prints what is shown."""

from __future__ import annotations

import os
import tarfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from hive.lab.cluster import Cluster
from tests.support.apiserver import ADMIN_TOKEN
from tests.support.namespaces import need_root
from tests.support.pages import ROOT, Block, blocks, commands, matches, run, shell, squeezed
from tests.support.rollout import Rollout

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-test")
pytestmark = pytest.mark.node

PAGE = ROOT / "docs" / "operate" / "install.md"
BUILDS = ("make install", ".venv/bin/python configs/image/build.py")
"""What the soak runs, and what this test could not run without."""


def test_an_installation_goes_as_the_page_shows(tmp_path: Path) -> None:
    need_root()
    for name in ("configs", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    rollout = Rollout(Cluster(f"install-{os.getpid()}"), tmp_path / "cluster")
    rollout.folder.mkdir()
    with rollout.up():
        path = f"{rollout.commands()}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
        with shell(tmp_path, {"PATH": path, "KUBECONFIG": str(rollout.kubeconfig)}) as process:
            for block in blocks(PAGE.read_text(encoding="utf-8")):
                if block.file:
                    (tmp_path / block.file).write_text(block.text, encoding="utf-8")
                else:
                    assert block.language == "console", block.line
                    walk(block, process, rollout)


def walk(block: Block, process: object, rollout: Rollout) -> None:
    """Run a block's commands; what a cluster does by itself afterwards is done."""
    for command, shown in commands(block.text):
        if command.startswith(BUILDS):
            continue
        with rollout.kubelets() if command.startswith("hive check") else nullcontext():
            printed = run(process, command)  # type: ignore[arg-type]
        assert matches(squeezed(shown), squeezed(printed)), (
            f"install.md:{block.line}: $ {command}\n{printed}\ninstead of\n{shown}"
        )
        if command.startswith("hive cluster bundle"):
            assert_no_secrets(rollout.folder.parent / "incident.tar.gz")
        if command.startswith(("helm install", "helm upgrade")):
            rollout.roll_out()
        if command.startswith("helm uninstall"):
            rollout.take_down()


def assert_no_secrets(path: Path) -> None:
    """The archive of a whole cluster has no token and no key of it."""
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            content = file.read() if file is not None else b""
            assert ADMIN_TOKEN.encode() not in content, member.name
            assert b"PRIVATE KEY" not in content, member.name
