"""flex_attention on Hopper GPUs: the backward pass, as a kernel for each side.

For what the registers of the fused kernel do not hold, and where few queries see a key,
so that its thread blocks would wait for each other. The kernel for dq has queries as
its rows and visits keys; it also completes delta = sum(do o) - d lse, which the other
one reads. That for dk and dv has keys as its rows and visits queries,
along the columns of the mask's lists: there the tile lies on its side, and the query
heads of a key head are visited one after another. Of more than 128 channels registers
hold the sums of one gradient, so that dk and dv have a kernel each.

References:
    Dao, "FlashAttention-2", 2023, Algorithm 2.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array, lax, numpy as jnp

from pliax.kernels._hopper import shared_memory

from .block_lists import BlockLists, TellingLists
from .block_mask import BlockMask
from .configs import Kernel
from .mosaic_gpu import Call, mods_of
from .mosaic_gpu_columns import columns_of
from .mosaic_gpu_conditions import all_meet
from .mosaic_gpu_copies import (
    await_copies,
    await_copies_read,
    await_other_warps,
)
from .mosaic_gpu_gradients import (
    Gradient,
    Weights,
    blind_tiles,
    with_slope_of_hidden,
)
from .mosaic_gpu_grid import Grid
from .mosaic_gpu_one_side import OneSide
from .mosaic_gpu_tiles import (
    ROW,
    TILE,
    Tile,
    Verdict,
    accumulate,
    add_seen,
    as_lists,
    clear_rows,
    i32,
    load_row,
    make_finite,
    on_tile,
    pieces,
    run_kernel,
    zeros,
)
from .mosaic_gpu_visits import Visits, reach
from .normalization import with_slope


def gradients_of(
    names: str,
    call: Call,
    lists: BlockLists | TellingLists | None,
    arrays: tuple[Array, ...],
    score_mod: Any,
    block_mask: BlockMask | None,
    statistics: Any,
    out: Array | None = None,
) -> list[Array]:
    """The gradients of the queries, "q", of the keys, "k", of the values, "v", or "kv".

    Behind that of the queries is delta, the last of the statistics, made whole, of as
    many queries as whole tiles of the kernel have.

    Args:
        names: Which.
        call: What is static in the call.
        lists: Of the mask's blocks: by row for "q", else by column.
        arrays: Query, key, value and the output's cotangent, aligned.
        score_mod: The mod, or None.
        block_mask: The mask, or None.
        statistics: Of `row_statistics.statistics`; for "q" delta without its sums.
        out: The output, in whole tiles, for "q".
    """
    rows, other = ("q", "k") if names == "q" else ("k", "q")
    query, key, value, d_out = arrays
    sides = ((query, d_out), (key, value))
    stay, visit = sides if rows == "q" else sides[::-1]
    blocks = call.blocks
    if blocks is not None and rows == "k":
        blocks = blocks[1], blocks[0]
    name, channels = "dq" if rows == "q" else "dkv", (key.shape[3], value.shape[3])
    kind, blind = Kernel(name, channels, blocks), ()
    config = kind.config(call.asked)
    loaded = {rows: config.span, other: reach(config, blocks)}
    if score_mod is not None and names != "v":
        score_mod = with_slope(score_mod)
    score, mask = mods_of(call, score_mod, block_mask, loaded)
    columns = columns_of((score, mask), other, config, kind.room(config))
    gradient = Gradient(call, config, rows, blocks, score, mask, query.dtype, columns)
    if call.has_unseen and "k" in names:
        blind = blind_tiles(statistics, call.sizes["q"], config.columns)
    given = () if out is None else (out,)
    mods = tuple(gradient.mods)
    operands = _Arrays(stay, visit, statistics, as_lists(lists), blind, given, mods)
    return _Backward(gradient, names)(operands)


def side_of(name: str) -> int:
    """Which of the pair that stays, and of the pair visited, a gradient is of."""
    return int(name == "v")


@dataclass(frozen=True)
class _Backward:
    gradient: Gradient
    names: str

    def __call__(self, arrays: "_Arrays") -> Any:
        gradient, grid = self.gradient, self.grid(arrays.stay[0].shape)
        config, statistics = gradient.config, arrays.statistics
        leaves, tree = jax.tree.flatten(arrays)
        smem = partial(shared_memory, gradient.dtype)
        barriers = partial(plgpu.Barrier, num_barriers=config.stages)
        known, shape = [], (config.stages, config.columns)
        if gradient.rows == "k":
            known = [plgpu.SMEM(shape, jnp.float32) for _ in statistics]
        more = len(known) + len(gradient.columns.places)
        scratch = (
            [smem(config.groups, config.rows, x.shape[3]) for x in arrays.stay],
            [smem(config.stages, config.columns, x.shape[3]) for x in arrays.visit],
            known,
            plgpu.SMEM((config.groups, config.rows), jnp.float32) if arrays.out else (),
            gradient.columns.scratch(),
            plgpu.Barrier(num_arrivals=2, num_barriers=config.groups),
            [barriers(num_arrivals=1 + n) for n in (more, 0)],
            [barriers(num_arrivals=config.groups) for _ in arrays.visit],
            Verdict.scratch(config, interpret=gradient.call.interpret)
            if self.names == "q" and gradient.call.has_unseen
            else (),
        )

        def body(refs: Any, scratch: Any) -> None:
            given = jax.tree.unflatten(tree, refs[: len(leaves)])
            _ThreadBlock(self, given, refs[len(leaves) :], _Scratch(*scratch)).run()

        shapes = [arrays.stay[side_of(name)].shape for name in self.names]
        found = [jax.ShapeDtypeStruct(x, gradient.dtype) for x in shapes]
        if arrays.out:  # of all rows that are computed
            delta = *statistics[-1].shape[:2], grid.tiles * config.span
            found.append(jax.ShapeDtypeStruct(delta, jnp.float32))
        return run_kernel(
            body,
            scratch,
            grid.sizes,
            config,
            gradient.call.interpret,
            out_type=found,
            has_own_barriers=not config.has_mover,
        )(*leaves)

    def grid(self, shape: tuple[int, ...]) -> Grid:
        """Thread blocks for what stays, which has this shape."""
        (B, length, heads, _), config = shape, self.gradient.config
        return Grid(B, heads, -(-length // config.span), config.gathers_heads)


class _Arrays(NamedTuple):
    """The operands of a kernel, and the references to them.

    Attributes:
        stay: Queries and cotangents of the output, or keys and values.
        visit: The other pair.
        statistics: Of each query.
        lists: Of the mask.
        blind: Whether some query sees nothing, and which tiles have one; or ().
        out: The output, for the kernel that makes delta; or ().
        mods: What mods are given.
    """

    stay: Any
    visit: Any
    statistics: Any
    lists: Any
    blind: Any
    out: Any
    mods: Any


@dataclass(frozen=True)
class _Scratch:
    stay: Any  # of each warpgroup; its gradients in the end
    visit: Any
    known: Any  # statistics of the queries that are visited
    delta: Any  # of the queries of each warpgroup, for others to read
    columns: Any  # what mods know of what is visited
    stay_here: Any
    here: Any  # barriers of what is visited: loaded
    free: Any  # read by all
    verdict: Any


@dataclass(frozen=True)
class _ThreadBlock:
    """One thread block: `run` is what each of its warpgroups does."""

    kernel: _Backward
    arrays: _Arrays
    outputs: Any
    scratch: _Scratch

    def run(self) -> None:
        config = self.gradient.config
        b, h, tile = self.kernel.grid(self.arrays.stay[0].shape).place()
        group, first = lax.axis_index("wg"), tile * config.span
        compute, move = config.registers
        if not config.has_mover:
            self.compute_all(group, b, h, first)
            return

        @pl.when(group < config.groups)
        def _() -> None:
            plgpu.set_max_registers(compute, action="increase")
            self.compute_all(group, b, h, first)

        @pl.when(group == config.groups)
        def _() -> None:
            plgpu.set_max_registers(move, action="decrease")
            self.side.move(b, h, first)
            if self.verdict is not None:
                pl.when(self.verdict(group))(partial(self.side.move, b, h, first))

    @property
    def gradient(self) -> Gradient:
        return self.kernel.gradient

    @property
    def verdict(self) -> Verdict | None:
        """Whether a hidden key spoiled dq; None if that cannot be."""
        return Verdict(*self.scratch.verdict) if self.scratch.verdict else None

    @property
    def side(self) -> OneSide:
        """What the rows are combined with."""
        return OneSide(self.gradient, self.arrays, self.scratch)

    # --- the warpgroups that compute ---

    def compute_all(self, group: Any, b: Any, h: Any, first: Any) -> None:
        """Gradients, and again with care if something that nobody sees spoiled them."""
        run = partial(self.compute, group, b, h, first)
        if self.arrays.blind:  # apart: it is rare, and slower
            some, _ = self.arrays.blind
            has_blind = some[0] != 0
            pl.when(has_blind)(partial(run, is_careful=True))
            pl.when(~has_blind)(run)
        elif (is_spoiled := run()) is not None:

            @pl.when(is_spoiled)
            def _() -> None:
                await_copies()
                run(is_careful=True)

    def compute(
        self, group: Any, b: Any, h: Any, first: Any, *, is_careful: bool = False
    ) -> Any:
        """Stores the gradients; says whether something hidden spoiled them."""
        gradient, scratch = self.gradient, self.scratch
        config, here = gradient.config, scratch.stay_here.at[group]
        mine = first + group * config.rows
        rows = pl.ds(mine, config.rows)
        stay = [x.at[group] for x in scratch.stay]
        for array, buffer in zip(self.arrays.stay, stay, strict=True):
            plgpu.copy_gmem_to_smem(array.at[b, rows, h], buffer, here)
        await_stay, known = partial(plgpu.barrier_wait, here), None
        if gradient.rows == "q":
            known = self.row_statistics((b, h, rows), stay[1], await_stay)
            self.store_delta(group, (b, h, rows), known[-1])
        else:
            await_stay()
        if gradient.call.has_unseen and gradient.rows == "k":
            make_finite(stay[1], stay[1])

        def of_head(n: Any, carry: Any) -> Any:
            place = gradient.seen_by(n, b, h)
            visits = self.side.visits(*place, first)
            whole = reach(config, gradient.blocks)
            if not config.has_mover:
                self.side.load_first(visits, carry[0], place)
            sizes, interpret = gradient.call.sizes, gradient.call.interpret
            tile = Tile(*place, mine, config, whole, gradient.rows, sizes, interpret)
            mods = on_tile(tile, (gradient.score, gradient.mask), self.arrays.mods)
            weights = Weights(gradient, tile, *mods)
            step = _Step(self, visits, weights, is_careful)
            full, partly = (partial(step, known, x) for x in (True, False))
            carry = lax.fori_loop(i32(0), visits.full, full, carry)
            return lax.fori_loop(visits.full, visits.total, partly, carry)

        names = self.kernel.names
        buffers = [stay[side_of(name)] for name in names]
        start = i32(0), *(zeros(*x.shape) for x in buffers)
        _, *totals = gradient.over_heads(of_head, start)
        is_spoiled = None
        if self.verdict is not None and not is_careful:
            is_spoiled = self.verdict(group, totals[0])
        outputs = self.outputs[: len(names)]
        parts = zip(names, totals, buffers, outputs, strict=True)
        await_other_warps(config, gradient.call.interpret)
        for name, total, buffer, out in parts:
            scaled = total if name == "v" else total * gradient.call.scale
            buffer[...] = scaled.astype(gradient.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, out.at[b, rows, h])
        await_copies_read()
        return is_spoiled

    def row_statistics(self, at: Any, d_out: Any, await_d_out: Any) -> list[Any]:
        """Those of the queries, where queries are the rows, with the sums of delta.

        Args:
            at: Sequence, head and rows.
            d_out: The cotangents of the output, in shared memory.
            await_d_out: What waits for them, while the output is on its way.
        """
        b, h, rows = at
        load = partial(plgpu.load, layout=ROW, optimized=False)
        *shifts, delta = (load(x.at[b, h, rows]) for x in self.arrays.statistics)
        out = self.arrays.out[0].at[b, rows, h]
        load = partial(plgpu.load, layout=TILE, optimized=False)
        parts = [load(part) for part in pieces(out)]
        await_d_out()
        for part, other in zip(parts, pieces(d_out), strict=True):
            d = plgpu.load(other, layout=TILE).astype(jnp.float32)
            delta += (part.astype(jnp.float32) * d).sum(axis=1)
        return [*shifts, delta]

    def store_delta(self, group: Any, at: Any, delta: Any) -> None:
        """Those of a warpgroup, for the kernel of the other side."""
        mine = self.scratch.delta.at[group]
        mine[...] = delta
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, self.outputs[-1].at[at])


@dataclass(frozen=True)
class _Step:
    """One visit, which adds to the gradients of the rows."""

    block: _ThreadBlock
    visits: Visits
    weights: Weights
    is_careful: bool  # about what nobody sees, or sees nothing

    def __call__(self, rows: Any, is_full: bool, i: Any, carry: Any) -> Any:
        count, *totals = carry
        kernel, scratch = self.block.kernel, self.block.scratch
        config, dtype = kernel.gradient.config, kernel.gradient.dtype
        slot, (first, met) = lax.rem(count, i32(config.stages)), self.visits.place(i)
        side = self.block.side
        free = side.releases(self.visits, (self.tile.b, self.tile.h), i, count)
        columns = scratch.columns, slot
        scores = side.product(0, slot)
        *shifts, delta = side.statistics(self.tile, rows, slot)
        weights, slope = self.weights(scores, first, shifts, columns)
        if not is_full:
            weights = self.weights.hide(first, weights, columns, met)
        found = {"v": weights}
        if kernel.names == "v":
            free[0]()
            plgpu.barrier_wait(scratch.here[1].at[slot])
        else:
            d_scores = weights * (side.product(1, slot) - delta)
            d_scores = with_slope_of_hidden(weights, d_scores, slope)
            found |= dict.fromkeys("qk", d_scores)
        if "v" not in kernel.names:
            free[1]()
        sums = dict(zip(kernel.names, totals, strict=True))
        halves = {name: found[name].astype(dtype) for name in sums}
        for name in sorted(sums, reverse=True):  # values first: their weights are ready
            n = side_of(name)
            if name == "k" and self.is_careful:
                self.leave_out_blind(first, slot)
            if name == "q" and self.is_careful and not is_full:
                sums[name] = self.add_seen(sums[name], halves[name], first, columns)
            else:
                given = sums[name], halves[name], scratch.visit[n].at[slot]
                sums[name] = accumulate(*given, self.tile.interpret)
            free[n]()
        return count + 1, *sums.values()

    @property
    def tile(self) -> Tile:
        return self.weights.tile

    def leave_out_blind(self, first: Any, slot: Any) -> None:
        """Queries that see nothing may hold anything, and 0 times NaN is not 0."""
        _, flags = self.block.arrays.blind
        place = lax.div(first, i32(self.tile.shape[1]))
        has_blind = flags[self.tile.b, self.tile.h, place] != 0
        queries = self.block.scratch.visit[0].at[slot]

        def is_blind(row: int, count: int) -> Any:
            known = self.block.arrays.statistics[0]
            here = known.at[self.tile.b, self.tile.h, pl.ds(first + row, count)]
            return plgpu.load(here, layout=ROW, optimized=False) == jnp.inf

        @pl.when(has_blind)
        def _() -> None:
            await_other_warps(self.tile.config, self.tile.interpret)
            clear_rows(queries, is_blind)

    def add_seen(self, d_query: Any, d_scores: Any, first: Any, columns: Any) -> Any:
        """What is seen of each key in turn, instead of a product."""
        tile, key = self.tile, self.block.arrays.visit[0]
        seen = all_meet(self.weights.conditions(first, columns))
        place = self.weights.gradient.call.place_of_keys(tile.b, tile.h)
        row = partial(load_row, key, place, first, tile.sizes["k"])
        return add_seen(d_query, d_scores.astype(jnp.float32), seen, row)
