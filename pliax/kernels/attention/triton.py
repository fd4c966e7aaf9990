"""flex_attention in Triton, forward and backward.

The kernels are written by hand (`triton_kernels`), the mods are written for the call
(`triton_source`), and a third text calls the one with the other (`triton_programs`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pliax.core.dataflow import is_literal
from pliax.core.manual_axes import vary, varying_axes
from pliax.kernels._jax_triton import triton_call

from . import triton_kernels as kernels
from .block_lists import BlockLists
from .block_mask import BlockMask
from .diagonals import sees_itself
from .normalization import with_slope
from .refinement import for_keys, for_queries, halves_of
from .row_statistics import heads_first, is_linear, statistics
from .separation import MASK_MOD, SCORE_MOD, compute_outside, separate
from .triton_configs import padded, sizes_of
from .triton_programs import define_entry, define_mod
from .triton_source import loadable, write


class _Mod(NamedTuple):
    """A function for the kernels, and the arrays it is given."""

    function: Any
    arrays: tuple[Array, ...]
    results: int = 1


_NO_MOD = _Mod(None, ())


@dataclass(frozen=True)
class Call:
    """What is static in a call.

    Attributes:
        scale: Factor of the products.
        sizes: Sequences, query heads, queries and keys, by "bhqk".
        key_heads: How many.
        shares_keys: Whether all sequences have the same keys and values.
        channels: Of keys and of values.
        dtype: Of the arrays.
        has_unseen: Whether a key may be seen by nobody, and a query may see nothing.
        is_linear: Whether the scale can be part of the exponent.
        asked: Sizes that the user asks for.
    """

    scale: float
    sizes: Mapping[str, int]
    key_heads: int
    shares_keys: bool
    channels: tuple[int, int]
    dtype: Any
    has_unseen: bool
    is_linear: bool
    asked: Mapping[str, int]


def call_of(
    arrays: Any,
    score_mod: Any,
    block_mask: BlockMask | None,
    *,
    scale: float,
    asked: Mapping[str, int],
) -> Call:
    """What is static in a call with these arrays."""
    (B, T, H, D), (batch, S, K, _) = (x.shape for x in arrays[:2])
    return Call(
        scale=scale,
        sizes={"b": B, "h": H, "q": T, "k": S},
        key_heads=K,
        shares_keys=batch < B,
        channels=(D, arrays[2].shape[3]),
        dtype=arrays[0].dtype,
        has_unseen=block_mask is not None and not sees_itself(block_mask),
        is_linear=is_linear(score_mod, scale),
        asked=asked,
    )


def forward(
    arrays: Any,
    score_mod: Any,
    block_mask: BlockMask | None,
    *,
    scale: float,
    asked: Mapping[str, int],
) -> tuple[Array, Array, Array, Array]:
    """Output, log-sum-exp, maximum and logarithm of the sum, as a `Kernel` gives."""
    call = call_of(arrays, score_mod, block_mask, scale=scale, asked=asked)
    query, (_, V), count = arrays[0], call.channels, call.sizes
    statistic = jax.ShapeDtypeStruct((count["b"], count["h"], count["q"]), jnp.float32)
    out = jax.ShapeDtypeStruct((*query.shape[:3], V), query.dtype)
    mods = _mods(call, score_mod, block_mask)
    run = partial(_run, call, kernels.forward, block_mask, mods)
    out, *found = run(tuple(arrays), {"out": out, "top": statistic, "rest": statistic})
    maximum, log_sum = map(heads_first, found)
    return out, maximum + log_sum, maximum, log_sum


def backward(
    arrays: Any,
    score_mod: Any,
    block_mask: BlockMask | None,
    results: tuple[Array, Array, Array],
    cotangents: tuple[Array, Array],
    *,
    scale: float,
    asked: Mapping[str, int],
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value, in their dtype."""
    call = call_of(arrays, score_mod, block_mask, scale=scale, asked=asked)
    query, key, value = arrays
    d_out = cotangents[0].astype(query.dtype)
    if call.has_unseen:  # queries that see nothing may hold anything
        sees = (results[1] != -jnp.inf)[..., None]
        query, d_out = (jnp.where(sees, x, jnp.zeros_like(x)) for x in (query, d_out))
    *shifts, delta = statistics(call.is_linear, 1, results, cotangents)
    given = query, key, value, d_out, shifts[0], shifts[-1], delta
    slope = None if score_mod is None else with_slope(score_mod)
    mods = _mods(call, slope, block_mask)
    run = partial(_run, call, block_mask=block_mask, mods=mods, given=given)
    dq, dk, dv = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    (dq,) = run(kernel=kernels.backward_q, results={"dq": dq})
    dk, dv = run(kernel=kernels.backward_kv, results={"dk": dk, "dv": dv})
    return dq, dk, dv


