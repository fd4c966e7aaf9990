"""Which blocks of a mask are empty, partial or full.

    mask_mod, lengths, block sizes  ->  (some, every) by block

Intervals decide most blocks of the usual masks without looking at a score; see
`intervals`. What they leave open is evaluated score by score, a fixed number of tiles
at a time, in a loop that runs as often as there are such tiles. Both give the same
blocks; a mask that intervals know nothing about costs T S evaluations and never T S
memory. All of it runs under `jit` without the host.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pliax.core.dataflow import is_literal
from pliax.core.jaxprs import ClosedFunction, Program
from pliax.core.manual_axes import vary, varying_axes

from .block_lists import MET_BITS
from .intervals import bounds
from .normalization import each_condition
from .tiles import broadcast


# Scores evaluated at once: 64 tiles of 128 x 128, 4 MiB for each int32 the mask needs.
_SCORES = 1 << 20


class _Pieces(NamedTuple):
    """How tiles are evaluated: `tiles` at a time, each in pieces of `shape`."""

    tiles: int
    shape: tuple[int, int]
    counts: tuple[int, int]


@jax.jit(static_argnums=(1, 2, 3, 4))
def classify(
    mask_mod: ClosedFunction,
    B: int,
    H: int,
    lengths: tuple[Any, Any],
    sizes: tuple[int, int],
) -> tuple[Bool[Array, "B H R C"], Bool[Array, "B H R C"]]:
    """Which blocks hold some visible score, and which hold no masked one.

    Args:
        mask_mod: The mask as data.
        B: Sequences of the batch.
        H: Query heads.
        lengths: Queries and keys; symbolic dimensions of `jax.export` too.
        sizes: Queries and keys of a block.

    Returns:
        (some, every) by block. A block that reaches beyond the end is never in `every`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pliax.core.jaxprs import close
        >>> index = jax.ShapeDtypeStruct((), jnp.int32)
        >>> causal = close(lambda b, h, q, k: q >= k, *(index,) * 4)
        >>> some, every = classify(causal, 1, 1, (4, 4), (2, 2))
        >>> some[0, 0].astype(int).tolist(), every[0, 0].astype(int).tolist()
        ([[1, 0], [1, 1]], [[0, 0], [1, 0]])
    """
    # One answer for all sequences (heads) where the mask does not ask which it is.
    groups = (B if mask_mod.reads(0) else 1, H if mask_mod.reads(1) else 1)
    certain, possible = decide(mask_mod, *groups, lengths, sizes)
    some, every = _look(mask_mod, certain, possible, lengths, sizes)
    whole = [_last(n, size) - _first(n, size) == size - 1
             for n, size in zip(lengths, sizes, strict=True)]  # fmt: skip
    every &= (whole[0][:, None] & whole[1][None, :])[None, None]
    shape = (B, H, *some.shape[2:])
    return jnp.broadcast_to(some, shape), jnp.broadcast_to(every, shape)


def decide(
    mask_mod: ClosedFunction,
    B: int,
    H: int,
    lengths: tuple[Any, Any],
    sizes: tuple[int, int],
) -> tuple[Bool[Array, "B H R C"], Bool[Array, "B H R C"]]:
    """What intervals prove: all scores of a block visible, and some possibly so.

    Args:
        mask_mod: The mask as data.
        B: Sequences of the batch.
        H: Query heads.
        lengths: Queries and keys.
        sizes: Queries and keys of a block.

    Returns:
        (certain, possible) by block, looking only at scores inside the lengths. Where
        they are equal the block is decided.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pliax.core.jaxprs import close
        >>> index = jax.ShapeDtypeStruct((), jnp.int32)
        >>> causal = close(lambda b, h, q, k: q >= k, *(index,) * 4)
        >>> certain, possible = decide(causal, 1, 1, (64, 64), (4, 4))
        >>> int((certain != possible).sum())
        16
    """
    ranges = [(_first(n, size), _last(n, size))
              for n, size in zip(lengths, sizes, strict=True)]  # fmt: skip
    b, h = jnp.arange(B, dtype=jnp.int32), jnp.arange(H, dtype=jnp.int32)
    over_columns = jax.vmap(partial(bounds, mask_mod), (None, None, None, 0))
    over_rows = jax.vmap(over_columns, (None, None, 0, None))
    over_heads = jax.vmap(over_rows, (None, 0, None, None))
    over_batch = jax.vmap(over_heads, (0, None, None, None))
    return over_batch(b, h, *ranges)


def _first(length: Any, size: int) -> Int[Array, " n"]:
    """First index of each block."""
    return jnp.arange(-(-length // size), dtype=jnp.int32) * size


def _last(length: Any, size: int) -> Int[Array, " n"]:
    """Last index of each block that is inside the length."""
    return jnp.minimum(_first(length, size) + (size - 1), length - 1)


# --- what intervals leave open --------------------------------------------------------


def _look(
    mask_mod: ClosedFunction,
    certain: Bool[Array, "B H R C"],
    possible: Bool[Array, "B H R C"],
    lengths: tuple[Any, Any],
    sizes: tuple[int, int],
) -> tuple[Bool[Array, "B H R C"], Bool[Array, "B H R C"]]:
    """Some and every for all blocks, the open ones by evaluating their tiles."""
    shape = certain.shape
    pieces = _pieces(mask_mod.program.jaxpr, shape, sizes)
    queue, count = _places((possible & ~certain).reshape(-1))
    tile = partial(_look_at_tile, mask_mod, lengths, sizes, pieces)
    mapped = tuple(0 if n != 1 else None for n in shape[:2])
    tiles = jax.vmap(tile, (*mapped, 0, 0))

    def step(i: Array, state: Any) -> Any:
        listed = i * pieces.tiles + jnp.arange(pieces.tiles, dtype=jnp.int32)
        place = jnp.where(listed < count, queue[listed], certain.size)
        indices = _unravel(place, shape)
        # An index that is always 0 stays unmapped: a row it selects is not copied.
        given = [
            x if m == 0 else x[0] * 0 for m, x in zip(mapped, indices, strict=False)
        ]
        found = tiles(*given, *indices[2:])
        pairs = zip(state, found, strict=True)
        return tuple(x.at[place].set(new, mode="drop") for x, new in pairs)

    axes = varying_axes(mask_mod.captured, certain, possible)
    start = vary((certain.reshape(-1), certain.reshape(-1)), axes)
    steps = (count + (pieces.tiles - 1)) // pieces.tiles
    some, every = jax.lax.fori_loop(jnp.zeros_like(steps), steps, step, start)
    return some.reshape(shape), every.reshape(shape)


@jax.jit(static_argnums=(1, 3, 4))
def look_at(
    mask_mod: ClosedFunction,
    flat: Program,
    places: tuple[Int[Array, " N"], ...],
    lengths: tuple[int, int],
    sizes: tuple[int, int],
) -> list[tuple[Bool[Array, " N"], Bool[Array, " N"]]]:
    """Some and every, as in `classify`, of the blocks at (b, h, row, column).

    First of the mask, then of each of its conditions (`normalization`) that lists have
    a bit for; `flat` is their program.
    """
    pieces = _pieces(mask_mod.program.jaxpr, places[0].shape, sizes)
    mods = mask_mod, *each_condition(flat.jaxpr, mask_mod.captured)[:MET_BITS]
    tiles = [partial(_look_at_tile, x, lengths, sizes, pieces) for x in mods]
    look = lambda at: [tile(*at) for tile in tiles]  # noqa: E731
    return jax.lax.map(look, places, batch_size=pieces.tiles)


def _look_at_tile(
    mask_mod: Callable[..., Any],
    lengths: tuple[Any, Any],
    sizes: tuple[int, int],
    pieces: _Pieces,
    b: Int[Array, ""],
    h: Int[Array, ""],
    r: Int[Array, ""],
    c: Int[Array, ""],
) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
    """Whether one block holds some visible score, and whether it holds no masked one.

    Places beyond a piece, a block or a length repeat the last score before them, which
    changes neither answer.
    """

    def positions(piece: Array, axis: int, block: Array) -> Array:
        n = pieces.shape[axis]
        inside = piece * n + jnp.arange(n, dtype=jnp.int32)
        inside = jnp.minimum(inside, sizes[axis] - 1)
        return jnp.minimum(block * sizes[axis] + inside, lengths[axis] - 1)

    def visible(i: Array) -> Array:
        q_idx = positions(i // pieces.counts[1], 0, r)
        kv_idx = positions(i % pieces.counts[1], 1, c)
        b_and_h = (x[None, None] for x in (b, h))
        return broadcast(mask_mod, 2, *b_and_h, q_idx[:, None], kv_idx[None, :])

    def step(i: Array, state: Any) -> Any:
        seen = visible(i)
        return state[0] | seen.any(), state[1] & seen.all()

    first = visible(jnp.int32(0))
    state = first.any(), first.all()
    return jax.lax.fori_loop(jnp.int32(1), jnp.int32(prod(pieces.counts)), step, state)


def _pieces(jaxpr: Any, shape: tuple[Any, ...], sizes: tuple[int, int]) -> _Pieces:
    """Pieces of tiles that make about `_SCORES` values of the mask's widest result."""
    scores = max(1, _SCORES // _width(jaxpr))
    columns = min(sizes[1], scores)
    rows = min(sizes[0], max(1, scores // columns))
    counts = (-(-sizes[0] // rows), -(-sizes[1] // columns))
    tiles = max(1, scores // (rows * columns))
    if all(isinstance(n, int) for n in shape):
        tiles = min(tiles, prod(shape))
    return _Pieces(tiles, (rows, columns), counts)


def _width(jaxpr: Any) -> int:
    """Elements of the largest value that varies with both query and key."""
    varies = {v: 1 << i for i, v in enumerate(jaxpr.invars[2:])}
    widest = 1
    for eqn in jaxpr.eqns:
        indices = 0
        for x in eqn.invars:
            indices |= 0 if is_literal(x) else varies.get(x, 0)
        varies.update((v, indices) for v in eqn.outvars)
        sizes = (v.aval.shape for v in eqn.outvars if indices == 3)
        static = (n for n in sizes if all(isinstance(d, int) for d in n))
        widest = max(widest, *map(prod, static), 1)
    return widest


def _places(wanted: Bool[Array, " n"]) -> tuple[Int[Array, " n"], Int[Array, ""]]:
    """Indices of the True elements, in front, and how many there are."""
    ends = jnp.cumsum(wanted, dtype=jnp.int32)
    size = wanted.shape[0]
    index = jnp.arange(size, dtype=jnp.int32)
    target = jnp.where(wanted, ends - 1, size)
    return jnp.zeros_like(index).at[target].set(index, mode="drop"), ends[-1]


def _unravel(place: Int[Array, " n"], shape: tuple[Any, ...]) -> tuple[Array, ...]:
    """Block indices of flat places; places beyond the end give some block inside."""
    indices = []
    for n in reversed(shape):
        indices.append(place % n)
        place = place // n
    return tuple(reversed(indices))
