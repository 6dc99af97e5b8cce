"""A cluster to which Helm installs the chart."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import ROOT


class Here:
    """Runs the commands of a cluster's user."""

    def __init__(self, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"

    def run(self, *command: str, stdin: str = "") -> str:
        """Run a command, which must succeed; return its output."""
        env = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.kubeconfig.parent)}
        done = subprocess.run(
            command, cwd=ROOT, env=env, input=stdin, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def helm(self, *arguments: str) -> str:
        """Run Helm in the namespace that the documentation uses."""
        return self.run(sys.executable, "-m", "tests.support.helm", *arguments, "--namespace=kube-system")

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """Run the real kubectl."""
        assert shutil.which("kubectl"), "kubectl is not installed: apt-get install kubernetes-client"
        return self.run("kubectl", *arguments, stdin=stdin)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    found = Here(tmp_path)
    command = [sys.executable, "-m", "tests.support.apiserver", "--kubeconfig", str(found.kubeconfig)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            yield found
        finally:
            server.terminate()
