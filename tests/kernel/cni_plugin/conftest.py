"""The plugin, compiled once for all of these tests, which run in children of their own."""

import pytest

from tests.support.cni_plugin import compiled_plugin


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    """Compiled before the first child is made."""
    compiled_plugin()
