"""Reductions of whole arrays: one number for each metric, over all devices that hold a piece of it.

What an operator says of dtypes is what numpy and `jax.numpy` say: a mean of integers or truth values is
a float, a sum of narrow integers a wide integer, and bfloat16 stays bfloat16 but is summed up in 32
bits. NaN is never swallowed. The mean of no elements is NaN, their sum 0, and a maximum they have not.

Arrays of numpy are reduced on the host, with numpy's 64 bits. Under jit they are arrays of JAX like any
other if they were handed in as arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from everyrank.errors import MetricError, OptionError
from everyrank.jax.leaves import Leaves, Path, Tree, describe
from everyrank.jax.operators import is_complex
from everyrank.jax.programs import Operands, reduce_whole
from everyrank.jax.weights import beside, weights_of

#: What `reduce_custom` takes.
_NAMES = ("mean", "sum", "max", "min")
_EXTREMES = ("max", "min")


def reduce_mean(metrics: Tree) -> Tree:
    """Give the mean of each array over all of its elements."""
    return _reduce_all("mean", metrics)


def reduce_sum(metrics: Tree) -> Tree:
    """Give the sum of each array over all of its elements."""
    return _reduce_all("sum", metrics)


def reduce_max(metrics: Tree) -> Tree:
    """Give the largest element of each array, or NaN if it has one."""
    return _reduce_all("max", metrics)


def reduce_min(metrics: Tree) -> Tree:
    """Give the smallest element of each array, or NaN if it has one."""
    return _reduce_all("min", metrics)


def reduce_custom(
    metrics: Tree, reduce_fn: Mapping[str, str | None] | None = None, *, strict: bool = True
) -> Tree:
    """Reduce each array by an operator of its own: "mean", "sum", "max" or "min".

    An array without an operator is reduced by its mean, one with the operator None passes through. The
    operator of a nested array stands under its own name, such as "train/loss", or under that of a dict
    around it, "train". With `strict=False` an array whose operator is unknown passes through, too.

        >>> import jax.numpy as jnp
        >>> losses = jnp.array([1.0, 3.0])
        >>> reduce_custom({"loss": losses, "seen": losses}, {"seen": "sum"})
        {'loss': Array(2., dtype=float32), 'seen': Array(4., dtype=float32)}
    """
    if reduce_fn is None:
        return _reduce_all("mean", metrics)
    if not isinstance(reduce_fn, Mapping):
        raise OptionError(
            f"reduce_fn={reduce_fn!r} must be a dict from names of metrics to operators, such as "
            '{"loss": "max"}.'
        )
    leaves = Leaves(metrics, scalars=False)
    operators = {str(name): _checked(name, how, strict) for name, how in reduce_fn.items()}
    return _reduce(leaves, [_operator_of(path, operators) for path in leaves.paths])


def reduce_weighted_mean(metrics: Tree, weights: Any) -> Tree:
    """Give the weighted mean of each array: sum(weight * value) / sum(weight).

    `weights` is one array for all metrics, with a weight for each element, or one number, or a tree
    like `metrics` that holds these. An element of weight zero has nothing to say, even if it is NaN; if
    all weights are zero, the mean is NaN.

        >>> import jax.numpy as jnp
        >>> losses, mask = jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False])
        >>> reduce_weighted_mean({"loss": losses}, mask)
        {'loss': Array(2., dtype=float32)}
    """
    leaves = Leaves(metrics, scalars=False)
    pairs = zip(leaves.arrays, weights_of(leaves, weights), strict=True)
    operands = [beside(x, weight) for x, weight in pairs]
    return leaves.with_arrays(_run(leaves, ["weighted mean"] * len(operands), operands))


def _checked(name: str, how: Any, strict: bool) -> str | None:
    """Give an operator that there is, or None for one that lets its array pass through."""
    if how is None or how in _NAMES:
        known: str | None = how
        return known
    if not strict:
        return None
    near = get_close_matches(str(how), _NAMES, n=1)
    raise OptionError(
        f"reduce_fn[{name!r}]={how!r} is no operator. Use one of {', '.join(map(repr, _NAMES))}"
        f"{f'; did you mean {near[0]!r}?' if near else ', or None to leave the array as it is.'}"
    )


def _operator_of(path: Path, operators: Mapping[str, str | None]) -> str | None:
    steps = list(map(str, path))
    names = ("/".join(steps[:end]) for end in range(len(steps), 0, -1))
    return next((operators[name] for name in names if name in operators), "mean")


def _reduce_all(operator: str, metrics: Tree) -> Tree:
    leaves = Leaves(metrics, scalars=False)
    return _reduce(leaves, [operator] * len(leaves.arrays))


def _reduce(leaves: Leaves[Tree], operators: Sequence[str | None]) -> Tree:
    values = list(leaves.arrays)
    for i, (operator, x) in enumerate(zip(operators, values, strict=True)):
        if operator in _EXTREMES:
            check_extreme(leaves, i, x, operator, empty=x.size == 0)
    picks = [i for i, operator in enumerate(operators) if operator]
    names = [operator for operator in operators if operator]
    for i, value in zip(picks, _run(leaves, names, [(values[i],) for i in picks]), strict=True):
        values[i] = value
    return leaves.with_arrays(values)


def check_extreme(leaves: Leaves[Any], i: int, x: Any, operator: str, *, empty: bool) -> None:
    """Refuse what has no largest element."""
    if empty:
        raise MetricError(
            f"{leaves.name(i)!r} is {describe(x)}, and of no elements there is no {operator}. Leave it "
            "out while it is empty."
        )
    if is_complex(x.dtype):
        raise MetricError(
            f"{leaves.name(i)!r} is {describe(x)}, and complex numbers have no {operator}. Hand over "
            "real numbers, for example their abs()."
        )


def _run(leaves: Leaves[Any], operators: Sequence[str], operands: Sequence[Operands]) -> list[Any]:
    try:
        return reduce_whole(operators, operands)
    except (RuntimeError, ValueError):
        leaves.check_alive()
        raise
