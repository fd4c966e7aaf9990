"""flex_attention in plain XLA: chunked online softmax in linear memory, custom VJP.

A row of query blocks walks over the key blocks its mask lists and keeps, for every
query, the running maximum m, the sum l and the unnormalised output. Empty blocks are
never touched, full blocks skip `mask_mod`.

    forward    row by row:     s = score_mod(scale q k),  m, l, o     -> out, lse
    backward   row by row:     p = exp(s - lse), ds = p (do v - delta) -> dq, dcaptured
               column by column, through the transposed block lists    -> dk, dv

The backward pass recomputes s twice (7 products a block instead of 5); in exchange
nothing is scattered, so that gradients are deterministic and partition over batch and
heads. Batch and heads are `vmap` axes: where the mask has one list for all of them the
loop bounds stay scalars, where each has its own the loops run in step.

References:
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, Alg. 3.
    Dao, "FlashAttention-2", 2023, Algorithms 1 and 2.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

from pliax.core.jaxprs import ClosedFunction
from pliax.core.typing import Leaf

from .block_mask import BlockLists, BlockMask, dense_lists
from .tiles import (
    block_positions,
    mask_tile,
    score_tile,
    score_tile_where,
    softmax_dtype,
)


_DENSE_BLOCKS = (256, 512)


@dataclass(frozen=True)
class _Config:
    """What is static about one call."""

    scale: float
    lengths: tuple[int, int]
    blocks: tuple[int, int]
    per_head: bool


class _Heads(NamedTuple):
    """Queries, keys and values in blocks, under the indices mods see.

    Key heads carry `P G` query heads. `G` heads share a list of blocks and are computed
    together; `P` is 1, unless the mask lists blocks for each query head: then G is 1.

    Attributes:
        b: Indices of the batch, (B,).
        h: Indices of the query heads, (K, P, G).
        q: Queries by row block, (B, K, P, G, R, M, D).
        k: Keys by column block, (B, K, C, N, D).
        v: Values by column block, (B, K, C, N, V).
    """

    b: Leaf
    h: Leaf
    q: Leaf
    k: Leaf
    v: Leaf


class _Statistics(NamedTuple):
    """What backward needs of the forward pass, by row block.

    Attributes:
        lse: Log-sum-exp, (B, K, P, G, R, M).
        delta: sum(d_out out) - d_lse, likewise.
        d_out: Gradient of the output, (B, K, P, G, R, M, V).
    """

    lse: Leaf
    delta: Leaf
    d_out: Leaf


def attend(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K V"],
    *,
    score_mod: ClosedFunction | None,
    block_mask: BlockMask | None,
    scale: float,
    block_q: int = _DENSE_BLOCKS[0],
    block_kv: int = _DENSE_BLOCKS[1],
) -> tuple[Float[Array, "B T H V"], Float[Array, "B T H"], Float[Array, "B T H"]]:
    """Attention in memory linear in T and S: output, log-sum-exp, maximum.

    Args:
        query: Queries.
        key: Keys; H is a multiple of K.
        value: Values.
        score_mod: Traced score modification.
        block_mask: Which blocks to compute; its block size is used.
        scale: Factor of the products.
        block_q: Queries of a block without a mask, at most T are used.
        block_kv: Keys of a block without a mask, at most S are used.
    """
    lengths = (query.shape[1], key.shape[1])
    per_head = False
    if block_mask is not None:
        block_q, block_kv = block_mask.block_size
        per_head = block_mask.kv_num_blocks.shape[1] > 1
    blocks = (min(block_q, lengths[0]), min(block_kv, lengths[1]))
    config = _Config(scale, lengths, blocks, per_head)
    out, lse, maximum = _attend(config, (query, key, value), score_mod, block_mask)
    return out.astype(query.dtype), lse, jax.lax.stop_gradient(maximum)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(config: _Config, arrays: Any, score_mod: Any, block_mask: Any) -> Any:
    return _forward(config, arrays, score_mod, block_mask)[0]


def _forward(config: _Config, arrays: Any, score_mod: Any, block_mask: Any) -> Any:
    each = partial(_forward_head, config, score_mod, _mask_mod(block_mask))
    rows = _block_lists(config, block_mask, transposed=False)
    results = _over_heads(each, _split_heads(config, *arrays), rows)
    out, lse, maximum = (_join_rows(config, x) for x in results)
    return (out, lse, maximum), (arrays, score_mod, block_mask, out, lse)


def _backward(config: _Config, residuals: Any, cotangents: Any) -> Any:
    arrays, score_mod, block_mask, out, lse = residuals
    d_out, d_lse, _ = cotangents
    delta = jnp.sum(d_out * out, axis=-1) - d_lse
    heads = _split_heads(config, *arrays)
    split = partial(_split_rows, config, key_heads=heads.k.shape[1])
    statistics = _Statistics(split(lse), split(delta), split(d_out))
    tile = partial(_tile_gradients, config, score_mod, _mask_mod(block_mask))

    rows = _block_lists(config, block_mask, transposed=False)
    each = partial(_backward_rows, tile, _floating(score_mod))
    d_q, d_captured = _over_heads(each, heads, rows, statistics)
    columns = _block_lists(config, block_mask, transposed=True)
    each = partial(_backward_columns, tile)
    d_k, d_v = _over_heads(each, heads, columns, statistics)

    gradients = (
        _join_rows(config, d_q),
        _join_keys(config, d_k),
        _join_keys(config, d_v),
    )
    d_arrays = tuple(d.astype(x.dtype) for d, x in zip(gradients, arrays, strict=True))
    return d_arrays, _captured_cotangents(score_mod, d_captured), None


_attend.defvjp(_forward, _backward)


# --- heads: vmap over batch and heads -------------------------------------------------


def _split_heads(config: _Config, query: Array, key: Array, value: Array) -> _Heads:
    """Blocks of queries, keys and values, by head."""
    key_heads = key.shape[2]
    index = jnp.arange(query.shape[2], dtype=jnp.int32)
    private = query.shape[2] // key_heads if config.per_head else 1
    return _Heads(
        b=jnp.arange(query.shape[0], dtype=jnp.int32),
        h=rearrange(index, "(k p g) -> k p g", k=key_heads, p=private),
        q=_split_rows(config, query, key_heads=key_heads),
        k=_split_keys(config, key),
        v=_split_keys(config, value),
    )


def _split_rows(config: _Config, x: Array, *, key_heads: int) -> Array:
    """(B, T, H, ...) to (B, K, P, G, R, M, ...)."""
    private = x.shape[2] // key_heads if config.per_head else 1
    pattern = "b (r m) (k p g) ... -> b k p g r m ..."
    x = _repeat_last(x, config.blocks[0])
    return rearrange(x, pattern, m=config.blocks[0], k=key_heads, p=private)


def _split_keys(config: _Config, x: Array) -> Array:
    """(B, S, K, D) to (B, K, C, N, D)."""
    x = _repeat_last(x, config.blocks[1])
    return rearrange(x, "b (c n) k d -> b k c n d", n=config.blocks[1])


def _repeat_last(x: Array, block: int) -> Array:
    """Fill the last block with copies of the last real row.

    Together with indices clamped to the true length, a place beyond the end is a copy
    of a real score: what a mod makes of it is finite where the real one is.
    """
    missing = -x.shape[1] % block
    widths = [(0, missing if axis == 1 else 0) for axis in range(x.ndim)]
    return jnp.pad(x, widths, mode="edge")


def _join_rows(config: _Config, x: Array) -> Array:
    x = rearrange(x, "b k p g r m ... -> b (r m) (k p g) ...")
    return x[:, : config.lengths[0]]


def _join_keys(config: _Config, x: Array) -> Array:
    """Sum over the query heads that had their own list of blocks."""
    x = rearrange(jnp.sum(x, axis=2), "b k c n d -> b (c n) k d")
    return x[:, : config.lengths[1]]


def _over_heads(each: Callable[..., Any], heads: _Heads, lists: Any, *rest: Any) -> Any:
    """Map `each` over batch, key heads and private heads.

    Lists that all of them share are not mapped: their loops keep scalar bounds.
    """
    own_batch, own_head = (n > 1 for n in lists.num.shape[:2])
    if not own_head:
        lists = jax.tree.map(lambda x: x[:, 0], lists)
    else:
        key_heads = heads.h.shape[0]
        pattern = "b (k p) ... -> b k p ..."
        lists = jax.tree.map(lambda x: rearrange(x, pattern, k=key_heads), lists)
    if not own_batch:
        lists = jax.tree.map(lambda x: x[0], lists)
    of_batch, of_head = (0 if own_batch else None), (0 if own_head else None)
    mapped = jax.vmap(each, (_Heads(None, 0, 0, None, None), of_head, 0))
    mapped = jax.vmap(mapped, (_Heads(None, 0, 0, 0, 0), of_head, 0))
    mapped = jax.vmap(mapped, (_Heads(0, None, 0, 0, 0), of_batch, 0))
    return mapped(heads, lists, rest)


def _block_lists(config: _Config, block_mask: Any, *, transposed: bool) -> BlockLists:
    if block_mask is None:
        return dense_lists(config.lengths, config.blocks, transposed=transposed)
    return block_mask.lists(transposed=transposed)


def _mask_mod(block_mask: Any) -> Any:
    return None if block_mask is None else block_mask.mask_mod


# --- what score_mod captured ----------------------------------------------------------


def _floating(score_mod: Any) -> tuple[Array, ...]:
    captured = () if score_mod is None else score_mod.captured
    return tuple(x for x in captured if _is_floating(x))


def _with_floating(score_mod: Any, floating: tuple[Array, ...]) -> Any:
    """The same mod with other contents of its floating captured arrays."""
    if score_mod is None:
        return None
    rest = iter(floating)
    captured = tuple(next(rest) if _is_floating(x) else x for x in score_mod.captured)
    return replace(score_mod, captured=captured)


def _captured_cotangents(score_mod: Any, gradients: tuple[Array, ...]) -> Any:
    """Summed over batch and heads, in each array's own dtype; None for integers."""
    if score_mod is None:
        return None
    totals = (jnp.sum(x, axis=(0, 1, 2)) for x in gradients)
    captured = tuple(
        next(totals).astype(x.dtype) if _is_floating(x) else None
        for x in score_mod.captured
    )
    return replace(score_mod, captured=captured)


