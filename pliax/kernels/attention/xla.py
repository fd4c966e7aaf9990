"""flex_attention in plain XLA: chunked online softmax in linear memory.

A row of query blocks walks over the key blocks its mask lists and keeps, for every
query, the running maximum m, the sum l and the unnormalised output. Empty blocks are
never touched, full blocks skip `mask_mod` and are visited several at a time where they
stand side by side.

    forward    s = score_mod(scale q k),  m, l, o                    -> out, lse
    backward   p = exp(s - lse),  ds = p (do v - delta)              -> dq of the row,
               and dk, dv, dcaptured into sums that all rows share

Arrays keep their batch and heads as axes, so that a step is a few large products and
what a mod captured has one sum of gradients. Where each sequence or head has its own
list, they take step i of their lists together: the lists gather different keys, and one
that has come to its end sees nothing. Every sum is taken in a fixed order.

References:
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, Alg. 3.
    Dao, "FlashAttention-2", 2023, Algorithms 1 and 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pliax.core.jaxprs import ClosedFunction
from pliax.core.manual_axes import vary, varying_axes
from pliax.core.typing import Leaf

from .block_mask import BlockMask
from .derivatives import floating_captures, with_floating_captures
from .tiles import (
    Place,
    block_positions,
    broadcast,
    look,
    modify,
    retreat,
    softmax_dtype,
)


_DENSE_BLOCKS = (256, 512)
# Keys a visit of full blocks takes at once: below, the fixed cost of a visit shows.
_WIDE = 512


@dataclass(frozen=True)
class Layout:
    """What is static about one call.

    Attributes:
        scale: Factor of the products.
        lengths: Queries and keys.
        blocks: Queries and keys of a block.
        heads: Key heads, and query heads of each.
        wide: Key blocks that a visit of full blocks takes at once.
    """

    scale: float
    lengths: tuple[Any, Any]
    blocks: tuple[Any, Any]
    heads: tuple[int, int]
    wide: int


class _Visits(NamedTuple):
    """What each row visits, (R, Bm, Km, Gm[, C]): the first `num` of `columns`."""

    num: Leaf
    columns: Leaf


class _Lists(NamedTuple):
    """Partial blocks, full ones, and wide runs of full ones by their first block."""

    partial: _Visits
    full: _Visits
    wide: _Visits | None


class _Visit(NamedTuple):
    """One step of a walk.

    Attributes:
        columns: The key block of each list, (Bm, Km, Gm).
        active: Whether the list is not yet at its end; None if there is one list.
        blocks: Blocks taken at once, from `columns` on.
        partly: Whether `mask_mod` must be asked.
    """

    columns: Leaf
    active: Leaf
    blocks: int
    partly: bool


class _Statistics(NamedTuple):
    """What backward needs of the forward pass, by rows.

    Attributes:
        lse: Log-sum-exp, (R, B, K, G, M).
        delta: sum(d_out out) - d_lse, likewise.
        d_out: Gradient of the output, (R, B, K, G, M, V).
    """

    lse: Leaf
    delta: Leaf
    d_out: Leaf


def layout(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    block_mask: BlockMask | None,
    *,
    scale: float,
    block_q: int = _DENSE_BLOCKS[0],
    block_kv: int = _DENSE_BLOCKS[1],
) -> Layout:
    """The blocks of a call: those of its mask, or the given ones, at most T and S."""
    lengths = (query.shape[1], key.shape[1])
    heads = (key.shape[2], query.shape[2] // key.shape[2])
    if block_mask is not None:
        block_q, block_kv = block_mask.block_size
    pairs = zip((block_q, block_kv), lengths, strict=True)
    blocks = tuple(min(b, n) if isinstance(n, int) else b for b, n in pairs)
    whole = lengths[1] // blocks[1] if isinstance(lengths[1], int) else 1
    wide = 1 if block_mask is None else min(_WIDE // blocks[1], whole)
    return Layout(scale, lengths, (blocks[0], blocks[1]), heads, max(wide, 1))


def forward(
    layout: Layout, arrays: Any, score_mod: Any, block_mask: BlockMask | None
) -> tuple[Float[Array, "B T H V"], Float[Array, "B T H"], Float[Array, "B T H"]]:
    """Output in the query's dtype, log-sum-exp and maximum."""
    axes = varying_axes(arrays, score_mod, block_mask)
    arrays, score_mod, block_mask = vary((arrays, score_mod, block_mask), axes)
    tile, q = split(layout, arrays, score_mod, block_mask)
    start = vary(online_softmax_start(q[0], tile.v.shape[-1]), axes)

    def row(carry: Any, r: Array, q: Array, lists: Any) -> Any:
        def visit(at: _Visit, state: Any) -> Any:
            scores, visible = tile.scores(q, r, at)
            return online_softmax(state, scores, tile.values(at, visible))

        return carry, normalise(*_walk(layout, visit, lists, start))

    _, results = _over_rows(row, (), q, _row_lists(layout, block_mask))
    out, lse, maximum = (join_rows(layout, x) for x in results)
    return out.astype(arrays[0].dtype), lse, maximum


