"""flex_attention on Hopper GPUs: the backward pass, as two fused kernels.

    p = exp(s - maximum - log sum),   delta = sum(do o) - d lse
    ds = p (do v - delta) ds/d(q k),  dq = ds k,  dk = ds' q,  dv = p' do

One kernel has queries as its rows and visits keys, for dq; the other has keys as its
rows and visits queries, along the columns of the mask's lists, for dk and dv: there the
tile lies on its side, the query heads of a key head are visited one after another, and
nothing is added in an order that differs between runs. Scores are computed twice, which
costs two products of seven and saves the atomic additions of dq.

What `score_mod` captured gets its gradient elsewhere.

References:
    Dao, "FlashAttention-2", 2023, Algorithm 2.
"""

import math
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
from .configs import Config, backward_config
from .mosaic_gpu import Call, aligned, call_of, mods_of
from .mosaic_gpu_tiles import (
    COLUMN,
    LOG2E,
    ROW,
    Blocks,
    ModOnTile,
    Operands,
    Tile,
    Visits,
    accumulate,
    as_lists,
    filled,
    heads_first,
    i32,
    multiply,
    on_tile,
    reach,
    run_kernel,
    shared_memory,
    zeros,
)
from .normalization import with_slope
from .separation import is_literal


_TILES = (128, 192)  # rows, and columns, that are loaded at once divide one of these
_WIDE = 128  # channels: of more, registers hold the sums of one gradient at a time


