"""Pages: the keys and values of many growing sequences in one shared store.

    logical position  --page_table-->           page, row in it    `assign` writes there
    page, row in it   --physical_to_logical-->  logical position   mods are asked there

A sequence owns pages, in any order; attention runs over the whole store, as keys that
all sequences share, under a block mask which lists the pages of each. Mods are written
for logical positions and converted. Everything is data of fixed shape: sequences that
grow, end and begin do not compile again.

Two laws keep sequences apart. A page belongs to one sequence or to none. A row that was
never assigned holds zeros: `erase` clears the pages it frees, so that no later owner
meets another's contents, or a NaN among them.

Sharp edges: outside `jit` writing copies the whole store; a loop of steps belongs into
`jax.jit(step, donate_argnums=...)`, which writes in place. Under `jit` nothing can be
raised: what does not fit is left undone and `overflow` becomes True.

References:
    Kwon et al., "Efficient memory management for large language model serving with
    PagedAttention", 2023.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pliax.core.typing import Leaf

from .arguments import close_mask_mod, close_score_mod
from .block_lists import all_lists
from .block_mask import BlockMask
from .paging_arguments import (
    check_mask,
    check_tokens,
    index_array,
    known_true,
    positive_sizes,
    refuse_assign,
    refuse_reserve,
    refuse_unknown,
)
from .tiles import softmax_dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """Keys and values of B sequences in pages, and whose page is which.

    A pytree made by `PagedCache.create`. To drop the last tokens of a sequence, as
    speculative decoding does, replace `lengths`; to lower the flag, `overflow`.

    Attributes:
        keys: The store, (1, pages * page_size, K, D).
        values: Likewise, (1, pages * page_size, K, V).
        page_table: Page of each logical page of a sequence, int32 (B, max_pages), in
            front those reserved, then -1.
        physical_to_logical: Its inverse: which logical page of the sequence a page is,
            int32 (B, pages); -1 where it is none of it.
        lengths: Tokens of each sequence, int32 (B,): one more than the last position
            assigned. Keys beyond are invisible.
        overflow: Whether a call under `jit` found no page for something; bool scalar.
        page_size: Tokens of a page.

    Examples:
        >>> import jax, jax.numpy as jnp, pliax as px
        >>> from pliax.kernels import paging
        >>> cache = paging.PagedCache.create(2, 8, 4, key_heads=1, head_dimension=4)
        >>> sequences, t = jnp.arange(2), jnp.tile(jnp.arange(6), (2, 1))
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 6, 1, 4))
        >>> cache = paging.reserve(cache, sequences, 6)
        >>> cache = paging.assign(cache, sequences, t, k, v)
        >>> offset = cache.lengths - 1  # of the newest token, which asks
        >>> def causal(b, h, q_idx, kv_idx):
        ...     return offset[b] + q_idx >= kv_idx
        >>> mask = px.create_block_mask(causal, 2, None, 1, 8, block_size=(1, 4))
        >>> mask = paging.convert_block_mask(cache, mask)
        >>> newest = q[:, -1:]
        >>> out = px.flex_attention(newest, cache.keys, cache.values, block_mask=mask)
        >>> bool(jnp.allclose(out, px.flex_attention(newest, k, v), atol=1e-6))
        True
    """

    keys: Leaf
    values: Leaf
    page_table: Leaf
    physical_to_logical: Leaf
    lengths: Leaf
    overflow: Leaf
    page_size: int = field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        batch: Any,
        pages: Any,
        page_size: Any,
        key_heads: Any,
        head_dimension: Any,
        *,
        value_dimension: Any = None,
        max_pages: Any = None,
        dtype: Any = jnp.float32,
    ) -> "PagedCache":
        """An empty cache: every page free, every row zero.

        Args:
            batch: Sequences held at once, B.
            pages: Pages of the store, which all sequences share.
            page_size: Tokens of a page; the key block size of masks for this cache.
            key_heads: Heads of keys and values, K.
            head_dimension: Dimension of a key, D.
            value_dimension: Dimension of a value, V; D if None.
            max_pages: Pages one sequence may have; None lets one have all of them. The
                table and the conversion of masks cost memory in proportion.
            dtype: Of keys and values.

        Raises:
            ValueError: If a size is not positive, or max_pages exceeds pages.
            TypeError: If a size is no integer, or the dtype not floating.
        """
        B, P, N, K, D, V, L = positive_sizes(
            batch=batch,
            pages=pages,
            page_size=page_size,
            key_heads=key_heads,
            head_dimension=head_dimension,
            value_dimension=head_dimension
            if value_dimension is None
            else value_dimension,
            max_pages=pages if max_pages is None else max_pages,
        )
        if L > P:
            raise ValueError(
                f"PagedCache.create: max_pages is {L}, but the store has {P} pages.\n"
                f"Pass max_pages={P} or less, or more pages."
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"PagedCache.create: dtype must be floating, found {jnp.dtype(dtype)}."
                "\nPass the dtype of the keys, for example jnp.bfloat16."
            )
        return cls(
            keys=jnp.zeros((1, P * N, K, D), dtype),
            values=jnp.zeros((1, P * N, K, V), dtype),
            page_table=jnp.full((B, L), -1, jnp.int32),
            physical_to_logical=jnp.full((B, P), -1, jnp.int32),
            lengths=jnp.zeros(B, jnp.int32),
            overflow=jnp.zeros((), bool),
            page_size=N,
        )

    @property
    def capacity(self) -> Int[Array, " B"]:
        """Tokens each sequence has reserved room for."""
        held = jnp.sum(self.page_table >= 0, axis=1, dtype=jnp.int32)
        return held * self.page_size

    @property
    def free(self) -> Bool[Array, " pages"]:
        """Which pages belong to no sequence."""
        return jnp.all(self.physical_to_logical < 0, axis=0)


def reserve(cache: PagedCache, sequence: Any, length: Any) -> PagedCache:
    """Make sure that a sequence has room for `length` tokens in total.

    Args:
        cache: The cache, unchanged.
        sequence: Index of the sequence, or several, (n,); may be traced.
        length: Tokens it must have room for, those it holds included; one for all, or
            (n,). Room is never given back by a smaller length: `erase` frees.

    Returns:
        The cache with more pages in its table. Under `jit` a sequence for which too few
        pages are free gets none of them, and `overflow` becomes True; of several the
        first are served, by index.

    Raises:
        ValueError: Outside `jit`, if too few pages are free, or max_pages or the batch
            is exceeded; the message counts.
        TypeError: If sequence or length are not integers.
    """
    sequence = index_array("reserve", "sequence", sequence, (0, 1)).reshape(-1)
    length = index_array("reserve", "length", length, (0, 1))
    if length.ndim and length.shape != sequence.shape:
        raise ValueError(
            f"reserve: {sequence.size} sequences but {length.size} lengths.\n"
            "Pass one length for each sequence, or one for all."
        )
    length = jnp.broadcast_to(length, sequence.shape)
    after, failed = _allocate(_tables(cache), sequence, length)
    if known_true(failed):
        refuse_reserve(cache, sequence, length)
    return replace(after, keys=cache.keys, values=cache.values)


def assign(
    cache: PagedCache, sequence: Any, positions: Any, keys: Any, values: Any
) -> PagedCache:
    """Write tokens at logical positions of sequences.

    Differentiable in keys and values. Positions of one call must be distinct: of two
    tokens for one place either may be kept.

    Args:
        cache: The cache, unchanged; donate it under `jit` to write in place.
        sequence: Indices of the sequences, (n,), or one.
        positions: Positions within each sequence, (n, t), or (t,) for one sequence. A
            negative position marks padding, which is written nowhere.
        keys: (n, t, K, D), or (t, K, D), in the dtype of the cache.
        values: (n, t, K, V), or (t, K, V).

    Returns:
        The cache with the tokens, and lengths that reach them. Under `jit` tokens at
        positions that were not reserved are dropped, and `overflow` becomes True.

    Raises:
        ValueError: If shapes do not fit; outside `jit`, if a position is not reserved.
        TypeError: If indices are not integers, or dtypes differ from the cache's.
    """
    sequence = index_array("assign", "sequence", sequence, (0, 1))
    positions = index_array("assign", "positions", positions, (sequence.ndim + 1,))
    keys, values = jnp.asarray(keys), jnp.asarray(values)
    check_tokens("keys", keys, cache.keys, sequence, positions)
    check_tokens("values", values, cache.values, sequence, positions)
    if sequence.ndim == 0:
        sequence, positions, keys, values = (
            x[None] for x in (sequence, positions, keys, values)
        )
    after, rows, failed = _locate(_tables(cache), sequence, positions)
    if known_true(failed):
        refuse_assign(cache, sequence, positions)
    keys, values = _write(cache.keys, rows, keys), _write(cache.values, rows, values)
    return replace(after, keys=keys, values=values)


def erase(cache: PagedCache, sequence: Any) -> PagedCache:
    """Free the pages of a sequence and clear them.

    Args:
        cache: The cache, unchanged.
        sequence: Index of the sequence, or several, (n,); may be traced.

    Returns:
        The cache without the sequence: length 0, no pages, their rows zero.

    Raises:
        ValueError: Outside `jit`, if there is no such sequence.
        TypeError: If sequence is not an integer.
    """
    sequence = index_array("erase", "sequence", sequence, (0, 1)).reshape(-1)
    after, pages, failed = _release(_tables(cache), sequence)
    if known_true(failed):
        refuse_unknown("erase", cache, sequence)
    keys, values = (
        _clear(x, pages, cache.page_size) for x in (cache.keys, cache.values)
    )
    return replace(after, keys=keys, values=values)


def convert_mask_mod(
    cache: PagedCache, mask_mod: Any, *, sequences: Any = None, kv_len: Any = None
) -> Callable[..., Any]:
    """A mask_mod on logical positions as one on the rows of the store.

    Args:
        cache: Whose page is which.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool` on logical key positions; None leaves
            every key visible.
        sequences: Which sequence each batch index of the query is, (n,); None if they
            are the sequences of the cache in order. An index outside the cache is an
            idle place, which sees nothing. The mod gets the query's batch index.
        kv_len: Logical length the mod was written for; None if any.

    Returns:
        `(b, h, q_idx, row) -> bool`. A row that is not a token of the sequence is
        invisible, and the mod is asked about position 0 instead.
    """
    closed = None if mask_mod is None else close_mask_mod(mask_mod)
    position_of = _positions("convert_mask_mod", cache, sequences, kv_len)

    def on_rows(b: Any, h: Any, q_idx: Any, row: Any) -> Any:
        position, present = position_of(b, row)
        return present if closed is None else present & closed(b, h, q_idx, position)

    return on_rows


def convert_score_mod(
    cache: PagedCache, score_mod: Any, *, sequences: Any = None, kv_len: Any = None
) -> Callable[..., Any]:
    """A score_mod on logical positions as one on the rows of the store.

    Args:
        cache: Whose page is which.
        score_mod: `(score, b, h, q_idx, kv_idx) -> score` on logical key positions;
            None leaves scores as they are. Floating arrays it captures get gradients.
        sequences: As in `convert_mask_mod`.
        kv_len: As in `convert_mask_mod`.

    Returns:
        `(score, b, h, q_idx, row) -> score`: -inf where the row is not a token of the
        sequence.
    """
    closed = close_score_mod(score_mod, softmax_dtype(cache.keys.dtype))
    position_of = _positions("convert_score_mod", cache, sequences, kv_len)

    def on_rows(score: Any, b: Any, h: Any, q_idx: Any, row: Any) -> Any:
        position, present = position_of(b, row)
        if closed is not None:
            score = closed(score, b, h, q_idx, position)
        return jnp.where(present, score, -jnp.inf)

    return on_rows


def convert_block_mask(
    cache: PagedCache, block_mask: Any, *, sequences: Any = None
) -> BlockMask:
    """A block mask on logical positions as one on the rows of the store.

    Each listed block becomes the page that holds it. A full block stays full where
    every row of its page is a token; pages without a token are not listed. Nothing is
    read on the host, and nothing compiles again when the cache fills.

    Args:
        cache: Whose page is which.
        block_mask: For the queries at hand and the logical keys of one sequence, made
            with `block_size=(..., page_size)`. With a batch of 1 it holds for all
            sequences, and then its mod must not read b.
        sequences: Which sequence each batch index of the query is, (n,); None if they
            are the sequences of the cache in order. An index outside the cache is an
            idle place, which sees nothing.

    Returns:
        The mask of n sequences for `cache.keys` and `cache.values`.

    Raises:
        ValueError: If block size, batch or mask_mod do not fit the cache.
        TypeError: If block_mask is no BlockMask, or sequences are not integers.
    """
    batch = len(cache.page_table)
    if sequences is None:
        sequences = np.arange(batch, dtype=np.int32)
    sequences = index_array("convert_block_mask", "sequences", sequences, (1,))
    check_mask(cache, block_mask, len(sequences))
    queries, keys = block_mask.seq_lengths
    mask_mod = convert_mask_mod(
        cache, block_mask.visible, sequences=sequences, kv_len=keys
    )
    lists = (
        (block_mask.kv_num_blocks, block_mask.kv_indices),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    )
    rows = cache.keys.shape[1]
    return replace(
        block_mask,
        **_physical_lists(_tables(cache), sequences, lists),
        mask_mod=close_mask_mod(mask_mod),
        seq_lengths=(queries, rows),
    )


# --- tables ---------------------------------------------------------------------------


def _tables(cache: PagedCache) -> PagedCache:
    """The cache without its store: integers alone, concrete outside `jit`."""
    return replace(cache, keys=None, values=None)


@jax.jit
def _allocate(
    tables: PagedCache, sequence: Int[Array, " n"], length: Int[Array, " n"]
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Tables with the pages wanted, and whether something was left undone."""
    table, inverse = tables.page_table, tables.physical_to_logical
    (batch, slots), pages = table.shape, inverse.shape[1]
    target, known = _known(tables, sequence)
    wanted = jnp.zeros(batch, jnp.int32).at[target].max(length, mode="drop")
    held = tables.capacity // tables.page_size
    needed = jnp.maximum(-(-wanted // tables.page_size) - held, 0)
    fits = held + needed <= slots
    taken = jnp.cumsum(jnp.where(fits, needed, 0), dtype=jnp.int32)
    free = jnp.sum(tables.free, dtype=jnp.int32)
    granted = (needed == 0) | (fits & (taken <= free))
    needed = jnp.where(granted, needed, 0)

    first = jnp.cumsum(needed, dtype=jnp.int32) - needed
    slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), table.shape)
    rank = slot - held[:, None]
    new = (rank >= 0) & (rank < needed[:, None])
    order = jnp.argsort(~tables.free, stable=True).astype(jnp.int32)
    page = order[jnp.clip(first[:, None] + rank, 0, pages - 1)]
    owner = jnp.arange(batch, dtype=jnp.int32)[:, None]
    inverse = inverse.at[owner, jnp.where(new, page, pages)].set(slot, mode="drop")
    failed = jnp.any(~known) | jnp.any(~granted)
    return replace(
        tables,
        page_table=jnp.where(new, page, table),
        physical_to_logical=inverse,
        overflow=tables.overflow | failed,
    ), failed


@jax.jit
def _locate(
    tables: PagedCache, sequence: Int[Array, " n"], positions: Int[Array, "n t"]
) -> tuple[PagedCache, Int[Array, "n t"], Bool[Array, ""]]:
    """Tables with new lengths, the row of each token, and whether a token has none.

    A token that is not written gets a row no store has.
    """
    size = tables.page_size
    owned, capacity = (_take(x, sequence) for x in (tables.page_table, tables.capacity))
    inside = (positions >= 0) & (positions < capacity[:, None])
    page = jnp.take_along_axis(owned, positions // size, axis=1, mode="clip")
    rows = jnp.where(inside, page * size + positions % size, jnp.iinfo(jnp.int32).max)
    reached = jnp.max(jnp.where(inside, positions + 1, 0), axis=1, initial=0)
    lengths = tables.lengths.at[_known(tables, sequence)[0]].max(reached, mode="drop")
    failed = jnp.any((positions >= 0) & ~inside)
    overflow = tables.overflow | failed
    return replace(tables, lengths=lengths, overflow=overflow), rows, failed


@jax.jit
def _release(
    tables: PagedCache, sequence: Int[Array, " n"]
) -> tuple[PagedCache, Int[Array, "n L"], Bool[Array, ""]]:
    """Tables without the sequences, and the pages these had."""
    target, known = _known(tables, sequence)
    gone = jnp.zeros(tables.lengths.shape, bool).at[target].set(True, mode="drop")
    free = gone[:, None]
    after = replace(
        tables,
        page_table=jnp.where(free, -1, tables.page_table),
        physical_to_logical=jnp.where(free, -1, tables.physical_to_logical),
        lengths=jnp.where(gone, 0, tables.lengths),
        overflow=tables.overflow | jnp.any(~known),
    )
    return after, _take(tables.page_table, sequence), jnp.any(~known)


def _known(tables: PagedCache, sequence: Array) -> tuple[Array, Array]:
    """Where to write for each sequence: nowhere for one that does not exist."""
    batch = len(tables.lengths)
    known = (sequence >= 0) & (sequence < batch)
    return jnp.where(known, sequence, batch), known


def _take(x: Array, sequences: Array) -> Array:
    """Entries of the first axis; -1 for one that does not exist."""
    taken = x.at[sequences]
    return taken.get(mode="fill", fill_value=-1, wrap_negative_indices=False)


def _positions(
    where: str, cache: PagedCache, sequences: Any, kv_len: Any
) -> Callable[..., Any]:
    """(b, row) to the logical position there, and whether b has a token there."""
    size, inverse, end = cache.page_size, cache.physical_to_logical, cache.lengths
    last = cache.page_table.shape[1] - 1
    if sequences is not None:
        sequences = index_array(where, "sequences", sequences, (1,))
        inverse, end = _take(inverse, sequences), _take(end, sequences)
    if kv_len is not None:
        end = jnp.minimum(end, kv_len)

    def position_of(b: Any, row: Any) -> tuple[Any, Any]:
        page = jax.lax.div(jnp.asarray(row), size)
        slot = jnp.clip(inverse[b, page], -1, last)  # as kernels are to know
        position = row + (slot - page) * size
        present = (slot >= 0) & (position < end[b])
        return jnp.where(present, position, 0), present

    return position_of


# --- the store ------------------------------------------------------------------------


@jax.jit
def _write(store: Array, rows: Array, tokens: Array) -> Array:
    return store.at[0, rows].set(tokens, mode="drop")


@jax.jit(static_argnums=2)
def _clear(store: Array, pages: Array, page_size: int) -> Array:
    """Zero in every row of the pages; -1 is none."""
    paged = store.reshape(-1, page_size, *store.shape[2:])
    pages = jnp.where(pages >= 0, pages, len(paged))
    zero = jnp.zeros((), store.dtype)
    return paged.at[pages].set(zero, mode="drop").reshape(store.shape)


# --- block lists ----------------------------------------------------------------------


@jax.jit
def _physical_lists(
    tables: PagedCache, sequences: Int[Array, " n"], lists: Any
) -> dict[str, Array]:
    """Partial and full pages of every row of queries, and the transposes of both."""
    size, pages = tables.page_size, tables.physical_to_logical.shape[1]
    owned = _take(tables.page_table, sequences)[:, None, None]
    end = _take(tables.lengths, sequences)[:, None, None, None]
    partly, full = (_listed(len(sequences), *pair) for pair in lists)
    whole = (full + 1) * size <= end
    # The others of the full blocks end inside their page: there the mask is needed.
    partly = jnp.concatenate([partly, jnp.where(whole, -1, full)], axis=-1)
    partly = jnp.where(partly * size < end, partly, -1)
    full = jnp.where(whole, full, -1)

    @partial(jnp.vectorize, signature="(l),(c)->(p)")
    def on_pages(owned: Array, blocks: Array) -> Array:
        page = _take(owned, blocks)
        target = jnp.where(page >= 0, page, pages)
        return jnp.zeros(pages, bool).at[target].set(True, mode="drop")

    lists = all_lists(*(on_pages(owned, blocks) for blocks in (partly, full)))
    kinds, parts = ("kv", "full_kv", "q", "full_q"), ("num_blocks", "indices")
    names = (f"{kind}_{part}" for kind, part in product(kinds, parts))
    return dict(zip(names, lists, strict=True))


def _listed(n: int, num: Array, indices: Array) -> Int[Array, "n H R C"]:
    """The blocks that lists name, for n sequences; -1 behind the last."""
    place = jnp.arange(indices.shape[-1], dtype=jnp.int32)[None, None, None]
    named = jnp.where(place < num[..., None], indices, -1)
    return jnp.broadcast_to(named, (n, *named.shape[1:]))
