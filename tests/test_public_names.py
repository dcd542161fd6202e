"""The exported names are the ones that are there."""

from __future__ import annotations

import inspect

import pytest

import everyrank


@pytest.mark.parametrize("name", everyrank.__all__)
def test_every_exported_name_has_a_home_and_a_docstring(name):
    """It can be imported from the package, and says what it is."""
    assert inspect.getdoc(getattr(everyrank, name))
    assert name in dir(everyrank)


def test_the_table_of_homes_is_the_list_of_names():
    """Nothing is exported twice or by accident."""
    assert sorted(everyrank.__all__) == sorted(everyrank._HOMES)
    assert sorted(everyrank.__all__) == everyrank.__all__


def test_an_unknown_name_is_an_attribute_error():
    """As for any module."""
    with pytest.raises(AttributeError, match="has no attribute 'Histori'"):
        _ = everyrank.Histori
