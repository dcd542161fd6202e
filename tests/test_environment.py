"""Switches in the environment."""

from __future__ import annotations

import pytest

from everyrank.environment import switched_on


@pytest.mark.parametrize("value", ["1", "true", "YES", "on", " y ", "2", "anything"])
def test_whatever_is_not_a_no_switches_on(monkeypatch: pytest.MonkeyPatch, value: str):
    """A user need not know which word for yes is meant."""
    monkeypatch.setenv("EVERYRANK_TEST", value)
    assert switched_on("EVERYRANK_TEST")


@pytest.mark.parametrize("value", [None, "", "  ", "0", "false", "No", "OFF", " n ", "f"])
def test_a_no_and_nothing_at_all_do_not(monkeypatch: pytest.MonkeyPatch, value: str | None):
    """A switch that is unset, empty or a no in any case is off."""
    if value is None:
        monkeypatch.delenv("EVERYRANK_TEST", raising=False)
    else:
        monkeypatch.setenv("EVERYRANK_TEST", value)
    assert not switched_on("EVERYRANK_TEST")


def test_the_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch):
    """A program may set a switch after the import, and change its mind."""
    monkeypatch.setenv("EVERYRANK_TEST", "1")
    assert switched_on("EVERYRANK_TEST")
    monkeypatch.setenv("EVERYRANK_TEST", "0")
    assert not switched_on("EVERYRANK_TEST")
