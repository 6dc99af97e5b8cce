"""What `lifecycle` exports: few names, and those that moved for a while."""

import importlib

import pytest

import lifecycle


def test_the_core_is_small() -> None:
    assert len(lifecycle.__all__) <= 65
    assert [name for name in lifecycle.__all__ if getattr(lifecycle, name, None) is None] == []


def test_names_that_moved_are_found_with_a_warning() -> None:
    for package, names in lifecycle._MOVED.items():
        for name in names.split():
            with pytest.warns(DeprecationWarning, match=f"{package}.{name}"):
                found = getattr(lifecycle, name)
            assert found is getattr(importlib.import_module(package), name)
            assert name in importlib.import_module(package).__all__


def test_unknown_names_raise_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Grahp'"):
        _ = lifecycle.Grahp