def backward(
    layout: Layout,
    arrays: Any,
    score_mod: Any,
    block_mask: BlockMask | None,
    results: tuple[Array, Array],
    cotangents: tuple[Array, Array],
) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    """Gradients of query, key, value, and of the floating arrays `score_mod` captured.

    In the softmax's dtype; the caller casts.
    """
    axes = varying_axes(arrays, score_mod, block_mask, cotangents)
    arrays, score_mod, block_mask = vary((arrays, score_mod, block_mask), axes)
    tile, q = split(layout, arrays, score_mod, block_mask)
    lists = _row_lists(layout, block_mask)
    # Sums have an axis for each list: steps of different lists meet different keys.
    own_batch, _, private = lists.partial.num.shape[1:]
    batch = own_batch if own_batch != 1 else arrays[1].shape[0]
    statistics = _statistics(layout, results, cotangents)
    dtype = statistics.lse.dtype

    def row(sums: Any, r: Array, q: Array, statistics: Any, lists: Any) -> Any:
        def visit(at: _Visit, state: Any) -> Any:
            d_q, d_k, d_v, d_captured = state
            weights, d_scores, more, keys = _gradients(tile, q, statistics, r, at)
            d_q += weigh(d_scores, keys.astype(dtype))
            d_k = tile.add(d_k, at, _weigh_queries(d_scores, q.astype(dtype), d_k))
            d_v = tile.add(d_v, at, _weigh_queries(weights, statistics.d_out, d_v))
            return d_q, d_k, d_v, jax.tree.map(jnp.add, d_captured, more)

        sees = (statistics.lse != -jnp.inf)[..., None]
        q = jnp.where(sees, q, jnp.zeros_like(q))
        start = vary(jnp.zeros(q.shape, dtype), axes)
        d_q, *sums = _walk(layout, visit, lists, (start, *sums))
        return tuple(sums), d_q

    nothing = (
        *(
            jnp.zeros((batch, x.shape[1], private, *x.shape[3:]), dtype)
            for x in (tile.k, tile.v)
        ),
        tuple(jnp.zeros(x.shape, dtype) for x in floating_captures(score_mod)),
    )
    sums, d_q = _over_rows(row, vary(nothing, axes), q, statistics, lists)
    d_k, d_v, d_captured = sums
    d_keys = (_join_keys(layout, x, arrays[1].shape[0]) for x in (d_k, d_v))
    return (join_rows(layout, d_q), *d_keys), d_captured


def _statistics(layout: Layout, results: Any, cotangents: Any) -> _Statistics:
    """Rows beyond the end get no gradient, and so give none."""
    out, lse = results
    d_out, d_lse = (x.astype(lse.dtype) for x in cotangents)
    delta = jnp.sum(d_out * out.astype(lse.dtype), axis=-1) - d_lse
    edge = _split_rows(layout, lse, mode="edge")
    zero = (_split_rows(layout, x, mode="constant") for x in (delta, d_out))
    return _Statistics(edge, *zero)


