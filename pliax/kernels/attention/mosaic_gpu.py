"""flex_attention on Hopper GPUs: a fused kernel of Pallas's Mosaic GPU, forward.

A thread block has the queries of a row of tiles and visits the key blocks its mask
lists, full ones first, in which `mask_mod` is not asked. One warpgroup moves keys and
values into shared memory, ahead of the others, which each keep for 64 queries the
maximum m, the sum l and the unnormalised output in registers:

    s = score_mod(scale q k),  m' = max(m, s),  p = exp(s - m')
    l = l exp(m - m') + sum(p),  o = o exp(m - m') + p v

Two warpgroups take turns: while one computes its softmax the tensor cores work for the
other. Without a mod the scale is part of the exponent. Of a key that the mask hides the
weight is 0, and 0 times NaN is not: if a mask may leave a key to nobody, and the output
is not finite, a thread block starts again, and adds the values of partial blocks one by
one where they are seen.

Of few queries (`parts`) the list of a thread block is cut into parts, which different
ones take, and their warpgroups share the rows: visit i is that of warpgroup i mod 2.
Each leaves its sums in float32, to be merged.

References:
    Dao, "FlashAttention-2", 2023, Algorithm 1.
    Shah et al., "FlashAttention-3", 2024, section 3.1 (warpgroups that take turns).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .block_mask import BlockMask
from .configs import Config, decoding_config, forward_config, splits as splits_of
from .diagonals import sees_itself
from .mosaic_gpu_tiles import (
    LOG2E,
    ModOnTile,
    Operands,
    Tile,
    Verdict,
    accumulate,
    add_seen,
    as_lists,
    filled,
    heads_first,
    i32,
    load_row,
    multiply,
    on_tile,
    operands,
    run_kernel,
    shared_memory,
    zeros,
)
from .mosaic_gpu_visits import Blocks, Visits, reach
from .separation import MASK_MOD, SCORE_MOD


CHANNELS = 64  # of a row in shared memory: 128 bytes, the widest swizzle
ALIGNED = 8  # rows TMA moves together


@dataclass(frozen=True)
class Call:
    """What is static in a call.

    Attributes:
        scale: Factor of the products.
        sizes: Sequences, query heads, queries and keys, by "bhqk".
        key_heads: How many.
        shares_keys: Whether all sequences have the same keys and values.
        blocks: Queries and keys of a mask's block; None without a mask.
        has_unseen: Whether a key may be seen by nobody, and a query may see nothing:
            they may hold anything.
        interpret: Whether JAX's interpreter runs the kernels.
    """

    scale: float
    sizes: dict[str, int]
    key_heads: int
    shares_keys: bool
    blocks: tuple[int, int] | None
    has_unseen: bool
    interpret: bool

    def place_of_keys(self, b: Any, h: Any) -> tuple[Any, Any]:
        """Sequence and head of the keys that a query head sees."""
        group = self.sizes["h"] // self.key_heads
        return (i32(0) if self.shares_keys else b), lax.div(h, i32(group))


def call_of(
    arrays: Any, block_mask: BlockMask | None, *, scale: float, interpret: bool
) -> Call:
    """What is static in a call with these arrays."""
    (B, T, H, _), (batch, S, K, _) = (x.shape for x in arrays[:2])
    blocks = None if block_mask is None else block_mask.block_size
    sizes = {"b": B, "h": H, "q": T, "k": S}
    has_unseen = block_mask is not None and not sees_itself(block_mask)
    return Call(scale, sizes, K, batch < B, blocks, has_unseen, interpret)


def aligned(x: Float[Array, "B S H D"]) -> Float[Array, "B S2 H D2"]:
    """Filled with zeros up to what TMA moves; the kernels hide those rows."""
    return filled(filled(x, 3, CHANNELS), 1, ALIGNED)


def forward(
    arrays: Any,
    score_mod: Any,
    block_mask: BlockMask | None,
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array]:
    """Output, log-sum-exp, maximum and logarithm of the sum, as a `Kernel` gives."""
    call = call_of(arrays, block_mask, scale=scale, interpret=interpret)
    query, key, value = map(aligned, arrays)
    config = forward_config(max(key.shape[3], value.shape[3]), call.blocks)
    run = _kernel(call, config, score_mod, block_mask)
    out, maximum, log_sum = run(query, key, value)
    T, V = call.sizes["q"], arrays[2].shape[3]
    maximum, log_sum = (heads_first(x)[:, :T] for x in (maximum, log_sum))
    return out[:, :T, :, :V], maximum + log_sum, maximum, log_sum


def parts(
    arrays: Any,
    score_mod: Any,
    block_mask: BlockMask | None,
    *,
    scale: float,
    interpret: bool = False,
    splits: int | None = None,
) -> tuple[Float[Array, "P B H T V"], Float[Array, "P B H T"], Float[Array, "P B H T"]]:
    """Sums over parts of the keys, for `merge`: output, maximum and sum of weights.

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
    config = decoding_config(T, (key.shape[3], value.shape[3]), call.blocks)
    if splits is None:
        blocks = B * H * -(-T // config.span)
        splits = splits_of(blocks, -(-key.shape[1] // config.columns))
    run = _kernel(call, config, score_mod, block_mask, splits)
    found = (x.reshape(-1, B, *x.shape[1:]) for x in run(query, key, value))
    out, maximum, total = (x[:, :, :, :T] for x in found)
    return out[..., : arrays[2].shape[3]], maximum, total


def _kernel(
    call: Call,
    config: Config,
    score_mod: Any,
    block_mask: BlockMask | None,
    splits: int | None = None,
) -> Callable[[Array, Array, Array], Any]:
    """The kernel of a call, with the arrays of its mods and its mask."""
    blocks = {"q": config.span, "k": reach(config, call.blocks)}
    score, mask = mods_of(call, score_mod, block_mask, blocks)
    lists = None if block_mask is None else block_mask.lists(transposed=False)
    kernel = _Forward(call, config, score, mask, block_mask is not None, splits)
    return lambda *arrays: kernel(*arrays, as_lists(lists))


def mods_of(
    call: Call, score_mod: Any, block_mask: BlockMask | None, blocks: dict[str, int]
) -> tuple[Operands | None, Operands | None]:
    """The mods of a call, with the arrays a kernel is given for them."""
    score = mask = None
    if score_mod is not None:
        score = operands(score_mod, SCORE_MOD, call.sizes, blocks)
    if block_mask is not None:
        mask = operands(block_mask.mask_mod, MASK_MOD, call.sizes, blocks)
    return score, mask


@dataclass(frozen=True)
class _Forward:
    """The kernel: results of whole rows, or, with `splits`, sums over parts of keys.

    Of whole rows queries and outputs are (B, T, H, ...), of parts by head: the rows of
    a head lie together, as they came where there is one query.
    """

    call: Call
    config: Config
    score: Operands | None
    mask: Operands | None
    has_lists: bool
    splits: int | None = None

    def __call__(self, query: Array, key: Array, value: Array, lists: Any) -> Any:
        B, H = self.call.sizes["b"], self.call.sizes["h"]
        (D, V), config = (query.shape[3], value.shape[3]), self.config
        mods = [x.arrays for x in (self.score, self.mask) if x is not None]
        arrays = (query, key, value), tuple(lists), *mods
        leaves, tree = jax.tree.flatten(arrays)
        tiles = -(-self.call.sizes["q"] // config.span)
        rows = tiles * config.span  # a tile's are copied without limits
        copies = B if self.splits is None else self.splits * config.takers * B
        statistic = jax.ShapeDtypeStruct((copies, H, rows), jnp.float32)
        out = query.dtype if self.splits is None else jnp.dtype(jnp.float32)
        barriers = partial(plgpu.Barrier, num_barriers=config.stages)
        readers = config.groups // config.takers
        smem = partial(shared_memory, query.dtype)
        # A warpgroup's output takes the place of its queries where it is as wide.
        times = out.itemsize // query.dtype.itemsize if V == D else 1
        tiles_of_groups = (
            smem(config.groups, times, config.rows, D),
            shared_memory(out, config.groups, config.rows, V),
        )
        scratch = (
            plgpu.RefUnion(*tiles_of_groups) if V == D else tiles_of_groups,
            smem(config.stages, config.columns, D),
            smem(config.stages, config.columns, V),
            plgpu.SMEM((2, config.groups, config.rows), jnp.float32),
            plgpu.Barrier(num_barriers=config.groups),
            (barriers(), barriers()),
            (
                barriers(num_arrivals=readers),
                barriers(num_arrivals=readers),
            ),
            plgpu.Barrier(num_arrivals=config.groups),
            Verdict.scratch(config, interpret=self.call.interpret)
            if self.call.has_unseen
            else (),
        )

        def body(refs: Any, scratch: Any) -> None:
            arrays = jax.tree.unflatten(tree, refs[: len(leaves)])
            shared = _Scratch(*scratch[0], *scratch[1:])
            _ThreadBlock(self, arrays, refs[len(leaves) :], shared).run()

        return run_kernel(
            body,
            scratch,
            self.grid(tiles),
            config,
            self.call.interpret,
            out_type=[
                jax.ShapeDtypeStruct((copies, *query.shape[1:3], V), out),
                *[statistic] * 2,
            ],
        )(*leaves)

    def grid(self, tiles: int) -> dict[str, int]:
        """Thread blocks by name; those that start together read what lies together."""
        B, H = self.call.sizes["b"], self.call.sizes["h"]
        if self.splits is None:
            return {"heads": H, "tiles": tiles, "batch": B}
        return {"batch": B, "parts": self.splits, "heads": H, "tiles": tiles}

    def rows(self, b: Any, h: Any, first: Any) -> tuple[Any, ...]:
        """Where a tile's rows of queries and outputs are."""
        rows = pl.ds(first, self.config.rows)
        return (b, rows, h) if self.splits is None else (b, h, rows)

    @property
    def is_linear(self) -> bool:
        """Whether the scale can be part of the exponent."""
        return self.score is None and self.call.scale > 0


@dataclass(frozen=True)
class _Scratch:
    queries: Any  # of each warpgroup
    output: Any  # likewise
    keys: Any
    values: Any
    statistics: Any
    queries_here: Any
    here: Any  # barriers of keys and values: loaded
    free: Any  # read by all
    turn: Any
    verdict: Any


@dataclass(frozen=True)
class _ThreadBlock:
    """One thread block: `run` is what each of its warpgroups does."""

    kernel: _Forward
    arrays: Any
    outputs: Any
    scratch: _Scratch

    def run(self) -> None:
        config = self.kernel.config
        h, n, b = (lax.axis_index(x) for x in ("heads", "tiles", "batch"))
        tile = lax.axis_size("tiles") - 1 - n  # a causal mask's last have most to do
        group = lax.axis_index("wg")
        lists = self.arrays[1] if self.kernel.has_lists else None
        call = self.kernel.call
        blocks = Blocks(call.blocks, call.sizes["k"], config)
        visits = blocks.visits(lists, b, h, tile * config.span)
        if self.kernel.splits is not None:
            visits = visits.part(lax.axis_index("parts"), self.kernel.splits)
        compute, move = config.registers

        @pl.when(group < config.groups)
        def _() -> None:
            plgpu.set_max_registers(compute, action="increase")
            own = 0 if config.shares_rows else group
            first = tile * config.span + own * config.rows
            place = b, h, first
            is_spoiled = self.compute(visits, group, *place)
            if is_spoiled is not None:
                again = partial(self.compute, visits, group, *place, is_careful=True)
                pl.when(is_spoiled)(again)

        @pl.when(group == config.groups)
        def _() -> None:
            plgpu.set_max_registers(move, action="decrease")
            place = call.place_of_keys(b, h)
            self.move(visits, *place)
            if self.verdict is not None:
                pl.when(self.verdict(group))(partial(self.move, visits, *place))

    @property
    def verdict(self) -> Verdict | None:
        """Whether something hidden spoiled the output; None if nothing is hidden."""
        return Verdict(*self.scratch.verdict) if self.scratch.verdict else None

    # --- the warpgroup that moves keys and values ---

    def move(self, visits: Visits, b: Any, h: Any) -> None:
        stages, scratch = self.kernel.config.stages, self.scratch
        _, key, value = self.arrays[0]
        sides = ((key, scratch.keys), (value, scratch.values))

        @pl.loop(i32(0), visits.total)
        def _(i: Any) -> None:
            slot = lax.rem(i, i32(stages))
            rows = pl.ds(visits.first(i), self.kernel.config.columns)
            for n, (array, here) in enumerate(sides):
                pl.when(i >= stages)(
                    partial(plgpu.barrier_wait, scratch.free[n].at[slot])
                )
                plgpu.copy_gmem_to_smem(
                    array.at[b, rows, h], here.at[slot], scratch.here[n].at[slot]
                )

        @pl.loop(jnp.maximum(visits.total - stages, 0), visits.total)
        def _(i: Any) -> None:  # nobody leaves before all have read
            for free in scratch.free:
                plgpu.barrier_wait(free.at[lax.rem(i, i32(stages))])

    # --- the warpgroups that compute ---

    def compute(
        self,
        visits: Visits,
        group: Any,
        b: Any,
        h: Any,
        first: Any,
        *,
        is_careful: bool = False,
    ) -> Any:
        """Stores the results; says whether something hidden spoiled them."""
        config, call, scratch = self.kernel.config, self.kernel.call, self.scratch
        query = self.arrays[0][0]
        mine = scratch.queries.at[group, 0]
        where = query.at[self.kernel.rows(b, h, first)]
        plgpu.copy_gmem_to_smem(where, mine, scratch.queries_here.at[group])
        plgpu.barrier_wait(scratch.queries_here.at[group])
        whole = reach(config, call.blocks)
        tile = Tile(b, h, first, config, whole, "q", call.sizes, call.interpret)
        mods = self.kernel.score, self.kernel.mask
        score, mask = on_tile(tile, mods, self.arrays[2:])
        turn = group if config.shares_rows else i32(0)
        step = _Step(self, visits, turn, mine, score, mask, tile, is_careful)
        here = scratch.here[0].at[turn]
        pl.when(visits.total > turn)(lambda: plgpu.barrier_wait(here))
        self.take_turn(group == 1)
        empty = zeros(config.rows, value=-jnp.inf), zeros(config.rows)
        carry = zeros(config.rows, self.arrays[0][2].shape[3]), *empty
        full, total = map(step.count, (visits.full, visits.total))
        carry = lax.fori_loop(i32(0), full, partial(step, is_full=True), carry)
        carry = lax.fori_loop(full, total, partial(step, is_full=False), carry)
        self.take_turn(group == 0)
        is_spoiled = None
        if self.verdict is not None and not is_careful:
            is_spoiled = self.verdict(group, carry[0])
        self.store(group, (b, h, first), *carry)
        return is_spoiled

    def take_turn(self, condition: Any = None) -> None:
        """Lets the other warpgroup have the tensor cores, and waits for it."""
        if not self.kernel.config.takes_turns:
            return

        def turn() -> None:
            plgpu.barrier_arrive(self.scratch.turn)
            plgpu.barrier_wait(self.scratch.turn)

        turn() if condition is None else pl.when(condition)(turn)

    def store(self, group: Any, place: Any, acc: Any, top: Any, total: Any) -> None:
        if self.kernel.is_linear:
            top = top * self.kernel.call.scale
        if self.kernel.splits is not None:
            self.put(group, self.of_part(group, place), acc, top, total)
            return
        is_empty = total == 0
        some = jnp.where(is_empty, 1.0, total)
        acc = acc * lax.broadcast_in_dim(1 / some, acc.shape, [0])
        self.put(group, place, acc, top, jnp.log2(some) * (1 / LOG2E))

    def of_part(self, group: Any, place: Any) -> Any:
        """Where the sums of a warpgroup are: parts stand where sequences do."""
        (b, h, first), config = place, self.kernel.config
        part = lax.axis_index("parts")
        if config.shares_rows:
            part = part * config.takers + group
        return part * self.kernel.call.sizes["b"] + b, h, first

    def put(self, group: Any, place: Any, acc: Any, *statistics: Any) -> None:
        b, h, first = place
        rows, scratch = pl.ds(first, self.kernel.config.rows), self.scratch
        out = scratch.output.at[group]
        out[...] = acc.astype(out.dtype)
        for n, x in enumerate(statistics):
            scratch.statistics.at[n, group][...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, self.outputs[0].at[self.kernel.rows(*place)])
        for n, ref in enumerate(self.outputs[1:]):
            plgpu.copy_smem_to_gmem(scratch.statistics.at[n, group], ref.at[b, h, rows])
        plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Step:
    """One visit: its keys and values become part of output, maximum and sum."""

    block: _ThreadBlock
    visits: Visits
    turn: Any  # the first of its warpgroup's visits
    queries: Any
    score: ModOnTile | None
    mask: ModOnTile | None
    tile: Tile
    is_careful: bool  # about hidden values that are not finite

    def count(self, visits: Any) -> Any:
        """How many of the first visits are its warpgroup's."""
        takers = self.block.kernel.config.takers
        if takers == 1:
            return visits
        return lax.div(visits - self.turn + (takers - 1), i32(takers))

    def __call__(self, n: Any, carry: Any, *, is_full: bool) -> Any:
        acc, top, total = carry
        block, config = self.block, self.block.kernel.config
        i = n * config.takers + self.turn if config.shares_rows else n
        scratch, slot = block.scratch, lax.rem(i, i32(config.stages))
        scores = multiply(self.queries, scratch.keys.at[slot], block.take_turn)
        plgpu.barrier_arrive(scratch.free[0].at[slot])
        weights, top, decay, added = self.soften(scores, top, i, is_full)
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        total = total * decay + added
        acc, top, total, weights = lax.optimization_barrier((acc, top, total, weights))
        self.await_values(slot)
        if self.is_careful and not is_full:
            acc = self.add_seen(acc, weights, self.visits.first(i))
            self.await_next_keys(i)
        else:
            acc = accumulate(
                acc, weights, scratch.values.at[slot], self.tile.interpret,
                partial(self.await_next_keys, i),
            )  # fmt: skip
        plgpu.barrier_arrive(scratch.free[1].at[slot])
        return acc, top, total

    def soften(self, scores: Any, top: Any, i: Any, is_full: bool) -> Any:
        """Weights in half precision, the new maximum, exp(old - new), and the sum."""
        kernel, factor = self.block.kernel, LOG2E
        if kernel.is_linear:
            factor *= kernel.call.scale
        else:
            scores = scores * kernel.call.scale
        first = None if is_full and self.score is None else self.visits.first(i)
        if self.score is not None:
            (scores,) = self.score(first, scores)
        if not is_full:
            for visible in self.visible(first):
                scores = jnp.where(visible, scores, -jnp.inf)
        new = jnp.maximum(top, scores.max(axis=1))
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        if kernel.is_linear:
            shifts = lax.broadcast_in_dim(shift * factor, scores.shape, [0])
            weights = jnp.exp2(scores * factor - shifts)
        else:  # a row may be at -1e9, where float32 has no room for a product
            shifts = lax.broadcast_in_dim(shift, scores.shape, [0])
            weights = jnp.exp2((scores - shifts) * factor)
        decay = jnp.exp2((top - shift) * factor)
        return weights.astype(self.queries.dtype), new, decay, weights.sum(axis=1)

    def add_seen(self, acc: Any, weights: Any, first: Any) -> Any:
        """What is seen of each value in turn, instead of a product."""
        tile, value = self.tile, self.block.arrays[0][2]
        seen = functools.reduce(jnp.logical_and, self.visible(first))
        place = self.block.kernel.call.place_of_keys(tile.b, tile.h)
        row = partial(load_row, value, place, first, tile.sizes["k"])
        return add_seen(acc, weights.astype(jnp.float32), seen, row)

    def visible(self, first: Any) -> list[Any]:
        """What hides scores of a partial block."""
        real = self.tile.is_column_real(first)
        parts = [] if real is None else [real]
        return parts if self.mask is None else [*parts, *self.mask(first)]

    def await_values(self, slot: Any) -> None:
        takes_turns = self.block.kernel.config.takes_turns
        turn = self.block.scratch.turn
        if takes_turns:
            plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(self.block.scratch.here[1].at[slot])
        if takes_turns:
            plgpu.barrier_wait(turn)

    def await_next_keys(self, i: Any) -> None:
        config = self.block.kernel.config
        following = i + config.takers
        slot = lax.rem(following, i32(config.stages))
        wait = partial(plgpu.barrier_wait, self.block.scratch.here[0].at[slot])
        pl.when(following < self.visits.total)(wait)