def _is_floating(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


# --- one group of heads of one sequence -----------------------------------------------


def _forward_head(
    config: _Config, score_mod: Any, mask_mod: Any, head: _Heads, lists: Any, _: Any
) -> tuple[Array, Array, Array]:
    """Output, log-sum-exp and maximum: (G, R, M, V), (G, R, M), (G, R, M)."""
    dtype = softmax_dtype(head.q.dtype)
    G, _, M, _ = head.q.shape
    start = (
        jnp.zeros((G, M, head.v.shape[-1]), dtype),
        jnp.full((G, M), -jnp.inf, dtype),
        jnp.zeros((G, M), dtype),
    )

    def row(carry: Any, r: Array, listed: Any) -> Any:
        def visit(c: Array, partly: bool, state: Any) -> Any:
            place = _place(config, head, r, c)
            scores = score_tile(score_mod, _products(config, head, r, c), *place)
            if partly:
                visible = _visible(config, mask_mod, head, r, c)
                scores = jnp.where(visible, scores, -jnp.inf)
            return _online_softmax(state, scores, head.v[c])

        return carry, _normalise(*_walk(visit, listed, start))

    _, results = _over_rows(row, (), lists)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), results)


def _backward_rows(
    tile: Callable[..., Any],
    floating: tuple[Array, ...],
    head: _Heads,
    lists: Any,
    rest: tuple[_Statistics],
) -> tuple[Array, tuple[Array, ...]]:
    """Gradients of q, (G, R, M, D), and of what score_mod captured."""
    dtype = softmax_dtype(head.q.dtype)
    G, _, M, D = head.q.shape

    def row(d_captured: Any, r: Array, listed: Any) -> Any:
        def visit(c: Array, partly: bool, state: Any) -> Any:
            d_q, d_captured = state
            _, d_scores, more = tile(head, *rest, r, c, partly)
            d_q += _dot("gmn,nd->gmd", d_scores, head.k[c].astype(dtype))
            return d_q, tuple(x + y for x, y in zip(d_captured, more, strict=True))

        start = (jnp.zeros((G, M, D), dtype), d_captured)
        d_q, d_captured = _walk(visit, listed, start)
        return d_captured, d_q

    nothing = tuple(jnp.zeros(x.shape, dtype) for x in floating)
    d_captured, d_q = _over_rows(row, nothing, lists)
    return jnp.moveaxis(d_q, 0, 1), d_captured


