"""The array functions of JAX."""

from __future__ import annotations

import jax.numpy as jnp

from everyrank.arrays.numpy import NumpyLike

ARRAYS = NumpyLike(jnp, "jax")
