"""flex_attention in plain XLA: chunked online softmax in linear memory.

A row of query blocks walks over the key blocks its mask lists and keeps, for every
query, the running maximum m, the sum l and the unnormalised output. Empty blocks are
never touched, and of full ones `mask_mod` has no say; a visit takes a square of full
ones at once, or a column that a few neighbouring rows all list.

    forward    s = score_mod(scale q k),  m, l, o           -> out, lse, m, log l
    backward   p = exp(s - m - log l),  ds = p (do v - delta)  -> dq of the row,
               and dk, dv, dcaptured into sums that all rows share

Arrays keep their batch and heads as axes, so that a step is a few large products and
what a mod captured has one sum of gradients. Where each sequence or head has its own
list, they take step i of their lists together: the lists gather different keys, and one
that has come to its end sees nothing. Sums are taken in the order of the
blocks (scattered ones on a GPU in none).

References:
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, Alg. 3.
    Dao, "FlashAttention-2", 2023, Algorithms 1 and 2.
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pliax.core.accumulation import accumulate
from pliax.core.jaxprs import ClosedFunction
from pliax.core.manual_axes import vary, varying_axes
from pliax.core.typing import Leaf

from .block_mask import BlockMask
from .derivatives import floating_captures, with_floating_captures
from .merging import FEW, normalise
from .tiles import (
    Place,
    broadcast,
    look,
    modify,
    retreat,
    softmax_dtype,
)
from .walking import Layout, Visit, each_row, over_rows, row_lists, visit_together, walk


_BLOCKS = (256, 512)
# Queries and keys a visit takes at once, where blocks are smaller; see `walking`.
_SQUARE = 256
# Of few queries a visit takes more keys, to be worth its cost.
_FEW_KEYS = 2048


class _Statistics(NamedTuple):
    """What backward needs of the forward pass: of all queries, or of a row of blocks.

    Attributes:
        maximum: Of the scores, (B, T, H) or (B, K, G, M).
        log_sum: Logarithm of the sum of exp(s - maximum), likewise.
        delta: sum(d_out out) - d_lse, likewise.
        d_out: Gradient of the output, (B, T, H, V) or (B, K, G, M, V).
    """

    maximum: Leaf
    log_sum: Leaf
    delta: Leaf
    d_out: Leaf


def layout(
    query: Float[Array, "B T H D"],
    key: Float[Array, "Bk S K D"],
    block_mask: BlockMask | None,
    *,
    scale: float,
    block_q: int = _BLOCKS[0],
    block_kv: int | None = None,
    splits: int | None = None,
) -> Layout:
    """The blocks of a call: those of its mask, or the given ones, at most T and S."""
    lengths = (query.shape[1], key.shape[1])
    heads = (key.shape[2], query.shape[2] // key.shape[2])
    few = isinstance(lengths[0], int) and lengths[0] < FEW
    if splits is None:
        splits = _splits() if few else 1
    visited = (1, _FEW_KEYS) if few else (_SQUARE, _SQUARE)
    if block_mask is not None:
        sizes = block_mask.block_size
    else:
        keys = max(1, _FEW_KEYS // splits) if few else _BLOCKS[1]
        sizes = (block_q, block_kv or keys)
    pairs = zip(sizes, lengths, strict=True)
    blocks = tuple(min(b, n) if isinstance(n, int) else b for b, n in pairs)
    square = (1, 1)
    if block_mask is not None and splits == 1:
        counts = block_mask.kv_indices.shape[2:]
        square = tuple(
            max(1, min(size // block, count)) if isinstance(count, int) else 1
            for size, block, count in zip(visited, blocks, counts, strict=True)
        )
    return Layout(scale, lengths, blocks, heads, square, splits)


def _splits() -> int:
    """Parts the keys of few queries are cut into.

    On one H200 (bfloat16, D 128, 8 to 128 products, 8k to 64k keys) 16 parts took 0.09
    to 0.5 of the time of one. A CPU does one product after another: there a longer one
    is better than several.
    """
    return 1 if jax.default_backend() == "cpu" else 16


def forward(
    layout: Layout, arrays: Any, score_mod: Any, block_mask: BlockMask | None
) -> tuple[Float[Array, "B T H ..."], ...]:
    """Output in the query's dtype, log-sum-exp, maximum and logarithm of the sum."""
    axes = varying_axes(arrays, score_mod, block_mask)
    arrays, score_mod, block_mask = vary((arrays, score_mod, block_mask), axes)
    query, tile = split(layout, arrays, score_mod, block_mask)

    def visit_of(r: Array, count: int) -> Any:
        return partial(fold, tile, row_of(layout, query, r, count), r)

    def row(results: Any, r: Array, lists: Any, state: Any) -> Any:
        found = normalise(*walk(partial(visit_of, r, 1), lists, state))
        return tuple(
            put_row(layout, whole, r, part)
            for whole, part in zip(results, found, strict=True)
        )

    def rows(results: Any, r: Array, lists: Any) -> Any:
        together = layout.square[0]
        start = vary(tile.nothing_seen(query, together), axes)
        prepare = partial(visit_of, r, together)
        state = visit_together(layout, prepare, lists, start)
        return each_row(layout, row, results, r, lists, state)

    lists = row_lists(layout, block_mask)
    results = vary(tile.no_results(query), axes)
    results = over_rows(layout, rows, results, lists)
    return tuple(x[:, : layout.lengths[0]] for x in results)


