"""The same node of its own that the node tests have."""

from tests.node.conftest import lab, node

__all__ = ["lab", "node"]
