"""The operators by which states merge: the laws that let anything be merged in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.arrays import arrays_of
from everyrank.operators import OPERATORS, comoments_of, moments_of

XP = arrays_of(np.zeros(1))
FINITE = st.floats(-1e6, 1e6)
SAMPLES = st.lists(st.tuples(FINITE, FINITE), max_size=6)


def of(operator: str, samples: list[tuple[float, float]]) -> np.ndarray:
    """Give the state of some pairs."""
    x, y = (np.array([pair[i] for pair in samples]) for i in range(2))
    state = np.array(OPERATORS[operator].identity)
    if operator == "moments":
        return moments_of(XP, x)
    if operator == "comoments":
        return comoments_of(XP, x, y)
    for pair in samples:
        state = merge(operator, state, np.array(pair[: OPERATORS[operator].width]))
    return state


def merge(operator: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return OPERATORS[operator].merge(XP, a, b)


def same(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-3)


@pytest.mark.parametrize("operator", OPERATORS)
@settings(max_examples=60, deadline=None)
@given(SAMPLES, SAMPLES, SAMPLES)
def test_law_merging_is_associative_and_has_an_identity(operator, a, b, c):
    """Whatever was merged before; nothing merged with something is that."""
    a, b, c = (of(operator, samples) for samples in (a, b, c))
    same(merge(operator, merge(operator, a, b), c), merge(operator, a, merge(operator, b, c)))
    identity = np.array(OPERATORS[operator].identity)
    same(merge(operator, a, identity), a)
    same(merge(operator, identity, a), a)


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name != "last"])
@settings(max_examples=60, deadline=None)
@given(SAMPLES, SAMPLES)
def test_law_merging_is_commutative(operator, a, b):
    """Which rank comes first makes no difference, but to what is last."""
    a, b = of(operator, a), of(operator, b)
    same(merge(operator, a, b), merge(operator, b, a))


@settings(max_examples=60, deadline=None)
@given(SAMPLES, SAMPLES)
def test_law_moments_of_parts_are_those_of_the_whole(a, b):
    """As numpy has them."""
    for operator in ("moments", "comoments"):
        same(merge(operator, of(operator, a), of(operator, b)), of(operator, a + b))
    x = np.array([pair[0] for pair in a + b])
    if len(x):
        same(of("moments", a + b), np.array([len(x), x.mean(), x.var() * len(x)]))


def test_many_states_merge_at_once():
    """A vector of wholes is merged whole by whole, which is how a step of all metrics is."""
    rng = np.random.default_rng(0)
    for operator, row in OPERATORS.items():
        a, b = (abs(rng.normal(size=(5, row.width))) for _ in range(2))
        together = merge(operator, a.reshape(-1), b.reshape(-1)).reshape(5, -1)
        same(together, np.stack([merge(operator, *pair) for pair in zip(a, b, strict=True)]))


@pytest.mark.parametrize("operator", ["sum", "max", "min"])
def test_a_nan_stays(operator):
    """On either side."""
    for a, b in ((np.nan, 1.0), (1.0, np.nan)):
        assert np.isnan(merge(operator, np.array([a]), np.array([b]))).all()


def test_of_equal_orders_the_later_value_is_the_last():
    """The one that came later, or from the higher rank; nothing at all is before everything."""
    nothing = np.array(OPERATORS["last"].identity)
    assert merge("last", np.array([1.0, 5.0]), np.array([1.0, 7.0])).tolist() == [1, 7]
    assert merge("last", np.array([2.0, 5.0]), np.array([1.0, 7.0])).tolist() == [2, 5]
    assert merge("last", np.array([-9.0, 5.0]), nothing).tolist() == [-9, 5]


def test_moments_keep_their_digits_far_from_zero():
    """1e5 +- 1e-3 in a thousand parts."""
    values = 1e5 + 1e-3 * np.random.default_rng(1).normal(size=(1000, 20))
    state = np.array(OPERATORS["moments"].identity)
    for part in values:
        state = merge("moments", state, moments_of(XP, part))
    exact = np.var(values.astype(np.longdouble) - 100_000)
    assert state[2] / state[0] == pytest.approx(float(exact), rel=1e-8)
