"""Sums of what is scattered, in one order.

    scatter-add : sums, places, updates  ->  sums + updates at their places

The transpose of a lookup scatters. XLA does so with atomic additions on a GPU, whose
order is another in each run. Here few places are compared with all updates; else these
are sorted by place, and what then lies side by side is added. Sums are in float32 at
least. What is scattered inside a loop or a branch stays as it is.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pliax.core._jax import bind_equation
from pliax.core.dataflow import is_literal
from pliax.core.evaluation import extend, is_jit
from pliax.core.manual_axes import vary, varying_axes

from .separation import Inseparable


# Pairs of a place and an update: a GPU compares so many in less than 1 ms. Where there
# are no more updates than places none of these may be shared.
_COMPARED, _COMPARED_ANYWAY = 2**28, 2**22
_SORTED = 2**26  # updates, of which each takes 20 bytes or so meanwhile
_MOST_PLACES = 2**31 - 1  # an int32 counts


def in_order(
    function: Callable[..., Any], *args: Any, is_strict: bool = False
) -> list[Array]:
    """The arrays a function returns, whose scattered sums have one order.

    Args:
        function: Of pytrees of arrays, such as a transpose.
        args: Its arguments.
        is_strict: Whether to raise an error rather than leave sums as they are.

    Raises:
        Inseparable: If some would be left, and this is strict.
    """
    closed = jax.make_jaxpr(function)(*args)
    if is_strict and any(map(_is_left, getattr(closed, "jaxpr", closed).eqns)):
        raise Inseparable("it looks up very many elements, or some in a loop or branch")
    return list(map(jnp.asarray, _evaluated(closed, jax.tree.leaves(args))))


def are_compared(places: int, updates: int) -> bool:
    """Whether all of so many are compared: in no memory where XLA fuses, on a GPU."""
    return places * updates <= (_COMPARED if places < updates else _COMPARED_ANYWAY)


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


# --- which sums -----------------------------------------------------------------------


def _is_shared(eqn: Any) -> bool:
    """Whether it may add several floats to one sum."""
    is_float = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
    return is_float and not eqn.params["unique_indices"]


def _is_small(eqn: Any) -> bool:
    """Whether there are few enough sums and updates."""
    sums, _, updates = (x.aval.size for x in eqn.invars)
    if not 0 < sums <= _MOST_PLACES:
        return False
    return updates <= _SORTED or are_compared(sums, updates)


def _is_left(eqn: Any, *, is_inside: bool = False) -> bool:
    """Whether an equation has sums that stay as they are, and have no order."""
    name = eqn.primitive.name
    if name == "scatter-add":
        return _is_shared(eqn) and (is_inside or not _is_small(eqn))
    is_inside = is_inside or not is_jit(eqn)
    inner = (x for jaxpr in _inner_jaxprs(eqn) for x in jaxpr.eqns)
    if any(_is_left(x, is_inside=is_inside) for x in inner):
        return True
    return name == "select_and_scatter_add"


def _inner_jaxprs(eqn: Any) -> Iterator[Any]:
    for x in jax.tree.leaves(list(eqn.params.values())):
        jaxpr = getattr(x, "jaxpr", x)
        if hasattr(jaxpr, "eqns"):
            yield jaxpr


# --- sums -----------------------------------------------------------------------------


def _scatter_add(eqn: Any, operands: list[Any]) -> Any:
    if not (_is_shared(eqn) and _is_small(eqn)):
        return bind_equation(eqn, operands)
    sums, indices, updates = operands
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
    """Each place's, which lie side by side.

    Each value is added to those of 1, 2, 4, ... later elements, until the last of a
    place has all (Hillis, Steele, Data parallel algorithms, 1986).
    """
    # For one array by unsigned keys XLA calls CUB's radix sort (its sort_rewriter.cc);
    # all of its sorts are the same in every run.
    keys, values = lax.sort((places.astype(jnp.uint32), values), is_stable=False)
    N = keys.size
    every = jnp.arange(N, dtype=jnp.int32)

    def add(n: Any, sums: Any) -> Any:
        before = every - jnp.left_shift(jnp.int32(1), n)
        at = jnp.maximum(before, 0)
        is_same = (before >= 0) & (keys[at] == keys)
        return sums + jnp.where(is_same, sums[at], 0)

    sums = lax.fori_loop(0, (N - 1).bit_length(), add, values)
    is_last = jnp.pad(keys[1:] != keys[:-1], (0, 1), constant_values=True)
    dropped = every.astype(jnp.uint32) + jnp.uint32(count)
    ends = jnp.where(is_last & (keys < count), keys, dropped)
    found = jnp.zeros(count, values.dtype)
    return found.at[ends].set(sums, mode="drop", unique_indices=True)
