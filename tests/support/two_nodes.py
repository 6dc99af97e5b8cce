"""Two nodes of the lab with a pod each, joined by a tunnel and etcd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from click.testing import CliRunner

from hive.client import ask
from hive.lab import agent_process
from hive.lab.cluster import TUNNEL, Cluster
from hive.lab.node import ROOT, Lab, exclusive
from hive.main import cli
from tests.support.etcd import installed
from tests.support.namespaces import need_root

_GRACE: Final = "--identity-change-grace-period=1s"
SETTINGS: Final = (TUNNEL, _GRACE)
"""What their agents run with."""


@contextmanager
def joined_by_etcd(name: str, *settings: str) -> Iterator[Cluster]:
    """Nodes ``<name>-1`` and ``<name>-2`` with these settings, too."""
    need_root()
    if not installed():
        pytest.fail("etcd is not installed: install Debian's etcd-server")
    cluster = Cluster(name)
    up = ["lab", "up", "--name", f"{name}-1", "--nodes", "2", "--pods", "1", "--tunnel", "--etcd"]
    try:
        done = CliRunner().invoke(cli, [*up, _GRACE, *settings], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        yield cluster
    finally:
        with exclusive():
            cluster.remove(cluster.nodes())
    assert not list(ROOT.glob(f"{name}*"))


def asked(lab: Lab, path: str) -> Any:
    """What the node's agent answers at a path of its API."""
    pid = agent_process.running(lab)
    assert pid is not None
    return ask(path, agent_process.api_socket(pid))
