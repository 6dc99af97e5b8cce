"""Fixture: one browser for all tests of this folder."""

from collections.abc import Iterator

import pytest
from selenium import webdriver

from tests.browser.chromium import chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Run Chromium with a new profile."""
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver
