"""Fixture: the plugin, compiled once for all these tests, which run in separate child processes."""

import pytest

from tests.support.cni_plugin import compiled_plugin


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    """Compile the plugin before the first child process is forked."""
    compiled_plugin()
