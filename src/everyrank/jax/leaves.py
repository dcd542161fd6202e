"""A tree of metrics taken apart: the arrays to work on, and all else, which passes through.

An array is one of JAX or numpy. What only looks like one, a tensor of another framework or an array
of keys or texts, is refused by name, since to pass it through would look like having reduced it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from everyrank.errors import MetricError

Path = tuple[Any, ...]
Tree = TypeVar("Tree")

_ARRAYS = (jax.Array, np.ndarray)

#: How the steps of a path through a tree hold their names.
_STEPS = ("key", "idx", "name")


class Leaves(Generic[Tree]):
    """The leaves of one tree, and which of them are arrays."""

    def __init__(self, tree: Tree, *, scalars: bool) -> None:
        """Find the arrays, those without dimensions only if `scalars` count."""
        self._tree = tree
        self._leaves, self._structure = jax.tree.flatten(tree)
        self._picks: list[int] = []
        #: The arrays, in the order of the tree.
        self.arrays: list[Any] = []
        for i, leaf in enumerate(self._leaves):
            if not isinstance(leaf, _ARRAYS):
                self._check_no_array(i, leaf)
            elif scalars or leaf.shape:
                if not is_numeric(leaf.dtype):
                    raise self._no_numbers(i, leaf)
                self._picks.append(i)
                self.arrays.append(leaf)

    @property
    def paths(self) -> list[Path]:
        """Give the keys, indices or names that lead to each array."""
        paths = jax.tree_util.tree_flatten_with_path(self._tree)[0]
        return [tuple(map(_step, paths[i][0])) for i in self._picks]

    def name(self, position: int) -> str:
        """Name an array by its position among the arrays."""
        return name_of(self.paths[position])

    def with_arrays(self, values: Sequence[Any]) -> Tree:
        """Give the tree with these in place of its arrays."""
        leaves = list(self._leaves)
        for i, value in zip(self._picks, values, strict=True):
            leaves[i] = value
        tree: Tree = jax.tree.unflatten(self._structure, leaves)
        return tree

    def check_alive(self) -> None:
        """Refuse arrays that are no more, with the way out."""
        for position, x in enumerate(self.arrays):
            if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
                raise MetricError(
                    f"{self.name(position)!r} was deleted, or donated to a jitted function. Hand over "
                    "what that function returned."
                )

    def _no_numbers(self, i: int, leaf: Any) -> MetricError:
        return MetricError(
            f"{self._any_name(i)!r} is {describe(leaf)}, which holds no numbers. Leave it out of the "
            "metrics."
        )

    def _check_no_array(self, i: int, leaf: Any) -> None:
        dimensions = getattr(leaf, "ndim", 0)
        if isinstance(dimensions, int) and dimensions > 0:
            raise MetricError(
                f"{self._any_name(i)!r} is {describe(leaf)}, and no array of JAX or numpy. Convert "
                "it first, for example with jnp.asarray()."
            )

    def _any_name(self, i: int) -> str:
        return name_of(tuple(map(_step, jax.tree_util.tree_flatten_with_path(self._tree)[0][i][0])))


def name_of(path: Path) -> str:
    """Join the steps of a path, as nested names are joined everywhere in everyrank."""
    return "/".join(map(str, path)) or "metrics"


def _step(entry: Any) -> Any:
    return next((getattr(entry, step) for step in _STEPS if hasattr(entry, step)), entry)


@cache
def is_numeric(dtype: Any) -> bool:
    """Say whether arrays of this dtype hold numbers; truth values count as 0 and 1."""
    return bool(jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_))


def describe(leaf: Any) -> str:
    """Say what an array is, for a message."""
    kind = (
        "an array"
        if isinstance(leaf, jax.Array)
        else f"a {type(leaf).__module__}.{type(leaf).__name__}"
    )
    return f"{kind} of {getattr(leaf, 'dtype', 'objects')} and shape {tuple(leaf.shape)}"