def fold(tile: "Tile", q: Array, r: Array, at: Visit, state: Any) -> Any:
    """Fold one visit into the state of the softmax."""
    scores, visible = tile.scores(q, r, at)
    return online_softmax(state, scores, tile.values(at, visible))


def backward(
    layout: Layout,
    arrays: Any,
    score_mod: Any,
    block_mask: BlockMask | None,
    results: tuple[Array, Array, Array],
    cotangents: tuple[Array, Array],
) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    """Gradients of query, key, value, and of the floating arrays `score_mod` captured.

    In the softmax's dtype; the caller casts.
    """
    axes = varying_axes(arrays, score_mod, block_mask, cotangents)
    arrays, score_mod, block_mask = vary((arrays, score_mod, block_mask), axes)
    query, tile = split(layout, arrays, score_mod, block_mask)
    statistics = _statistics(layout, results, cotangents)
    dtype = statistics.maximum.dtype

    def of_rows(r: Array, count: int) -> tuple[Array, _Statistics]:
        of = _Statistics(*(row_of(layout, x, r, count) for x in statistics))
        q = row_of(layout, query, r, count)
        sees = (of.maximum != -jnp.inf)[..., None]
        return jnp.where(sees, q, jnp.zeros_like(q)), of

    def add(q: Array, of: _Statistics, r: Array, at: Visit, sums: Any) -> Any:
        d_q, d_k, d_v, d_captured = sums
        weights, d_scores, d_captured = _gradients(tile, q, of, r, at, d_captured)
        d_q += weigh(d_scores, tile.keys(at, tile.visible(r, at)).astype(dtype))
        d_k = tile.add(d_k, at, d_scores, q.astype(dtype))
        d_v = tile.add(d_v, at, weights, of.d_out)
        return d_q, d_k, d_v, d_captured

    def visit_of(r: Array, count: int) -> Any:
        return partial(add, *of_rows(r, count), r)

    def row(sums: Any, r: Array, lists: Any, d_q: Any) -> Any:
        total_q, *sums = sums
        d_q, *sums = walk(partial(visit_of, r, 1), lists, (d_q, *sums))
        return (put_row(layout, total_q, r, d_q), *sums)

    def rows(sums: Any, r: Array, lists: Any) -> Any:
        total_q, *sums = sums
        together = layout.square[0]
        start = vary(jnp.zeros(tile.shape_of(query, together), dtype), axes)
        prepare = partial(visit_of, r, together)
        d_q, *sums = visit_together(layout, prepare, lists, (start, *sums))
        return each_row(layout, row, (total_q, *sums), r, lists, d_q)

    lists = row_lists(layout, block_mask)
    nothing = (
        jnp.zeros(query.shape, dtype),
        *(tile.nothing(x, lists.partial.num[0], dtype) for x in (tile.k, tile.v)),
        tuple(jnp.zeros_like(x) for x in floating_captures(score_mod)),
    )
    sums = over_rows(layout, rows, vary(nothing, axes), lists)
    d_q, d_k, d_v, d_captured = sums
    d_k, d_v = (_join_keys(layout, x, arrays[1].shape[0]) for x in (d_k, d_v))
    return (d_q[:, : layout.lengths[0]], d_k, d_v), d_captured


def _statistics(layout: Layout, results: Any, cotangents: Any) -> _Statistics:
    """Rows beyond the end get no gradient, and so give none."""
    out, *of_scores = results
    dtype = of_scores[0].dtype
    d_out, d_lse = (x.astype(dtype) for x in cotangents)
    delta = jnp.sum(d_out * out.astype(dtype), axis=-1) - d_lse
    rows = layout.blocks[0] * layout.square[0]
    real = (_fill(x, rows, "edge") for x in of_scores)
    return _Statistics(*real, *(_fill(x, rows, "constant") for x in (delta, d_out)))


