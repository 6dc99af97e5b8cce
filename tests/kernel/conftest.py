"""Fixtures for all kernel tests."""

from tests.support.namespaces import in_node

__all__ = ["in_node"]
