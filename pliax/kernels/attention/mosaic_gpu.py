"""flex_attention on Hopper GPUs: a fused kernel of Pallas's Mosaic GPU, forward.

A thread block has the queries of a tile and visits the key blocks its mask
lists, full ones first, in which `mask_mod` is not asked. One warpgroup moves keys and
values into shared memory, ahead of the others, which each keep for 64 queries the
maximum m, the sum l and the unnormalised output in registers:

    s = score_mod(scale q k),  m' = max(m, s),  p = exp(s - m')
    l = l exp(m - m') + sum(p),  o = o exp(m - m') + p v

Two warpgroups take turns: while one computes its softmax the tensor cores work for the
other. Where registers have room the sums wait until a maximum has grown by much
(`mosaic_gpu_softmax`). Without a mod the scale is part of the exponent. Of a key that
the mask hides the weight is 0, and 0 times NaN is not: if a mask may leave a key to
nobody, and the output is not finite, a thread block starts again, and adds the values
of partial blocks one by one where they are seen.

Where there are more tiles than multiprocessors a thread block takes one after another.
A counter in global memory says which nobody has, the warpgroup that moves asks it and
tells the others through shared memory: keys, values and queries of the next tile are on
their way while the output of this one is written. On one H100 that, with what mods know
of keys beside the keys, is 1.13 to 1.3 times as fast for packed documents, 1.09 to 1.14
for windows, and 0.98 (causal, 16,384 tokens of 64 channels) to 1.08 for all others.

Of few queries (`parts`) the list of a thread block is cut into parts, which different
ones take, and their warpgroups share the rows: visit i is that of warpgroup i mod 2,
and the first joins what they have found. Each thread block leaves its sums in float32,
to be merged.

References:
    Dao, "FlashAttention-2", 2023, Algorithm 1.
    Shah et al., "FlashAttention-3", 2024, section 3.1 (warpgroups that take turns).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pliax.kernels._hopper import MULTIPROCESSORS, shared_memory

from .block_lists import BlockLists, TellingLists
from .block_mask import BlockMask
from .configs import (
    Config,
    Kernel,
    decoding_config,
    decoding_room,
    splits as splits_of,
)
from .diagonals import sees_itself
from .mosaic_gpu_columns import Columns, columns_of
from .mosaic_gpu_forward import Scratch, ThreadBlock
from .mosaic_gpu_grid import Grid
from .mosaic_gpu_next_tiles import NextTiles
from .mosaic_gpu_tiles import (
    Operands,
    Verdict,
    as_lists,
    i32,
    operands,
    run_kernel,
)
from .mosaic_gpu_visits import reach
from .refinement import for_queries, halves_of
from .row_statistics import filled, heads_first, is_linear
from .separation import MASK_MOD, SCORE_MOD


NOTHING: Mapping[str, int] = MappingProxyType({})
CHANNELS = 64  # of a row in shared memory: 128 bytes, the widest swizzle
ALIGNED = 8  # rows TMA moves together
MANY = 32  # visits: for 16 queries of one sequence, 16 visits, another loop takes 1.02


@dataclass(frozen=True)
class Call:
    """What is static in a call.

    Attributes:
        scale: Factor of the products.
        sizes: Sequences, query heads, queries and keys, by "bhqk".
        key_heads: How many.
        shares_keys: Whether all sequences have the same keys and values.
        blocks: Queries and keys of a mask's block; None without a mask.
        lists_tell: Whether the mask's lists tell which of its conditions all scores of
            a block meet (`refinement`).
        has_unseen: Whether a key may be seen by nobody, and a query may see nothing:
            they may hold anything.
        interpret: Whether JAX's interpreter runs the kernels.
        asked: Sizes of blocks that the user asks for, named by `configs.OPTIONS`.
    """

    scale: float
    sizes: dict[str, int]
    key_heads: int
    shares_keys: bool
    blocks: tuple[int, int] | None
    lists_tell: bool
    has_unseen: bool
    interpret: bool
    asked: Mapping[str, int] = field(default_factory=dict)

    def place_of_keys(self, b: Any, h: Any) -> tuple[Any, Any]:
        """Sequence and head of the keys that a query head sees."""
        group = self.sizes["h"] // self.key_heads
        return (i32(0) if self.shares_keys else b), lax.div(h, i32(group))


def call_of(
    arrays: Any,
    block_mask: BlockMask | None,
    *,
    scale: float,
    interpret: bool = False,
    asked: Mapping[str, int] = NOTHING,
) -> Call:
    """What is static in a call with these arrays, as said at `Call`."""
    (B, T, H, _), (batch, S, K, _) = (x.shape for x in arrays[:2])
    blocks = None if block_mask is None else block_mask.block_size
    sizes = {"b": B, "h": H, "q": T, "k": S}
    has_unseen = block_mask is not None and not sees_itself(block_mask)
    shares_keys, told = batch < B, False
    return Call(
        scale, sizes, K, shares_keys, blocks, told, has_unseen, interpret, asked
    )


def aligned(x: Float[Array, "B S H D"]) -> Float[Array, "B S2 H D2"]:
    """Filled with zeros up to what TMA moves; the kernels hide those rows."""
    return filled(filled(x, 3, CHANNELS), 1, ALIGNED)


def forward(
    arrays: Any, score_mod: Any, block_mask: BlockMask | None, **static: Any
) -> tuple[Array, Array, Array, Array]:
    """Output, log-sum-exp, maximum and logarithm of the sum, as a `Kernel` gives.

    What else is static is said at `call_of`.
    """
    out, *statistics = _whole_rows(arrays, score_mod, block_mask, **static)
    maximum, log_sum = (heads_first(x)[:, : out.shape[1]] for x in statistics)
    return out, maximum + log_sum, maximum, log_sum


def inference(
    arrays: Any, score_mod: Any, block_mask: BlockMask | None, **static: Any
) -> tuple[Array, Array, Array]:
    """Output, log-sum-exp and maximum, which the kernel writes where users want them.

    XLA would turn them in a kernel of its own, 2.5 and 3.7 us beside 66 and 101 for
    packed documents (4,096 tokens of 64 and 128 channels, one H200). Who asks for
    nothing waits longer for this than for the other layout, 1 percent.
    """
    given = arrays, score_mod, block_mask
    out, lse, maximum = _whole_rows(*given, is_inference=True, **static)
    T = out.shape[1]
    return out, lse[:, :T], maximum[:, :T]


def _whole_rows(
    arrays: Any,
    score_mod: Any,
    block_mask: BlockMask | None,
    *,
    is_inference: bool = False,
    asked: Mapping[str, int] = NOTHING,
    **static: Any,
) -> tuple[Array, Array, Array]:
    """Output and the statistics that the kernel writes, of whole tiles."""
    query, key, value = map(aligned, arrays)
    channels = key.shape[3], value.shape[3]
    lists = None if block_mask is None else block_mask.lists(transposed=False)
    call = call_of(arrays, block_mask, asked=asked, **static)
    halves = halves_of(block_mask, asked)
    if halves is not None:
        sizes, lists = for_queries(halves, is_wide=max(channels) > 2 * CHANNELS)
        call = replace(call, blocks=sizes, lists_tell=True)
    kind = Kernel("forward", channels, call.blocks, are_told=call.lists_tell)
    config = kind.config(call.asked)
    workers, room = _workers(call, config, channels, kind.room(config))
    how = {"workers": workers, "is_inference": is_inference}
    run = _kernel(call, config, score_mod, block_mask, lists, room, **how)
    out, *statistics = run(query, key, value)
    return out[:, : call.sizes["q"], :, : arrays[2].shape[3]], *statistics


def _workers(
    call: Call, config: Config, channels: tuple[int, int], room: int
) -> tuple[int | None, int]:
    """Thread blocks that take one tile after another, or None, and the room left.

    Where a key may be seen by nobody each has one tile: it may have to start again, and
    by then the queries of the next would be in the place of its own. Queries arrive
    while the output leaves, which then do not share their memory.
    """
    D, V = channels
    apart = config.span * V * 2 if D == V else 0
    if call.has_unseen or not config.has_mover or apart > room:
        return None, room
    return MULTIPROCESSORS, room - apart


def parts(
    arrays: Any,
    score_mod: Any,
    block_mask: BlockMask | None,
    *,
    scale: float,
    interpret: bool = False,
    splits: int | None = None,
) -> tuple[Float[Array, "P B H R V"], Float[Array, "P B H S"], Float[Array, "P B H S"]]:
    """Sums over parts of the keys, to be merged: output, maximum and sum of weights.

    Rows are filled up as tiles want it, R of outputs and S of the other two; what is
    behind the last query means nothing. Channels are filled up to whole 64.

    Args:
        arrays: Queries by head, (B, H, T, D), and keys and values, (B, S, H, D).
        score_mod: Score modification or None.
        block_mask: Its rows of blocks must be made of whole tiles, or be one.
        scale: Factor of the products.
        interpret: Whether JAX's interpreter runs the kernel.
        splits: Thread blocks that share the keys; None for as many as are busy.
    """
    (B, H, T, D), key, value = arrays[0].shape, *map(aligned, arrays[1:])
    by_length = jax.ShapeDtypeStruct((B, T, H, D), key.dtype)
    given = by_length, *arrays[1:]
    call = call_of(given, block_mask, scale=scale, interpret=interpret)
    query = filled(filled(arrays[0], 3, CHANNELS), 2, ALIGNED)
    channels = key.shape[3], value.shape[3]
    config = decoding_config(T, channels, call.blocks)
    room = decoding_room(config, channels)
    if splits is None:
        blocks = B * H * -(-T // config.span)
        splits = splits_of(blocks, -(-key.shape[1] // config.columns))
    lists = None if block_mask is None else block_mask.lists(transposed=False)
    run = _kernel(call, config, score_mod, block_mask, lists, room, splits=splits)
    out, maximum, total = (
        x.reshape(-1, B, *x.shape[1:]) for x in run(query, key, value)
    )
    return out, maximum, total


def _kernel(
    call: Call,
    config: Config,
    score_mod: Any,
    block_mask: BlockMask | None,
    lists: BlockLists | TellingLists | None,
    room: int,
    *,
    splits: int | None = None,
    workers: int | None = None,
    is_inference: bool = False,
) -> Callable[[Array, Array, Array], Any]:
    """The kernel of a call, with the arrays of its mods and its mask.

    Args:
        call: What is static in the call.
        config: How the kernel is cut into pieces.
        score_mod: The mod, or None.
        block_mask: The mask, or None.
        lists: Of the blocks it is visited in.
        room: Bytes of shared memory that are left.
        splits: Parts of the keys, for sums over them.
        workers: Thread blocks that take one tile after another.
        is_inference: Whether it writes log-sum-exp and maximum for users.
    """
    blocks = {"q": config.span, "k": reach(config, call.blocks)}
    score, mask = mods_of(call, score_mod, block_mask, blocks, config.columns)
    has_lists = lists is not None
    kernel = _Forward(
        call, config, score, mask, has_lists, room, splits, workers, is_inference
    )
    return lambda query, key, value: kernel(query, key, value, as_lists(lists))


def mods_of(
    call: Call,
    score_mod: Any,
    block_mask: BlockMask | None,
    blocks: dict[str, int],
    keys: int = 0,
) -> tuple[Operands | None, Operands | None]:
    """The mods of a call, with the arrays a kernel is given for them."""
    score = mask = None
    if score_mod is not None:
        score = operands(score_mod, SCORE_MOD, call.sizes, blocks, keys=keys)
    if block_mask is not None:
        given = block_mask.mask_mod, MASK_MOD, call.sizes, blocks
        mask = operands(*given, apart=call.lists_tell, keys=keys)
    return score, mask


@dataclass(frozen=True)
class _Forward:
    """The kernel: results of whole rows, or, with `splits`, sums over parts of keys.

    Of whole rows queries and outputs are (B, T, H, ...), of parts by head: the rows of
    a head lie together, as they came where there is one query.

    Attributes:
        call: What is static in the call.
        config: How it is cut into pieces.
        score: `score_mod`.
        mask: `mask_mod`.
        has_lists: Whether there is a mask.
        room: Bytes of shared memory that are left for what mods know of keys.
        splits: Parts of the keys; None for whole rows.
        workers: Thread blocks that take one tile of whole rows after another, if there
            are more tiles; None where each has one.
        is_inference: Whether the statistics are log-sum-exp and maximum by query, (B,
            T, H), from registers; else maximum and logarithm of the sum, or the sum of
            a part, by head, (B, H, T), through shared memory.
    """

    call: Call
    config: Config
    score: Operands | None
    mask: Operands | None
    has_lists: bool
    room: int
    splits: int | None = None
    workers: int | None = None
    is_inference: bool = False

    def __call__(self, query: Array, key: Array, value: Array, lists: Any) -> Any:
        arrays = (query, key, value), tuple(lists), *(x.arrays for x in self.mods)
        leaves, tree = jax.tree.flatten(arrays)
        results = self.results(query, value)

        def body(refs: Any, scratch: Any) -> None:
            arrays = jax.tree.unflatten(tree, refs[: len(leaves)])
            counter = () if self.is_persistent else (None,)
            shared = Scratch(*scratch[0], *scratch[1:], *counter)
            ThreadBlock(self, arrays, refs[len(leaves) :], shared).run()

        return run_kernel(
            body,
            self.scratch(query.dtype, results[0].dtype, query.shape[3], value.shape[3]),
            self.grid,
            self.config,
            self.call.interpret,
            counters=(1,) if self.is_persistent else None,
            out_type=results,
            has_own_barriers=not self.config.has_mover,
        )(*leaves)

    def results(self, query: Array, value: Array) -> list[jax.ShapeDtypeStruct]:
        """Outputs and two statistics, of rows or of parts of them."""
        B, H = self.call.sizes["b"], self.call.sizes["h"]
        rows = self.tiles * self.config.span  # a tile's are copied without limits
        copies = B if self.splits is None else self.splits * B
        by_row = (copies, rows, H) if self.is_inference else (copies, H, rows)
        dtype = query.dtype if self.splits is None else jnp.dtype(jnp.float32)
        shape = copies, *query.shape[1:3], value.shape[3]
        statistic = jax.ShapeDtypeStruct(by_row, jnp.float32)
        return [jax.ShapeDtypeStruct(shape, dtype), statistic, statistic]

    def scratch(self, dtype: Any, out: Any, D: int, V: int) -> tuple[Any, ...]:
        """What the fields of `Scratch` are, but for the counter.

        Args:
            dtype: Of queries, keys and values.
            out: The dtype of outputs.
            D: Channels of queries and keys.
            V: Channels of values.
        """
        config, smem = self.config, partial(shared_memory, dtype)
        barriers = partial(plgpu.Barrier, num_barriers=config.stages)
        free = barriers(num_arrivals=config.groups // config.takers)
        # A warpgroup's output takes the place of its queries where it is as wide.
        times = out.itemsize // dtype.itemsize if V == D else 1
        tiles_of_groups = (
            smem(config.groups, times, config.rows, D),
            shared_memory(out, config.groups, config.rows, V),
        )
        return (
            plgpu.RefUnion(*tiles_of_groups)
            if V == D and not self.is_persistent
            else tiles_of_groups,
            smem(config.stages, config.columns, D),
            smem(config.stages, config.columns, V),
            self.columns.scratch(),
            ()
            if self.is_inference
            else plgpu.SMEM((2, config.groups, config.rows), jnp.float32),
            plgpu.Barrier(num_barriers=config.groups),
            (barriers(num_arrivals=1 + len(self.columns.places)), barriers())
            if not config.loads_together
            else (barriers(num_arrivals=2),),
            (free, free),
            plgpu.Barrier(num_arrivals=config.groups),
            Verdict.scratch(config, interpret=self.call.interpret)
            if self.call.has_unseen
            else (),
            NextTiles.scratch(config.groups, ahead=2, counted=2)
            if self.is_persistent
            else (),
        )

    @property
    def mods(self) -> list[Operands]:
        """Those that there are."""
        return [x for x in (self.score, self.mask) if x is not None]

    @property
    def columns(self) -> Columns:
        """What mods know of keys, which comes with them."""
        return columns_of((self.score, self.mask), "k", self.config, self.room)

    @property
    def tiles(self) -> int:
        """Of queries of a head."""
        return -(-self.call.sizes["q"] // self.config.span)

    @property
    def tiles_in_all(self) -> int:
        """Of all heads."""
        return self.tiles * self.call.sizes["b"] * self.call.sizes["h"]

    @property
    def is_persistent(self) -> bool:
        """Whether thread blocks take one tile after another."""
        return self.workers is not None and self.tiles_in_all > self.workers

    @property
    def tile_of_each(self) -> Grid:
        """Thread blocks that have one tile each."""
        B, H = self.call.sizes["b"], self.call.sizes["h"]
        return Grid(B, H, self.tiles, self.config.gathers_heads)

    @property
    def grid(self) -> dict[str, int]:
        """Thread blocks by name; those that start together read what lies together."""
        if self.workers is not None and self.is_persistent:
            return {"workers": self.workers}
        if self.splits is None:
            return self.tile_of_each.sizes
        B, H = self.call.sizes["b"], self.call.sizes["h"]
        return {"batch": B, "parts": self.splits, "heads": H, "tiles": self.tiles}

    @property
    def settles(self) -> bool:
        """Whether weights are asked for (`Softmax.settle` says why)."""
        if self.score is None:
            return False
        return self.splits is None or self.score.separated.is_costly

    @property
    def visits_many(self) -> bool:
        """Whether a tile may visit so many others that another loop is worth it."""
        length = -(-self.call.sizes["k"] // self.config.columns)
        is_long = length // (self.splits or 1) >= MANY
        return is_long and not self.config.shares_rows  # whose queries are few

    def rows(self, b: Any, h: Any, first: Any) -> tuple[Any, ...]:
        """Where a tile's rows of queries and outputs are."""
        rows = pl.ds(first, self.config.rows)
        return (b, rows, h) if self.splits is None else (b, h, rows)

    @property
    def is_linear(self) -> bool:
        """Whether the scale can be part of the exponent."""
        return is_linear(self.score, self.call.scale)