def _backward_columns(
    tile: Callable[..., Any], head: _Heads, lists: Any, rest: tuple[_Statistics]
) -> tuple[Array, Array]:
    """Gradients of k and v: (C, N, D) and (C, N, V)."""
    dtype = softmax_dtype(head.q.dtype)
    start = tuple(jnp.zeros(x.shape[1:], dtype) for x in (head.k, head.v))

    def column(carry: Any, c: Array, listed: Any) -> Any:
        def visit(r: Array, partly: bool, state: Any) -> Any:
            d_k, d_v = state
            weights, d_scores, _ = tile(head, *rest, r, c, partly)
            d_k += _dot("gmn,gmd->nd", d_scores, head.q[:, r].astype(dtype))
            d_v += _dot("gmn,gmv->nv", weights, rest[0].d_out[:, r])
            return d_k, d_v

        return carry, _walk(visit, listed, start)

    return _over_rows(column, (), lists)[1]


def _walk(visit: Callable[..., Any], listed: Any, state: Any) -> Any:
    """Visit the listed blocks of one row: first the full ones, then the partial."""

    def full(i: Array, state: Any) -> Any:
        return visit(listed.full_indices[i], False, state)

    def partly(i: Array, state: Any) -> Any:
        return visit(listed.indices[i], True, state)

    state = jax.lax.fori_loop(0, listed.full_num, full, state)
    return jax.lax.fori_loop(0, listed.num, partly, state)


