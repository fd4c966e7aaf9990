"""Sums of what is scattered, in one order.

    scatter-add : sums, places, updates  ->  sums + updates at their places

The transpose of a lookup scatters. XLA does so with atomic additions on a GPU, whose
order is another in each run. Here few places look for their updates; else these are
sorted by place, and what then lies side by side is added by a scan. Sums are in float32
at least.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pliax.core._jax import bind_equation
from pliax.core.dataflow import is_literal
from pliax.core.evaluation import extend
from pliax.core.manual_axes import vary, varying_axes


# Pairs of a place and an update: a GPU compares so many in less than 1 ms. Where there
# are no more updates than places none of these may be shared.
_COMPARED, _COMPARED_ANYWAY = 2**28, 2**22
_PLACES = 2**31 - 1  # an int32 counts


def in_order(function: Callable[..., Any], *args: Any) -> list[Array]:
    """The arrays that a function returns, whose scattered sums have one order.

    Args:
        function: Of pytrees of arrays, to one; such as a transpose.
        args: Its arguments.
    """
    return _evaluated(jax.make_jaxpr(function)(*args), jax.tree.leaves(args))


def _evaluated(closed: Any, args: Sequence[Any]) -> list[Any]:
    jaxpr = getattr(closed, "jaxpr", closed)
    given = zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True)
    env = dict(given)
    rules = {
        "scatter-add": _scatter_add,
        "jit": lambda eqn, operands: _evaluated(eqn.params["jaxpr"], operands),
    }
    extend(env, jaxpr.eqns, rules)
    return [x.val if is_literal(x) else env[x] for x in jaxpr.outvars]


def are_compared(places: int, updates: int) -> bool:
    """Whether all of so many are compared, which takes no more memory than they do."""
    return places * updates <= (_COMPARED if places < updates else _COMPARED_ANYWAY)


def _scatter_add(eqn: Any, operands: list[Any]) -> Any:
    sums, indices, updates = operands
    if eqn.params["unique_indices"] or sums.size > _PLACES:
        return bind_equation(eqn, operands)
    places = _places(eqn.params, sums.shape, indices, updates.shape).ravel()
    dtype = jnp.dtype("float32") if updates.dtype.itemsize < 4 else updates.dtype
    values, count = updates.astype(dtype).ravel(), sums.size
    add = _compared if are_compared(count, values.size) else _sorted
    found = add(places, values, count).reshape(sums.shape)
    return [(sums.astype(dtype) + found).astype(sums.dtype)]


def _places(
    params: Any, shape: tuple[int, ...], indices: Any, updates: tuple[int, ...]
) -> Int32[Array, "..."]:
    """For each update the number of the sum it is added to; one too large if none."""
    numbers, count = params["dimension_numbers"], math.prod(shape)
    alone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = iter(updates[n] for n in numbers.update_window_dims)
    sizes = [1 if n in alone else next(window) for n in range(len(shape))]
    every = jnp.arange(count, dtype=jnp.int32).reshape(shape)
    every = vary(every, varying_axes(indices))
    return lax.gather(
        every,
        indices,
        lax.GatherDimensionNumbers(
            offset_dims=numbers.update_window_dims,
            collapsed_slice_dims=numbers.inserted_window_dims,
            start_index_map=numbers.scatter_dims_to_operand_dims,
            operand_batching_dims=numbers.operand_batching_dims,
            start_indices_batching_dims=numbers.scatter_indices_batching_dims,
        ),
        sizes,
        mode=params["mode"],
        fill_value=count,
    )


def _compared(
    places: Int32[Array, "N"], values: Float[Array, "N"], count: int
) -> Float[Array, "M"]:
    """Each place's, which all values are compared with."""
    every = jnp.arange(count, dtype=jnp.int32)[:, None]
    return jnp.sum(jnp.where(places[None] == every, values[None], 0), axis=1)


def _sorted(
    places: Int32[Array, "N"], values: Float[Array, "N"], count: int
) -> Float[Array, "M"]:
    """Each place's, which lie side by side."""
    # For one array by unsigned keys XLA calls CUB's radix sort (its sort_rewriter.cc);
    # all of its sorts are the same in every run.
    keys, values = lax.sort((places.astype(jnp.uint32), values), is_stable=False)
    differs = keys[1:] != keys[:-1]
    is_first, is_last = (
        jnp.pad(differs, sides, constant_values=True) for sides in ((1, 0), (0, 1))
    )
    sums, _ = lax.associative_scan(_joined, (values, is_first))
    ends = jnp.where(is_last, keys, jnp.uint32(count))  # others are dropped
    return jnp.zeros(count, values.dtype).at[ends].set(sums, mode="drop")


type _Sums = tuple[Float[Array, "..."], Bool[Array, "..."]]


def _joined(left: _Sums, right: _Sums) -> _Sums:
    """Two parts of a scan, which begins anew at the first of each place."""
    (x, is_new), (y, begins) = left, right
    return jnp.where(begins, y, x + y), is_new | begins
