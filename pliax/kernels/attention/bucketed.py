"""Attention in buckets: lengths as masks, nothing repacked.

In a trace for symbolic sizes a kernel's pass, or the making of a mask, is one
`padded_call`. In its bucket it runs as for arrays of the bucket's lengths, with a mask
that hides what is not valid: padded queries see nothing, and nobody sees padded keys.
Mods are asked about valid indices only.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pliax.core.jaxprs import close
from pliax.core.padded_calls import InBucket, has_size, padded_call

from .block_mask import BlockMask, create_block_mask
from .derivatives import Kernel, floating_captures
from .limits import Limits, hiding, limited, limits_of
from .masks import noop_mask
from .tiles import softmax_dtype


def in_buckets(kernel: Kernel, blocks: Callable[..., tuple[int, int]]) -> Kernel:
    """A kernel that also runs on padded arrays.

    Args:
        kernel: What runs where sizes are known.
        blocks: `(query, key)` to the queries and keys of a block without a mask.
    """

    def forward(*args: Any) -> Any:
        if not has_size(args):
            return kernel.forward(*args)
        run = partial(_forward, kernel, kernel.forward, blocks, _shapes(args[0]))
        return padded_call("flex_attention", run, args, _results(*args))

    def inference(*args: Any) -> Any:
        if not has_size(args):
            return kernel.infer(*args)
        run = partial(_forward, kernel, kernel.infer, blocks, _shapes(args[0]))
        return padded_call("flex_attention", run, args, _results(*args)[:3])

    def backward(*args: Any) -> Any:
        if not has_size(args):
            return kernel.backward(*args)
        run = partial(_backward, kernel, blocks, _shapes(args[0]))
        return padded_call("flex_attention", run, args, _gradients(*args))

    passes = {"forward": forward, "backward": backward, "inference": inference}
    return replace(kernel, **passes)


def _shapes(arrays: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    return tuple(x.shape for x in arrays)


def _results(arrays: Any, score_mod: Any, block_mask: Any) -> Any:
    """The shapes of output, log-sum-exp, maximum and logarithm of the sum."""
    query, _, value = arrays
    statistic = jax.ShapeDtypeStruct(query.shape[:3], softmax_dtype(query.dtype))
    out = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype)
    return out, statistic, statistic, statistic


def _gradients(arrays: Any, score_mod: Any, *_: Any) -> Any:
    """The shapes of the gradients of arrays and captured arrays."""
    dtype = softmax_dtype(arrays[0].dtype)
    of_arrays = tuple(jax.ShapeDtypeStruct(x.shape, dtype) for x in arrays)
    captured = floating_captures(score_mod)
    return of_arrays, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in captured)


def _forward(
    kernel: Kernel,
    run: Callable[..., Any],
    blocks: Any,
    shapes: Any,
    here: InBucket,
    arrays: Any,
    score_mod: Any,
    block_mask: Any,
) -> Any:
    limits, mods = _inside(here, blocks, shapes, arrays, score_mod, block_mask)
    if kernel.multiplies_hidden:
        arrays = _finite(limits, arrays)
    return run(arrays, *mods)


def _backward(
    kernel: Kernel,
    blocks: Any,
    shapes: Any,
    here: InBucket,
    arrays: Any,
    score_mod: Any,
    block_mask: Any,
    results: Any,
    cotangents: Any,
) -> Any:
    limits, mods = _inside(here, blocks, shapes, arrays, score_mod, block_mask)
    out, maximum, log_sum = results
    maximum = jnp.where(_valid(limits, maximum.shape), maximum, -jnp.inf)
    if kernel.multiplies_hidden:
        arrays = _finite(limits, arrays)
        valid, (d_out, d_lse) = _valid(limits, maximum.shape), cotangents
        cotangents = (
            jnp.where(valid[..., None], d_out, 0),
            jnp.where(valid, d_lse, 0),
        )
    statistics = out, maximum, log_sum
    gradients, d_mod = kernel.backward(arrays, *mods, statistics, cotangents)
    gradients = tuple(x.astype(maximum.dtype) for x in gradients)
    found = {id(x): d for x, d in zip(floating_captures(mods[0]), d_mod, strict=True)}
    captured = floating_captures(score_mod)
    return gradients, tuple(found.get(id(x), jnp.zeros_like(x)) for x in captured)


def _inside(
    here: InBucket,
    blocks: Any,
    shapes: Any,
    arrays: Any,
    score_mod: Any,
    block_mask: Any,
) -> tuple[Limits, tuple[Any, Any]]:
    """What is valid, and score_mod and mask for it."""
    limits = _limits(here, shapes)
    mask = _limited_mask(here, block_mask, limits, arrays, blocks)
    return limits, (limited(here, score_mod, limits), mask)


def _limits(here: InBucket, shapes: Any) -> Limits:
    """What of the arrays is valid; channels and heads must be."""
    (B, T, H, D), (_, S, K, _), (*_, V) = shapes
    for size, name in ((H, "heads"), (K, "key heads"), (D, "channels"), (V, "values")):
        here.exact(size, f"the number of {name}")
    return limits_of(here, (B, None, T, S))


def _finite(limits: Limits, arrays: Any) -> Any:
    """Query, key and value with zeros where they are not valid."""
    batch, _, queries, keys = limits
    sides = (queries, keys, keys)
    return tuple(
        jnp.where(_valid((batch, None, n, None), x.shape[:3])[..., None], x, 0)
        for x, n in zip(arrays, sides, strict=True)
    )


def _valid(limits: Limits, shape: tuple[int, ...]) -> Any:
    """Which queries are valid, (B, T, 1)."""
    batch, _, queries, _ = limits
    inside = jnp.ones((1, 1, 1), bool)
    for axis, limit in ((0, batch), (1, queries)):
        if limit is not None:
            index = jax.lax.broadcasted_iota(jnp.int32, (*shape[:2], 1), axis)
            inside = inside & (index < limit)
    return inside


def _limited_mask(
    here: InBucket,
    block_mask: BlockMask | None,
    limits: Limits,
    arrays: Any,
    blocks: Callable[..., tuple[int, int]],
) -> BlockMask | None:
    """The mask of a call, on padded arrays."""
    query, key, _ = arrays
    if block_mask is not None:
        keys = (None, None, None, limits[3])  # nobody looks at a padded query
        mod = hiding(limited(here, block_mask.mask_mod, limits), keys)
        lengths = (query.shape[1], key.shape[1])
        return replace(block_mask, mask_mod=mod, seq_lengths=lengths)
    if all(limit is None for limit in limits):
        return None
    index = (jax.ShapeDtypeStruct((), jnp.int32),) * 4
    mod = hiding(close(noop_mask, *index), limits)
    batch = None if limits[0] is None else query.shape[0]
    lengths, sizes = (query.shape[1], key.shape[1]), blocks(query, key)
    return create_block_mask(mod, batch, None, *lengths, block_size=sizes)
