"""The API reference is generated from docstrings and complete."""

import importlib
import inspect

import pytest

from docs.site.api_reference import PACKAGES, reference


def test_the_page_has_every_name() -> None:
    page = reference()
    names = [name for package in PACKAGES for name in importlib.import_module(package).__all__]
    assert [name for name in names if f"### {name}\n" not in page] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_has_a_docstring(package: str) -> None:
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