def _over_rows(row: Callable[..., Any], carry: Any, lists: Any) -> Any:
    """Every row in turn: (carry, r, its lists) -> (carry, results by row)."""
    rows = jnp.arange(lists.num.shape[0], dtype=jnp.int32)
    return jax.lax.scan(lambda carry, x: row(carry, *x), carry, (rows, lists))


# --- one tile -------------------------------------------------------------------------


def _tile_gradients(
    config: _Config,
    score_mod: Any,
    mask_mod: Any,
    head: _Heads,
    statistics: _Statistics,
    r: Array,
    c: Array,
    partly: bool,
) -> tuple[Float[Array, "G M N"], Float[Array, "G M N"], Any]:
    """Weights of a tile, gradient of its scores, and of what score_mod captured."""
    lse, delta, d_out = (x[:, r] for x in statistics)
    place = _place(config, head, r, c)

    floating = _floating(score_mod)
    seen = _visible(config, mask_mod if partly else None, head, r, c)

    def modified(products: Array, floating: Any) -> Array:
        mod = _with_floating(score_mod, floating)
        if partly and floating:
            return score_tile_where(mod, seen, products, *place)
        return score_tile(mod, products, *place)

    products = _products(config, head, r, c)
    scores, vjp = jax.vjp(modified, products, floating)
    visible = (scores != -jnp.inf) & (lse != -jnp.inf)[..., None]
    visible = visible & seen if partly else visible
    shift = jnp.where(lse == -jnp.inf, jnp.zeros_like(lse), lse)
    weights = jnp.where(visible, jnp.exp(scores - shift[..., None]), 0.0)
    d_weights = _dot("gmv,nv->gmn", d_out, head.v[c].astype(d_out.dtype))
    d_modified = jnp.where(visible, weights * (d_weights - delta[..., None]), 0.0)
    d_products, d_captured = vjp(d_modified)
    d_scores = jnp.where(visible, d_products, 0.0) * scores.dtype.type(config.scale)
    return weights, d_scores, tuple(x.astype(scores.dtype) for x in d_captured)


def _products(config: _Config, head: _Heads, r: Array, c: Array) -> Array:
    dtype = softmax_dtype(head.q.dtype)
    products = _dot("gmd,nd->gmn", head.q[:, r], head.k[c], dtype=dtype)
    return products * dtype.type(config.scale)


def _place(config: _Config, head: _Heads, r: Array, c: Array) -> tuple[Array, ...]:
    """The arguments of a mod which say where a tile lies."""
    q_idx, _ = block_positions(r, config.blocks[0], config.lengths[0])
    kv_idx, _ = block_positions(c, config.blocks[1], config.lengths[1])
    return head.b, head.h, q_idx, kv_idx


def _visible(
    config: _Config, mask_mod: Any, head: _Heads, r: Array, c: Array
) -> Bool[Array, "G M N"]:
    """Inside both lengths, and seen by the mask."""
    _, q_real = block_positions(r, config.blocks[0], config.lengths[0])
    _, kv_real = block_positions(c, config.blocks[1], config.lengths[1])
    real = q_real[:, None] & kv_real[None, :]
    if mask_mod is None:
        return jnp.broadcast_to(real, (head.h.shape[0], *real.shape))
    return mask_tile(mask_mod, *_place(config, head, r, c)) & real[None]


def _online_softmax(state: Any, scores: Array, values: Array) -> Any:
    """Fold one tile into (output, maximum, sum)."""
    out, maximum, total = state
    new = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    shift = jnp.where(new == -jnp.inf, jnp.zeros_like(new), new)
    decay = jnp.exp(maximum - shift)
    weights = jnp.exp(scores - shift[..., None])
    total = total * decay + jnp.sum(weights, axis=-1)
    update = _dot("gmn,nv->gmv", weights, values.astype(weights.dtype))
    return out * decay[..., None] + update, new, total


def _normalise(out: Array, maximum: Array, total: Array) -> tuple[Array, Array, Array]:
    empty = total == 0.0
    safe = jnp.where(empty, jnp.ones_like(total), total)
    shift = jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)
    lse = jnp.where(empty, -jnp.inf, shift + jnp.log(safe))
    return out / safe[..., None], lse, maximum


def _dot(subscripts: str, x: Array, y: Array, dtype: Any = None) -> Array:
    """A product accumulated in `dtype`, by default the dtype of its first factor."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=dtype or x.dtype)
