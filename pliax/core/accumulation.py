"""Gradients added to sums in place: a vjp whose second gradient is never an array.

    vjp   cotangent -> (d_first, d_second)     becomes
          (cotangent, sums) -> (d_first, sums + d_second)

The transpose of a lookup scatters; onto zeros and then added, it would cost the size of
the whole array each time. JAX accumulates into a `Ref` instead, here a local one which
is discharged at once, so that the result is a pure function again.
"""

from typing import Any

import jax
from jaxtyping import Array

from ._jax import discharge_state
from .evaluation import evaluate


def accumulate(vjp: Any, cotangent: Array, sums: Any) -> tuple[Any, Any]:
    """The gradient of the first argument, and `sums` with those of the second added.

    Args:
        vjp: From `jax.vjp` of a function of an array and a pytree of arrays.
        cotangent: Of its result.
        sums: A pytree like the second argument.
    """

    def add(cotangent: Array, sums: Any) -> tuple[Any, Any]:
        references = jax.tree.map(jax.new_ref, sums)
        d_first, _ = vjp.with_refs(jax.ad.GradValue(), references)(cotangent)
        return d_first, jax.tree.map(jax.freeze, references)

    stateful, results = jax.make_jaxpr(add, return_shape=True)(cotangent, sums)
    pure = discharge_state(stateful)
    leaves = evaluate(
        getattr(pure, "jaxpr", pure), pure.consts, jax.tree.leaves((cotangent, sums))
    )
    return jax.tree.unflatten(jax.tree.structure(results), leaves)
