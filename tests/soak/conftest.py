"""Fixtures: the nodes of the node tests."""

from tests.node.conftest import lab, node

__all__ = ["lab", "node"]