def _gradients(
    tile: "Tile", q: Array, statistics: _Statistics, r: Array, at: _Visit
) -> tuple[Float[Array, "B K G M N"], Float[Array, "B K G M N"], Any, Array]:
    """Weights, gradients of the products and of what was captured; and the keys."""
    lse, delta = (x[..., None] for x in statistics[:2])
    place, visible = tile.place(r, at), tile.visible(r, at)
    captured = floating_captures(tile.score_mod)

    def modified(products: Array, captured: Any, place: Place) -> Array:
        mod = with_floating_captures(tile.score_mod, captured)
        return modify(mod, products, place)

    products = tile.products(q, at)
    scores, vjp = jax.vjp(partial(modified, place=place), products, captured)
    seen = (scores != -jnp.inf) & (lse != -jnp.inf)
    seen = seen if visible is None else seen & visible
    shift = jnp.where(lse == -jnp.inf, jnp.zeros_like(lse), lse)
    weights = jnp.where(seen, jnp.exp(scores - shift), 0.0)
    d_weights = compare(statistics.d_out, tile.values(at, visible), scores.dtype)
    d_modified = jnp.where(seen, weights * (d_weights - delta), 0.0)
    d_products, d_captured = vjp(d_modified)
    if captured and visible is not None:
        products, place = retreat(visible, products, place)
        vjp = jax.vjp(partial(modified, products, place=place), captured)[1]
        (d_captured,) = vjp(d_modified)
        some = jnp.any(visible)
        d_captured = jax.tree.map(lambda x: jnp.where(some, x, 0.0), d_captured)
    d_captured = tuple(x.astype(scores.dtype) for x in d_captured)
    d_scores = jnp.where(seen, d_products, 0.0) * tile.layout.scale
    return weights, d_scores, d_captured, tile.keys(at, visible)


# --- walking over blocks --------------------------------------------------------------


