"""Fixtures: a node for every test of the whole agent, and a check that nothing of it remains."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hive.lab.kernel import lab_links
from hive.lab.namespaces import mounted_below
from hive.lab.node import ROOT, Lab
from tests.support.agents import made, serving
from tests.support.namespaces import need_root


@contextmanager
def removed(name: str) -> Iterator[Lab]:
    """Create a node for one block, and check that nothing remains afterwards."""
    need_root()
    links = lab_links()
    lab = Lab(f"{name}-{os.getpid()}")
    with made(lab):
        yield lab
    assert not lab_links() - links
    assert not [point for point in mounted_below(ROOT) if lab.directory in {point, *point.parents}]
    assert not Path(lab.directory).exists()


@pytest.fixture
def node() -> Iterator[Lab]:
    """Create a node without an agent."""
    with removed("agent") as lab:
        yield lab


@pytest.fixture(scope="module")
def shared_node() -> Iterator[Lab]:
    """Create a node without an agent for all tests of a file, which must restore its state."""
    with removed("shared") as lab:
        yield lab


@pytest.fixture
def lab(node: Lab) -> Lab:
    """Create a node with a running agent."""
    serving(node)
    return node