# --- mods -----------------------------------------------------------------------------


def _mods(call: Call, score_mod: Any, block_mask: BlockMask | None) -> list[_Mod]:
    mask_mod = None if block_mask is None else block_mask.mask_mod
    pairs = (score_mod, SCORE_MOD), (mask_mod, MASK_MOD)
    return [_mod(call, mod, roles) for mod, roles in pairs]


def _mod(call: Call, mod: Any, roles: str) -> _Mod:
    if mod is None:
        return _NO_MOD
    separated = separate(mod, roles)
    arrays = loadable(compute_outside(separated, mod.captured, call.sizes))
    nvidia = is_nvidia()
    hardware_tanh = call.dtype != jnp.float32 and nvidia
    source = write(separated, call.sizes, hardware_tanh=hardware_tanh)
    outvars = separated.jaxpr.outvars
    if len(outvars) == 2 and is_literal(outvars[1]) and outvars[1].val == 1:
        source = source.first()  # the slope of a bias
    return _Mod(define_mod(source, is_nvidia=nvidia), arrays, len(source.results))


def is_nvidia() -> bool:
    """Whether the default device takes instructions of NVIDIA's."""
    capability = getattr(jax.devices()[0], "compute_capability", "")
    return not str(capability).startswith("gfx")


# --- a kernel's call ------------------------------------------------------------------


def _run(
    call: Call,
    kernel: Any,
    block_mask: BlockMask | None,
    mods: Sequence[_Mod],
    given: tuple[Array, ...],
    results: Mapping[str, Any],
) -> Sequence[Array]:
    """One kernel, over the tiles of all heads."""
    name, heads = kernel.__name__, call.sizes["h"]
    by_column = name == "backward_kv"
    lists, sides, blocks = (), None, None
    if block_mask is not None:
        sides, lists = _listed(block_mask, call, by_column=by_column)
        blocks = (sides[1], sides[0]) if by_column else sides
    sizes = sizes_of(name, call.channels, call.dtype, blocks, call.asked)
    length, batch = call.sizes["k" if by_column else "q"], call.sizes["b"]
    if by_column:
        heads, batch = call.key_heads, given[1].shape[0]
    tiles = -(-length // sizes.rows)
    named = [f"x{n}" for n in range(len(given))]
    listed = [f"list{n}" if lists else None for n in range(4)]
    captured = [
        tuple(f"{side}{n}" for n in range(len(mod.arrays)))
        for side, mod in zip(("score", "mask"), mods, strict=True)
    ]
    entry = define_entry(
        kernel,
        [*named, *listed, *captured],
        list(results),
        _constants(call, name, mods, lists, sides, (*sizes[:2], tiles)),
    )
    run = partial(
        triton_call,
        kernel=entry,
        out_shape=list(results.values()),
        grid=(tiles * batch * heads,),
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    flat = (*given, *(jnp.asarray(x, jnp.int32) for x in lists))
    return _one_by_one(run)(*flat, *(x for mod in mods for x in mod.arrays))


def _listed(
    mask: BlockMask, call: Call, *, by_column: bool
) -> tuple[tuple[int, int], BlockLists]:
    """Sizes of a mask's blocks, which are cut smaller where they can be, and lists."""
    halves = halves_of(mask, call.asked)
    if halves is None:
        return mask.block_size, mask.lists(transposed=by_column)
    cut = for_keys(halves) if by_column else for_queries(halves, is_wide=False)
    return cut.sizes, cut.lists.apart()  # the kernels ask every condition


def _one_by_one(run: Callable[..., Any]) -> Callable[..., Any]:
    """Under `vmap` one launch after another; in `shard_map` each device its own."""
    mapped = jax.custom_batching.sequential_vmap(lambda *arrays: run(*arrays))
    return lambda *arrays: vary(mapped(*arrays), varying_axes(arrays))


def _constants(
    call: Call,
    kernel: str,
    mods: Sequence[_Mod],
    lists: Any,
    sides: tuple[int, int] | None,
    cut: tuple[int, int, int],
) -> list[Any]:
    """What a kernel is compiled for, in the order of its parameters.

    Queries and keys of a mask's block are `sides`; the rows and columns of a tile, and
    how many tiles there are, are `cut`.
    """
    score, mask = mods
    slope = [] if kernel == "forward" else [score.results == 2]
    B, H, T, S = (call.sizes[axis] for axis in "bhqk")
    indices = lists[1].shape if lists else (1, 1, 1, 1)
    return [
        *(score.function, mask.function, call.scale),
        *(bool(lists), call.has_unseen, call.is_linear, *slope),
        *(B, call.shares_keys, H, call.key_heads, T, S, *call.channels),
        *indices,
        *(sides or (1, 1)),
        *map(padded, call.channels),
        *cut,
    ]
