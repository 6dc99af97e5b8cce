"""The reference of the framework's API: generated from docstrings, and complete."""

import importlib
import inspect

import pytest

from tests.support.api_reference import PACKAGES, PAGE, reference


def test_the_page_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: python -m tests.support.api_reference"


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_that_is_exported_says_what_it_does(package: str) -> None:
    module = importlib.import_module(package)
    silent = []
    for name in module.__all__:
        thing = getattr(module, name)
        if not (inspect.isfunction(thing) or isinstance(thing, type)) or not _is_ours(thing):
            continue
        silent += [name] if not inspect.getdoc(thing) else []
        for member, call in vars(thing).items() if isinstance(thing, type) else ():
            public = not member.startswith("_") and (inspect.isfunction(call) or isinstance(call, property))
            silent += [f"{name}.{member}"] if public and not inspect.getdoc(getattr(thing, member)) else []
    assert silent == []


def _is_ours(thing: object) -> bool:
    return getattr(thing, "__module__", "").startswith("lifecycle")