def _row_lists(layout: Layout, block_mask: BlockMask | None) -> _Lists:
    """What each row of blocks visits."""
    if block_mask is None:
        return _dense_lists(layout)
    partial, full = (
        _Visits(_by_row(layout, num), _by_row(layout, columns))
        for num, columns in (
            (block_mask.kv_num_blocks, block_mask.kv_indices),
            (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
        )
    )
    if layout.wide == 1:
        return _Lists(partial, full, None)
    return _Lists(partial, *_take_runs(full, layout.wide))


def _by_row(
    layout: Layout, x: Int[Array, "Bm Hm R ..."]
) -> Int[Array, "R Bm Km Gm *C"]:
    heads = (1, 1) if x.shape[1] == 1 else layout.heads
    return jnp.moveaxis(x.reshape(x.shape[0], *heads, *x.shape[2:]), 3, 0)


def _dense_lists(layout: Layout) -> _Lists:
    """Every key block: full, but for a last one that reaches beyond the end."""
    (T, S), (M, N) = layout.lengths, layout.blocks
    rows, columns = -(-T // M), -(-S // N)
    whole = jnp.arange(columns, dtype=jnp.int32)
    num = jnp.sum((whole + 1) * N <= S, dtype=jnp.int32)
    last = jnp.full((1,), columns - 1, jnp.int32)
    shape = (rows, 1, 1, 1)

    def everywhere(num: Array, columns: Array) -> _Visits:
        columns = jnp.broadcast_to(columns, (*shape, *columns.shape))
        return _Visits(jnp.broadcast_to(num, shape), columns)

    return _Lists(everywhere(columns - num, last), everywhere(num, whole), None)


def _take_runs(full: _Visits, wide: int) -> tuple[_Visits, _Visits]:
    """Runs of `wide` neighbours that start at a multiple of it, taken out of a list."""
    position = jax.lax.broadcasted_iota(jnp.int32, full.columns.shape, 4)
    ends = jnp.roll(full.columns, 1 - wide, axis=-1) == full.columns + wide - 1
    inside = position + wide <= full.num[..., None]
    starts = inside & ends & (full.columns % wide == 0)
    taken = starts
    for step in range(1, wide):
        taken = taken | jnp.roll(starts, step, axis=-1)
    single = (position < full.num[..., None]) & ~taken
    runs = _compact(full.columns, starts)
    runs = _Visits(runs.num, runs.columns[..., : full.columns.shape[-1] // wide])
    return _compact(full.columns, single), runs


def _compact(columns: Array, chosen: Bool[Array, "..."]) -> _Visits:
    order = jnp.argsort(~chosen, axis=-1, stable=True)
    columns = jnp.take_along_axis(columns, order, axis=-1)
    return _Visits(jnp.sum(chosen, axis=-1, dtype=jnp.int32), columns)


def _walk(layout: Layout, visit: Callable[..., Any], lists: _Lists, state: Any) -> Any:
    """Visit the blocks of one row: wide runs, then full ones, then partial ones."""
    if lists.wide is not None:
        state = _each(visit, lists.wide, layout.wide, False, state)
    state = _each(visit, lists.full, 1, False, state)
    return _each(visit, lists.partial, 1, True, state)


def _each(
    visit: Callable[..., Any], visits: _Visits, blocks: int, partly: bool, state: Any
) -> Any:
    num, columns = visits
    alone = num.size == 1

    def step(i: Array, state: Any) -> Any:
        last = jnp.maximum(num - 1, 0)
        at = jnp.minimum(i, last)[..., None]
        column = jnp.take_along_axis(columns, at, axis=-1)[..., 0]
        active = None if alone else i < num
        return visit(_Visit(column, active, blocks, partly), state)

    return jax.lax.fori_loop(0, jnp.max(num), step, state)


def _over_rows(row: Callable[..., Any], carry: Any, *xs: Any) -> Any:
    """Every row in turn: (carry, r, its part of xs) -> (carry, results by row)."""
    rows = jnp.arange(jax.tree.leaves(xs)[0].shape[0], dtype=jnp.int32)
    return jax.lax.scan(lambda carry, x: row(carry, *x), carry, (rows, *xs))


# --- one tile -------------------------------------------------------------------------


class Tile(NamedTuple):
    """What every tile of a call is made from.

    Attributes:
        k: Keys, (1 or B, K, 1, S, D), filled up to whole blocks.
        v: Values, (1 or B, K, 1, S, V), likewise.
        b: Batch index, (B, 1, 1, 1, 1).
        h: Query head, (1, K, G, 1, 1).
        score_mod: Traced score modification or None.
        mask_mod: Traced mask or None.
        layout: What is static.
    """

    k: Leaf
    v: Leaf
    b: Leaf
    h: Leaf
    score_mod: ClosedFunction | None
    mask_mod: ClosedFunction | None
    layout: Layout

    def place(self, r: Array, at: _Visit) -> Place:
        """The indices mods see, kept inside the true lengths."""
        T, S = self.layout.lengths
        q_idx, _ = block_positions(r, self.layout.blocks[0], T)
        kv_idx = jnp.minimum(self._positions(at), S - 1)
        return Place(self.b, self.h, q_idx[None, None, None, :, None], kv_idx)

    def _positions(self, at: _Visit) -> Int[Array, "Bm Km Gm 1 N"]:
        N = self.layout.blocks[1]
        offsets = jnp.arange(at.blocks * N, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
        return at.columns[..., None, None] * N + offsets

    def visible(self, r: Array, at: _Visit) -> Bool[Array, "..."] | None:
        """What the mask and the end of the keys leave; None if that is everything."""
        parts = []
        if at.active is not None:
            parts.append(at.active[..., None, None])
        if at.partly and not _divides(self.layout.blocks[1], self.layout.lengths[1]):
            parts.append(self._positions(at) < self.layout.lengths[1])
        if at.partly and self.mask_mod is not None:
            parts.append(look(self.mask_mod, self.place(r, at)))
        return reduce(jnp.logical_and, parts) if parts else None

    def products(self, q: Array, at: _Visit) -> Float[Array, "B K G M N"]:
        """Scaled products of a row of queries and the visited keys."""
        dtype = softmax_dtype(q.dtype)
        keys = self._slice(self.k, at).astype(q.dtype)
        return compare(q, keys, dtype) * self.layout.scale

    def scores(self, q: Array, r: Array, at: _Visit) -> tuple[Array, Array | None]:
        """Modified scores, -inf where not visible; and what is visible."""
        scores = modify(self.score_mod, self.products(q, at), self.place(r, at))
        visible = self.visible(r, at)
        if visible is not None:
            scores = jnp.where(visible, scores, -jnp.inf)
        return scores, visible

    def keys(self, at: _Visit, visible: Array | None) -> Float[Array, "B K Gm N D"]:
        """The visited keys, 0 where nothing sees them."""
        return _zero_unseen(self._slice(self.k, at), visible)

    def values(self, at: _Visit, visible: Array | None) -> Float[Array, "B K Gm N V"]:
        """The visited values, 0 where nothing sees them."""
        return _zero_unseen(self._slice(self.v, at), visible)

    def _slice(self, x: Array, at: _Visit) -> Array:
        N = self.layout.blocks[1]

        def one(x: Array, column: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, column * N, at.blocks * N)

        return broadcast(one, 3, x, at.columns)

    def add(self, total: Array, at: _Visit, update: Array) -> Array:
        """`total`, (B, K, P, S, D), with an update added at the visited keys."""
        N = self.layout.blocks[1]

        def one(total: Array, column: Array, update: Array) -> Array:
            old = jax.lax.dynamic_slice_in_dim(total, column * N, at.blocks * N)
            return jax.lax.dynamic_update_slice(total, old + update, (column * N, 0))

        return broadcast(one, 3, total, at.columns, update)


def _divides(block: int, length: Any) -> bool:
    return isinstance(length, int) and length % block == 0


def _zero_unseen(x: Array, visible: Array | None) -> Array:
    """A key that no query of the tile sees may hold anything, also NaN."""
    if visible is None:
        return x
    over = 3 if x.shape[2] != 1 else (2, 3)
    seen = jnp.any(visible, axis=over, keepdims=True)
    return jnp.where(jnp.swapaxes(seen, 3, 4), x, jnp.zeros_like(x))


def compare(q: Array, keys: Array, dtype: Any) -> Float[Array, "B K G M N"]:
    """Products of queries (B, K, G, M, D) and keys (1 or B, K, 1 or G, N, D)."""
    rows, keys = _rows(q, keys), _columns(keys, len(q))
    return _dot(rows, keys, (3, 3), dtype).reshape(*q.shape[:-1], -1)


def weigh(weights: Array, values: Array) -> Float[Array, "B K G M V"]:
    """Sums of values (1 or B, K, 1 or G, N, V) with weights (B, K, G, M, N)."""
    dtype = weights.dtype
    rows, values = _rows(weights, values), _columns(values, len(weights))
    sums = _dot(rows, values.astype(dtype), (3, 2), dtype)
    return sums.reshape(*weights.shape[:-1], -1)


def _weigh_queries(weights: Array, x: Array, like: Array) -> Array:
    """Sums over the queries (B, K, G, M, D) that weigh a key, shaped as `like` is."""
    sums = _dot(_rows(weights, like), _rows(x, like), (2, 2), weights.dtype)
    if like.shape[0] == 1:
        sums = jnp.sum(sums, axis=0, keepdims=True)
    return sums.reshape(*like.shape[:3], *sums.shape[2:])


def _rows(x: Float[Array, "B K G M N"], keys: Array) -> Float[Array, "B KP GM N"]:
    """One matrix for all that meets the same keys: the query heads of a key head too.

    Heads in front and one matrix behind is the form of product XLA takes as it is; for
    any other it transposes the operands, or the result.
    """
    heads = x.shape[1] * keys.shape[2]
    return x.reshape(x.shape[0], heads, -1, x.shape[4])


def _columns(keys: Float[Array, "B K P N D"], batch: int) -> Float[Array, "B KP N D"]:
    keys = keys.reshape(keys.shape[0], -1, *keys.shape[3:])
    return jnp.broadcast_to(keys, (batch, *keys.shape[1:]))


def _dot(x: Array, y: Array, contracted: tuple[int, int], dtype: Any) -> Array:
    left, right = contracted
    dimensions = (((left,), (right,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(x, y, dimensions, preferred_element_type=dtype)


# --- the softmax ----------------------------------------------------------------------


def online_softmax_start(
    q: Float[Array, "*rest M D"], value_dimension: int
) -> tuple[Array, Array, Array]:
    """Output, maximum and sum before the first tile."""
    dtype, rest = softmax_dtype(q.dtype), q.shape[:-1]
    out = jnp.zeros((*rest, value_dimension), dtype)
    return out, jnp.full(rest, -jnp.inf, dtype), jnp.zeros(rest, dtype)


def online_softmax(state: Any, scores: Array, values: Array) -> Any:
    """Fold one tile into (output, maximum, sum)."""
    out, maximum, total = state
    new = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    shift = jnp.where(new == -jnp.inf, jnp.zeros_like(new), new)
    decay = jnp.exp(maximum - shift)
    weights = jnp.exp(scores - shift[..., None])
    total = total * decay + jnp.sum(weights, axis=-1)
    return out * decay[..., None] + weigh(weights, values), new, total


def normalise(out: Array, maximum: Array, total: Array) -> tuple[Array, Array, Array]:
    """Output, log-sum-exp and maximum; output 0 where nothing was seen."""
    empty = total == 0.0
    safe = jnp.where(empty, jnp.ones_like(total), total)
    shift = jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)
    lse = jnp.where(empty, -jnp.inf, shift + jnp.log(safe))
    return out / safe[..., None], lse, maximum


# --- arrays in blocks -----------------------------------------------------------------


def split(
    layout: Layout, arrays: Any, score_mod: Any, block_mask: BlockMask | None
) -> tuple[Tile, Float[Array, "R B K G M D"]]:
    """What tiles are made from, and the queries by rows of blocks."""
    query, key, value = arrays
    k, v = (_split_keys(layout, x) for x in (key, value))
    b = jnp.arange(query.shape[0], dtype=jnp.int32)
    h = jnp.arange(query.shape[2], dtype=jnp.int32).reshape(layout.heads)
    mask_mod = None if block_mask is None else block_mask.mask_mod
    b, h = b.reshape(-1, 1, 1, 1, 1), h[None, :, :, None, None]
    tile = Tile(k, v, b, h, score_mod, mask_mod, layout)
    return tile, _split_rows(layout, query, mode="edge")


def _split_rows(layout: Layout, x: Array, *, mode: str) -> Array:
    """(B, T, H, ...) to (R, B, K, G, M, ...)."""
    M = layout.blocks[0]
    x = _fill(x, 1, M, mode)
    rows = x.shape[1] // M
    x = x.reshape(x.shape[0], rows, M, *layout.heads, *x.shape[3:])
    return x.transpose(1, 0, 3, 4, 2, *range(5, x.ndim))


def _split_keys(layout: Layout, x: Array) -> Array:
    """(B, S, K, D) to (B, K, 1, S, D), S whole blocks."""
    return jnp.swapaxes(_fill(x, 1, layout.blocks[1], "edge"), 1, 2)[:, :, None]


def _fill(x: Array, axis: int, block: int, mode: str) -> Array:
    """Fill the last block; "edge" with copies of the last real row.

    Together with indices clamped to the true length, a place beyond the end is then a
    copy of a real score: what a mod makes of it is finite where the real one is.
    """
    missing = -(-x.shape[axis] // block) * block - x.shape[axis]
    widths = [(0, missing if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, mode=mode)


def join_rows(layout: Layout, x: Array) -> Array:
    """(R, B, K, G, M, ...) to (B, T, H, ...)."""
    rows, batch, _, _, M = x.shape[:5]
    x = x.transpose(1, 0, 4, 2, 3, *range(5, x.ndim))
    x = x.reshape(batch, rows * M, -1, *x.shape[5:])
    return x[:, : layout.lengths[0]]


def _join_keys(layout: Layout, x: Float[Array, "B K P S D"], batch: int) -> Array:
    """Summed over sequences and query heads that shared the keys: (B, S, K, D)."""
    x = jnp.sum(x, axis=2)
    x = jnp.sum(x, axis=0, keepdims=True) if batch == 1 else x
    return jnp.swapaxes(x, 1, 2)[:, : layout.lengths[1]]
