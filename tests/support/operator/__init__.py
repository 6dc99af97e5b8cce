"""An operator at the fake API server, for tests."""

from tests.support.operator.running import Operators, settings

__all__ = ["Operators", "settings"]