def _gradients(
    tile: "Tile", q: Array, statistics: _Statistics, r: Array, at: Visit, sums: Any
) -> tuple[Float[Array, "B K G M N"], Float[Array, "B K G M N"], Any]:
    """Weights, gradients of the products, and `sums` with those of what was captured.

    Sums are added to in place: a tile looks up few of the elements it could.
    """
    maximum, log_sum, delta = (x[..., None] for x in statistics[:3])
    place, visible = tile.place(r, at), tile.visible(r, at)
    captured = floating_captures(tile.score_mod)

    def modified(place: Place, products: Array, captured: Any) -> Array:
        mod = with_floating_captures(tile.score_mod, captured)
        return modify(mod, products, place)

    products = tile.products(q, at)
    scores, vjp = jax.vjp(partial(modified, place), products, captured)
    seen = (scores != -jnp.inf) & (maximum != -jnp.inf)
    seen = seen if visible is None else seen & visible
    shift = jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)
    weights = jnp.where(seen, jnp.exp(scores - shift - log_sum), 0.0)
    d_weights = compare(statistics.d_out, tile.values(at, visible), scores.dtype)
    d_modified = jnp.where(seen, weights * (d_weights - delta), 0.0)
    if visible is None or not captured:
        d_products, sums = accumulate(vjp, d_modified, sums)
    else:
        d_products, _ = vjp(d_modified)
        products, place = retreat(visible, products, place)
        vjp = jax.vjp(partial(modified, place), products, captured)[1]
        some = jnp.any(visible).astype(jnp.int32)
        add = lambda _, sums: accumulate(vjp, d_modified, sums)[1]  # noqa: E731
        sums = jax.lax.fori_loop(0, some, add, sums)
    return weights, jnp.where(seen, d_products, 0.0) * tile.layout.scale, sums


# --- one tile -------------------------------------------------------------------------