def backward(
    arrays: Any,
    score_mod: Any,
    block_mask: BlockMask | None,
    results: tuple[Array, Array, Array],
    cotangents: tuple[Array, Array],
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value, in their dtype."""
    call = call_of(arrays, block_mask, scale=scale, interpret=interpret)
    d_out = cotangents[0].astype(arrays[0].dtype)
    padded = tuple(aligned(x) for x in (*arrays, d_out))
    is_linear = score_mod is None and scale > 0
    whole = math.lcm(*_TILES, call.blocks[0] if call.blocks else 1)
    statistics = _statistics(is_linear, whole, results, cotangents)
    is_wide = max(padded[1].shape[3], padded[2].shape[3]) > _WIDE
    found: list[Array] = []
    for wanted in (("q",), ("k",), ("v",)) if is_wide else (("q",), ("k", "v")):
        found += _gradients(call, padded, score_mod, block_mask, statistics, wanted)
    pairs = zip(found, arrays, strict=True)
    return tuple(  # type: ignore[return-value]
        d[:, : x.shape[1], :, : x.shape[3]] for d, x in pairs
    )


def _statistics(
    is_linear: bool, whole: int, results: Any, cotangents: Any
) -> tuple[Float[Array, "B H T2"], ...]:
    """What is subtracted from scores, as powers of two, and delta, for whole tiles.

    A query that sees nothing, or that is beyond the end, has weights 2^-inf. Where the
    maximum is far from 0 the logarithm of the sum stands apart from it.
    """
    out, maximum, log_sum = results
    d_out, d_lse = (x.astype(jnp.float32) for x in cotangents)
    delta = jnp.sum(d_out * out.astype(jnp.float32), axis=-1) - d_lse
    is_blind = maximum == -jnp.inf
    maximum, delta = (
        jnp.where(is_blind, jnp.inf, maximum),
        jnp.where(is_blind, 0, delta),
    )
    parts = [maximum, log_sum * LOG2E]
    if is_linear:
        parts = [(maximum + log_sum) * LOG2E]
    return tuple(
        filled(heads_first(x), 2, whole, fill)
        for x, fill in zip((*parts, delta), (jnp.inf, *[0.0] * len(parts)), strict=True)
    )


def _gradients(
    call: Call,
    arrays: tuple[Array, ...],
    score_mod: Any,
    block_mask: BlockMask | None,
    statistics: Any,
    wanted: tuple[str, ...],
) -> list[Array]:
    """The gradients wanted: of the queries, or of keys, of values or of both."""
    rows = "q" if wanted == ("q",) else "k"
    query, key, value, d_out = arrays
    sides = ((query, d_out), (key, value))
    stay, visit = sides if rows == "q" else sides[::-1]
    blocks, lists = call.blocks, None
    if block_mask is not None:
        lists = block_mask.lists(transposed=rows == "k")
    if blocks is not None and rows == "k":
        blocks = blocks[1], blocks[0]
    config = backward_config(rows, max(key.shape[3], value.shape[3]), blocks)
    other = "k" if rows == "q" else "q"
    loaded = {rows: config.span, other: reach(config, blocks)}
    if score_mod is not None and wanted != ("v",):
        score_mod = with_slope(score_mod)
    score, mask = mods_of(call, score_mod, block_mask, loaded)
    kernel = _Backward(call, config, rows, wanted, blocks, score, mask, query.dtype)
    return kernel(stay, visit, statistics, as_lists(lists))


@dataclass(frozen=True)
class _Backward:
    call: Call
    config: Config
    rows: str
    wanted: tuple[str, ...]
    blocks: tuple[int, int] | None  # of a mask, as rows and columns
    score: Operands | None
    mask: Operands | None
    dtype: Any

    def __call__(self, stay: Any, visit: Any, statistics: Any, lists: Any) -> Any:
        config, (B, length, heads, _) = self.config, stay[0].shape
        mods = [x.arrays for x in (self.score, self.mask) if x is not None]
        leaves, tree = jax.tree.flatten((stay, visit, statistics, lists, *mods))
        smem = partial(shared_memory, self.dtype)
        barriers = partial(plgpu.Barrier, num_barriers=config.stages)
        scratch = (
            [smem(config.groups, config.rows, x.shape[3]) for x in stay],
            [smem(config.stages, config.columns, x.shape[3]) for x in visit],
            plgpu.Barrier(num_arrivals=2, num_barriers=config.groups),
            [barriers() for _ in visit],
            [barriers(num_arrivals=config.groups) for _ in visit],
        )

        def body(refs: Any, scratch: Any) -> None:
            arrays = _Arrays(*jax.tree.unflatten(tree, refs[: len(leaves)]))
            _ThreadBlock(self, arrays, refs[len(leaves) :], _Scratch(*scratch)).run()

        out = {"q": stay[0], "k": stay[0], "v": stay[1]}
        return run_kernel(
            body,
            scratch,
            {"heads": heads, "tiles": -(-length // config.span), "batch": B},
            config,
            self.call.interpret,
            out_type=[
                jax.ShapeDtypeStruct(out[name].shape, self.dtype)
                for name in self.wanted
            ],
        )(*leaves)

    @property
    def is_linear(self) -> bool:
        """Whether the scale can be part of the exponent."""
        return self.score is None and self.call.scale > 0

    @property
    def has_slope(self) -> bool:
        """Whether a modified score changes by more or less than the score."""
        if self.score is None or len(self.score.separated.jaxpr.outvars) == 1:
            return False
        slope = self.score.separated.jaxpr.outvars[1]
        return not (is_literal(slope) and slope.val == 1)

    @property
    def repeats(self) -> int:
        """How many query heads, of how many sequences, see the rows."""
        if self.rows == "q":
            return 1
        sizes, sequences = self.call.sizes, 1
        if self.call.shares_keys:
            sequences = sizes["b"]
        return sequences * sizes["h"] // self.call.key_heads


class _Arrays:
    """The references of a kernel's operands."""

    def __init__(self, stay: Any, visit: Any, statistics: Any, lists: Any, *mods: Any):
        self.stay, self.visit, self.statistics = stay, visit, statistics
        self.lists, self.mods = lists, mods


@dataclass(frozen=True)
class _Scratch:
    stay: Any  # of each warpgroup; its gradients in the end
    visit: Any
    stay_here: Any
    here: Any  # barriers of what is visited: loaded
    free: Any  # read by all


@dataclass(frozen=True)
class _ThreadBlock:
    """One thread block: `run` is what each of its warpgroups does."""

    kernel: _Backward
    arrays: _Arrays
    outputs: Any
    scratch: _Scratch

    def run(self) -> None:
        config = self.kernel.config
        h, tile, b = (lax.axis_index(x) for x in ("heads", "tiles", "batch"))
        group, first = lax.axis_index("wg"), tile * config.span
        compute, move = config.registers

        @pl.when(group < config.groups)
        def _() -> None:
            plgpu.set_max_registers(compute, action="increase")
            self.compute(group, b, h, first)

        @pl.when(group == config.groups)
        def _() -> None:
            plgpu.set_max_registers(move, action="decrease")
            self.move(b, h, first)

    def seen_by(self, n: Any, b: Any, h: Any) -> tuple[Any, Any]:
        """The n-th sequence and query head for the rows of one or of a key head."""
        if self.kernel.rows == "q":
            return b, h
        call = self.kernel.call
        group = call.sizes["h"] // call.key_heads
        if not call.shares_keys:
            return b, h * group + n
        return lax.div(n, i32(group)), h * group + lax.rem(n, i32(group))

    def visits(self, b: Any, h: Any, first: Any) -> Visits:
        kernel = self.kernel
        length = kernel.call.sizes["k" if kernel.rows == "q" else "q"]
        lists = self.arrays.lists if kernel.blocks else None
        return Blocks(kernel.blocks, length, kernel.config).visits(lists, b, h, first)

    def over_heads(self, body: Any, carry: Any) -> Any:
        if self.kernel.repeats == 1:
            return body(i32(0), carry)
        return lax.fori_loop(i32(0), i32(self.kernel.repeats), body, carry)

    # --- the warpgroup that moves data ---

    def move(self, b: Any, h: Any, first: Any) -> None:
        stages, scratch = self.kernel.config.stages, self.scratch

        def of_head(n: Any, count: Any) -> Any:
            seen = self.seen_by(n, b, h)
            visits = self.visits(*seen, first)
            if self.kernel.rows == "q":
                seen = self.kernel.call.place_of_keys(b, h)

            def one(i: Any, count: Any) -> Any:
                slot = lax.rem(count, i32(stages))
                rows = pl.ds(visits.first(i), self.kernel.config.columns)
                for side, array in enumerate(self.arrays.visit):
                    wait = partial(plgpu.barrier_wait, scratch.free[side].at[slot])
                    pl.when(count >= stages)(wait)
                    plgpu.copy_gmem_to_smem(
                        array.at[seen[0], rows, seen[1]],
                        scratch.visit[side].at[slot],
                        scratch.here[side].at[slot],
                    )
                return count + 1

            return lax.fori_loop(i32(0), visits.total, one, count)

        count = self.over_heads(of_head, i32(0))

        @pl.loop(jnp.maximum(count - stages, 0), count)
        def _(i: Any) -> None:  # nobody leaves before all have read
            for free in scratch.free:
                plgpu.barrier_wait(free.at[lax.rem(i, i32(stages))])

    # --- the warpgroups that compute ---

    def compute(self, group: Any, b: Any, h: Any, first: Any) -> None:
        kernel, scratch = self.kernel, self.scratch
        here = scratch.stay_here.at[group]
        rows = pl.ds(first + group * kernel.config.rows, kernel.config.rows)
        for array, mine in zip(self.arrays.stay, scratch.stay, strict=True):
            plgpu.copy_gmem_to_smem(array.at[b, rows, h], mine.at[group], here)
        plgpu.barrier_wait(here)
        stay = [x.at[group] for x in scratch.stay]

        def of_head(n: Any, carry: Any) -> Any:
            seen = self.seen_by(n, b, h)
            visits = self.visits(*seen, first)
            tile = Tile(
                *seen,
                first + group * kernel.config.rows,
                kernel.config,
                reach(kernel.config, kernel.blocks),
                kernel.rows,
                kernel.call.sizes,
                kernel.call.interpret,
            )
            score, mask = on_tile(tile, (kernel.score, kernel.mask), self.arrays.mods)
            step = _Step(self, visits, stay, score, mask, tile)
            prepared = step.row_statistics()
            carry = lax.fori_loop(
                i32(0), visits.full, partial(step, prepared, True), carry
            )
            return lax.fori_loop(
                visits.full, visits.total, partial(step, prepared, False), carry
            )

        buffers = {"q": stay[0], "k": stay[0], "v": stay[1]}
        sums = [zeros(*buffers[name].shape) for name in kernel.wanted]
        _, *sums = self.over_heads(of_head, (i32(0), *sums))
        for name, x, out in zip(kernel.wanted, sums, self.outputs, strict=True):
            if name != "v":
                x = x * kernel.call.scale
            buffers[name][...] = x.astype(kernel.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffers[name], out.at[b, rows, h])
        plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Step:
    """One visit, which adds to the gradients of the rows."""

    block: _ThreadBlock
    visits: Visits
    stay: Any
    score: ModOnTile | None
    mask: ModOnTile | None
    tile: Tile

    def __call__(self, rows: Any, is_full: bool, i: Any, carry: Any) -> Any:
        count, *sums = carry
        kernel, scratch = self.block.kernel, self.block.scratch
        slot, first = lax.rem(count, i32(kernel.config.stages)), self.visits.first(i)
        *shifts, delta = self.statistics(rows, first)
        free = [partial(plgpu.barrier_arrive, x.at[slot]) for x in scratch.free]
        weights, slope = self.weights(first, is_full, shifts, self.product(0, slot))
        found = {"v": weights}
        if kernel.wanted == ("v",):
            free[0]()
            plgpu.barrier_wait(scratch.here[1].at[slot])
        else:
            d_scores = weights * (self.product(1, slot) - delta)
            if slope is not None:  # of what is hidden it may be infinite
                d_scores = jnp.where(weights == 0, 0.0, d_scores * slope)
            found |= dict.fromkeys("qk", d_scores)
        if "v" not in kernel.wanted:
            free[1]()
        sums = dict(zip(kernel.wanted, sums, strict=True))
        halves = {name: found[name].astype(kernel.dtype) for name in sums}
        for name in sorted(sums, reverse=True):  # values first: their weights are ready
            side = int(name == "v")
            right = scratch.visit[side].at[slot]
            sums[name] = accumulate(
                sums[name], halves[name], right, self.tile.interpret
            )
            free[side]()
        return count + 1, *sums.values()

    def product(self, side: int, slot: Any) -> Any:
        """Of what stays and what is visited."""
        scratch = self.block.scratch
        plgpu.barrier_wait(scratch.here[side].at[slot])
        return multiply(self.stay[side], scratch.visit[side].at[slot])

    def row_statistics(self) -> Any:
        """Those of the queries, where queries are the rows."""
        if self.tile.rows != "q":
            return None
        return [
            self._load(x, self.tile.first, ROW) for x in self.block.arrays.statistics
        ]

    def statistics(self, rows: Any, first: Any) -> list[Any]:
        """On the tile."""
        if rows is not None:
            return [self.tile.spread(x, "row", "tile") for x in rows]
        loaded = [self._load(x, first, COLUMN) for x in self.block.arrays.statistics]
        return [self.tile.spread(x, "column", "tile") for x in loaded]

    def _load(self, ref: Any, first: Any, layout: Any) -> Any:
        n = self.tile.shape[0] if layout is ROW else self.tile.shape[1]
        window = ref.at[self.tile.b, self.tile.h, pl.ds(first, n)]
        return plgpu.load(window, layout=layout, optimized=False)

    def weights(self, first: Any, is_full: bool, shifts: Any, scores: Any) -> Any:
        """Weights, and how much a modified score changes with the score."""
        kernel, slope = self.block.kernel, None
        if kernel.is_linear:
            weights = jnp.exp2(scores * (kernel.call.scale * LOG2E) - shifts[0])
        else:
            scores = scores * kernel.call.scale
            if self.score is not None:
                scores, *rest = self.score(first, scores)
                slope = rest[0] if kernel.has_slope else None
            weights = jnp.exp2((scores - shifts[0]) * LOG2E - shifts[1])
        if not is_full:
            for visible in self.visible(first):
                weights = jnp.where(visible, weights, 0.0)
        return weights, slope

    def visible(self, first: Any) -> list[Any]:
        """What hides scores of a partial block."""
        real = self.tile.is_column_real(first)
        parts = [] if real is None else [real]
        return parts if self.mask is None else [*parts, *self.mask(first)]
