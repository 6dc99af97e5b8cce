"""What every kernel test may use."""

from tests.support.namespaces import in_node

__all__ = ["in_node"]