class Tile(NamedTuple):
    """What every tile of a call is made from.

    Attributes:
        k: Keys, (1 or B, S, K, D), filled up to whole blocks.
        v: Values, (1 or B, S, K, V), likewise.
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

    def place(self, r: Array, at: Visit) -> Place:
        """The indices mods see, kept inside the true lengths."""
        M, (T, S) = self.layout.blocks[0], self.layout.lengths
        q_idx = r * M + jnp.arange(at.size[0] * M, dtype=jnp.int32)
        q_idx = jnp.minimum(q_idx, T - 1)
        kv_idx = jnp.minimum(self._positions(at), S - 1)
        return Place(self.b, self.h, q_idx[None, None, None, :, None], kv_idx)

    def _positions(self, at: Visit) -> Int[Array, "Bm Km Gm 1 N"]:
        N = self.layout.blocks[1]
        offsets = jnp.arange(at.size[1] * N, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
        return at.columns[..., None, None] * N + offsets

    def visible(self, r: Array, at: Visit) -> Bool[Array, "..."] | None:
        """What the mask and the end of the keys leave; None if that is everything."""
        parts = []
        if at.active is not None:
            parts.append(at.active[..., None, None])
        if at.partly and not _divides(self.layout.blocks[1], self.layout.lengths[1]):
            parts.append(self._positions(at) < self.layout.lengths[1])
        if at.partly and self.mask_mod is not None:
            seen = look(self.mask_mod, self.place(r, at))
            if at.whole is not None:
                whole = jnp.repeat(at.whole, self.layout.blocks[0], axis=-1)
                seen |= whole[..., None]
            parts.append(seen)
        return reduce(jnp.logical_and, parts) if parts else None

    def products(self, q: Array, at: Visit) -> Float[Array, "B K G M N"]:
        """Scaled products of a row of queries and the visited keys."""
        dtype = softmax_dtype(q.dtype)
        keys = self._slice(self.k, at).astype(q.dtype)
        return compare(q, keys, dtype) * self.layout.scale

    def scores(self, q: Array, r: Array, at: Visit) -> tuple[Array, Array | None]:
        """Modified scores, -inf where not visible; and what is visible."""
        scores = modify(self.score_mod, self.products(q, at), self.place(r, at))
        visible = self.visible(r, at)
        if visible is not None:
            scores = jnp.where(visible, scores, -jnp.inf)
        return scores, visible

    def keys(self, at: Visit, visible: Array | None) -> Float[Array, "B K Gm N D"]:
        """The visited keys, 0 where nothing sees them."""
        return _zero_unseen(self._slice(self.k, at), visible)

    def values(self, at: Visit, visible: Array | None) -> Float[Array, "B K Gm N V"]:
        """The visited values, 0 where nothing sees them."""
        return _zero_unseen(self._slice(self.v, at), visible)

    def _slice(self, x: Array, at: Visit) -> Float[Array, "B K Gm N D"]:
        """The visited part of keys or values."""
        N = self.layout.blocks[1]

        def one(x: Array, column: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, column * N, at.size[1] * N)

        if _lists_by_head(at.columns):
            return broadcast(one, 3, _by_head(x), at.columns)
        return _by_head(broadcast(one, 1, x, at.columns[:, 0, 0]))

    def nothing_seen(self, query: Array, rows: int) -> tuple[Array, Array, Array]:
        """Output, maximum and sum of rows of blocks before their first visit."""
        dtype, shape = softmax_dtype(query.dtype), self.shape_of(query, rows)[:4]
        out = jnp.zeros((*shape, self.v.shape[-1]), dtype)
        return out, jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype)

    def shape_of(self, query: Array, rows: int) -> tuple[Any, ...]:
        """(B, K, G, M, D) of so many rows of blocks."""
        B, M, D = query.shape[0], rows * self.layout.blocks[0], query.shape[3]
        return (B, *self.layout.heads, M, D)

    def no_results(self, query: Array) -> tuple[Array, ...]:
        """What `normalise` gives, to be filled row by row."""
        dtype, shape = softmax_dtype(query.dtype), query.shape[:3]
        out = jnp.zeros((*shape, self.v.shape[-1]), query.dtype)
        return (out, *(jnp.zeros(shape, dtype) for _ in range(3)))

    def nothing(self, x: Array, num: Array, dtype: Any) -> Array:
        """Sums of gradients for `x`, keys or values: `add` adds to them.

        (1 or B, S, K, D); with lists by head (1 or B, K, G, S, D). Sequences and heads
        with lists of their own need sums of their own.
        """
        batch, _, groups = num.shape[1:]
        batch = batch if batch != 1 else x.shape[0]
        if not _lists_by_head(num[0]):
            return jnp.zeros((batch, *x.shape[1:]), dtype)
        return jnp.zeros((batch, x.shape[2], groups, x.shape[1], x.shape[3]), dtype)

    def add(self, total: Array, at: Visit, weights: Array, x: Array) -> Array:
        """`total` with the sums over queries `x` that weigh the visited keys."""
        N = self.layout.blocks[1]

        def one(total: Array, column: Array, update: Array) -> Array:
            old = jax.lax.dynamic_slice_in_dim(total, column * N, at.size[1] * N)
            new = old + update
            return jax.lax.dynamic_update_slice_in_dim(total, new, column * N, 0)

        if _lists_by_head(at.columns):
            update = _weigh_queries(weights, x, total.shape[:3])
            return broadcast(one, 3, total, at.columns, update)
        update = _weigh_queries(weights, x, (total.shape[0], total.shape[2], 1))
        update = jnp.swapaxes(update[:, :, 0], 1, 2)
        return broadcast(one, 1, total, at.columns[:, 0, 0], update)


def _lists_by_head(columns: Array) -> bool:
    """Whether heads have lists of their own, (B, K, G)."""
    return columns.shape[1:] != (1, 1)


def _by_head(x: Float[Array, "B S K D"]) -> Float[Array, "B K 1 S D"]:
    return jnp.swapaxes(x, 1, 2)[:, :, None]


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
    rows, keys = _rows(q, keys.shape[2]), _columns(keys, q.shape[0])
    return _dot(rows, keys, (3, 3), dtype).reshape(*q.shape[:-1], -1)


def weigh(weights: Array, values: Array) -> Float[Array, "B K G M V"]:
    """Sums of values (1 or B, K, 1 or G, N, V) with weights (B, K, G, M, N)."""
    dtype = weights.dtype
    rows, values = _rows(weights, values.shape[2]), _columns(values, weights.shape[0])
    sums = _dot(rows, values.astype(dtype), (3, 2), dtype)
    return sums.reshape(*weights.shape[:-1], -1)


def _weigh_queries(
    weights: Array, x: Array, shape: tuple[Any, ...]
) -> Float[Array, "B K P N D"]:
    """Sums over the queries (B, K, G, M, D) that weigh a key, in `shape`."""
    groups = shape[2]
    sums = _dot(_rows(weights, groups), _rows(x, groups), (2, 2), weights.dtype)
    if shape[0] == 1:
        sums = jnp.sum(sums, axis=0, keepdims=True)
    return sums.reshape(*shape, *sums.shape[2:])


def _rows(x: Float[Array, "B K G M N"], groups: int) -> Float[Array, "B KP GM N"]:
    """One matrix for all that meets the same keys: the query heads of a key head too.

    Heads in front and one matrix behind is the form of product XLA takes as it is; for
    any other it transposes the operands, or the result.
    """
    heads = x.shape[1] * groups
    return x.reshape(x.shape[0], heads, -1, x.shape[4])


def _columns(keys: Float[Array, "Bk K P N D"], batch: Any) -> Float[Array, "B KP N D"]:
    keys = keys.reshape(keys.shape[0], -1, *keys.shape[3:])
    return jnp.broadcast_to(keys, (batch, *keys.shape[1:]))


def _dot(x: Array, y: Array, contracted: tuple[int, int], dtype: Any) -> Array:
    left, right = contracted
    dimensions = (((left,), (right,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(x, y, dimensions, preferred_element_type=dtype)


# --- the softmax ----------------------------------------------------------------------


def online_softmax(state: Any, scores: Array, values: Array) -> Any:
    """Fold one tile into (output, maximum, sum)."""
    out, maximum, total = state
    new = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    shift = jnp.where(new == -jnp.inf, jnp.zeros_like(new), new)
    decay = jnp.exp(maximum - shift)
    weights = jnp.exp(scores - shift[..., None])
    total = total * decay + jnp.sum(weights, axis=-1)
    return out * decay[..., None] + weigh(weights, values), new, total


# --- arrays in blocks -----------------------------------------------------------------


def split(
    layout: Layout, arrays: Any, score_mod: Any, block_mask: BlockMask | None
) -> tuple[Float[Array, "B T H D"], Tile]:
    """The queries in whole blocks, and what tiles are made from."""
    query, key, value = arrays
    k, v = (_fill(x, layout.blocks[1], "edge") for x in (key, value))
    b = jnp.arange(query.shape[0], dtype=jnp.int32)
    h = jnp.arange(query.shape[2], dtype=jnp.int32).reshape(layout.heads)
    mask_mod = None if block_mask is None else block_mask.mask_mod
    b, h = b.reshape(-1, 1, 1, 1, 1), h[None, :, :, None, None]
    tile = Tile(k, v, b, h, score_mod, mask_mod, layout)
    return _fill(query, layout.blocks[0] * layout.square[0], "edge"), tile


def _fill(x: Array, block: int, mode: str) -> Array:
    """Fill the last block; "edge" with copies of the last real row.

    Together with indices clamped to the true length, a place beyond the end is then a
    copy of a real score: what a mod makes of it is finite where the real one is.
    """
    missing = -(-x.shape[1] // block) * block - x.shape[1]
    widths = [(0, missing if axis == 1 else 0) for axis in range(x.ndim)]
    return jnp.pad(x, widths, mode=mode)


def row_of(
    layout: Layout, x: Array, r: Array, rows: int
) -> Float[Array, "B K G M ..."]:
    """Rows of blocks of `x`, (B, T, H, ...), from `r` on."""
    M = layout.blocks[0]
    x = jax.lax.dynamic_slice_in_dim(x, r * M, rows * M, axis=1)
    x = x.reshape(*x.shape[:2], *layout.heads, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3)


def put_row(layout: Layout, whole: Array, r: Array, x: Array) -> Array:
    """`whole`, (B, T, H, ...), with rows of blocks replaced, from `r` on."""
    x = jnp.moveaxis(x, 3, 1).astype(whole.dtype)
    x = x.reshape(*x.shape[:2], -1, *x.shape[4:])
    return jax.lax.dynamic_update_slice_in_dim(whole, x, r * layout.blocks[0], axis=1)


def _join_keys(layout: Layout, x: Array, batch: Any) -> Float[Array, "B S K D"]:
    """Summed over the sequences and query heads that shared the keys."""
    if x.ndim == 5:
        x = jnp.swapaxes(jnp.sum(x, axis=2), 1, 2)
    x = jnp.sum(x, axis=0, keepdims=True) if batch == 1 else x
    return x[:, : layout.lengths[1]]
