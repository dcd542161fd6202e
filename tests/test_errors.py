"""The errors: what a program may catch them as, and what they say."""

from __future__ import annotations

import pickle

import pytest

from everyrank import errors


@pytest.mark.parametrize(
    ("error", "also"),
    [
        (errors.MetricError("a value"), ValueError),
        (errors.OptionError("an option"), ValueError),
        (errors.MissingPackage("The plot", "matplotlib"), ImportError),
        (errors.RunDirectoryError("a directory"), OSError),
        (errors.SyncFailed("a sync"), RuntimeError),
    ],
)
def test_an_error_is_caught_as_ours_and_as_what_python_calls_it(error: Exception, also: type):
    """Whoever catches EveryrankError, or the built-in kind, catches each of them."""
    assert isinstance(error, errors.EveryrankError)
    assert isinstance(error, also)


def test_a_missing_package_says_how_to_get_it():
    """The message names what needs the package, and the command that installs it."""
    with pytest.raises(errors.MissingPackage) as caught:
        raise errors.MissingPackage("The wandb backend", "wandb", extra="wandb")
    assert str(caught.value) == (
        'The wandb backend needs the package wandb: pip install "everyrank[wandb]".'
    )
    without = errors.MissingPackage("The plot", "matplotlib")
    assert str(without) == "The plot needs the package matplotlib: pip install matplotlib."


def test_a_missing_package_survives_the_way_to_another_process():
    """A worker process may raise it, and its parent reads the same words."""
    error = errors.MissingPackage("The wandb backend", "wandb", extra="wandb")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
