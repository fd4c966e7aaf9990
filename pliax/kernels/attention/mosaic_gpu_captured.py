"""flex_attention on Hopper GPUs: gradients of what a score_mod captured.

A kernel computes the gradients of modified scores tile by tile, and adds up what they
are times each slope (`linearization`): for each query, for each key, or for each
difference of the two. XLA makes gradients of captured arrays of these sums.

    p = exp(s - maximum - log sum),  ds = p (do v - delta),  sums of ds dm/dleaf

Rows are queries, or keys for sums by key: those of one query head, also where heads
share keys. A row's sums are in registers. Those along the diagonals of each tile are
made in shared memory and written tile by tile; where no tile is visited nothing is
written, and what is found there is left out. All sums are in one order, in every run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pliax.core._jax import add_diagonals
from pliax.kernels._hopper import shared_memory

from .block_mask import BlockMask
from .configs import CAPTURED_LEAVES, UNIT, Kernel
from .linearization import DIFFERENCE, Leaf, Linearization, linearize
from .mosaic_gpu import NOTHING, Call, aligned, call_of, mods_of
from .mosaic_gpu_columns import columns_of
from .mosaic_gpu_copies import await_copies_read, await_other_warps
from .mosaic_gpu_gradients import Gradient, Weights, whole_tiles
from .mosaic_gpu_grid import Grid
from .mosaic_gpu_one_side import OneSide
from .mosaic_gpu_tiles import (
    ROW,
    TILE,
    Tile,
    as_lists,
    i32,
    on_tile,
    run_kernel,
    zeros,
)
from .mosaic_gpu_visits import Visits, reach
from .row_statistics import statistics
from .separation import Inseparable


_LANES = 128  # threads of a warpgroup, which add diagonals
_APART = 8  # numbers between rows in shared memory
_MOST = 2**31  # bytes of sums along diagonals


def gradients_of_captured(
    arrays: Any,
    score_mod: Any,
    block_mask: BlockMask | None,
    results: tuple[Array, Array, Array],
    cotangents: tuple[Array, Array],
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Gradients of the floating arrays that `score_mod` captured.

    Args:
        arrays: Query, key and value.
        score_mod: The mod.
        block_mask: The mask, or None.
        results: The output, and each row's maximum and log-sum.
        cotangents: Of the output and the log-sum-exp.
        scale: What scores are multiplied by.
        interpret: Whether to run in Pallas's interpreter.

    Raises:
        Inseparable: If no kernel computes them.
    """
    linear = linearize(score_mod)
    call = call_of(arrays, block_mask, scale=scale, interpret=interpret)
    d_out = cotangents[0].astype(arrays[0].dtype)
    padded = tuple(aligned(x) for x in (*arrays, d_out))
    known = statistics(False, whole_tiles(call), results, cotangents)
    given = call, linear, padded, block_mask, known
    by_query = *linear.of_kind("q"), *linear.of_kind(DIFFERENCE)
    sums = _sums("q", by_query, *given) | _sums("k", linear.of_kind("k"), *given)
    found = [_over_axes(x, sums[x.variable]) for x in linear.leaves]
    return linear.gradients(found, call.sizes)


def _over_axes(leaf: Leaf, sums: Float[Array, "B H N"]) -> Array:
    """Over the sequences, heads and queries that share a leaf."""
    last = {"q", "k", DIFFERENCE} & set(leaf.axes)
    are_kept = "b" in leaf.axes, "h" in leaf.axes, bool(last)
    return jnp.sum(sums, [n for n, is_kept in enumerate(are_kept) if not is_kept])


def _sums(
    rows: str,
    leaves: Sequence[Leaf],
    call: Call,
    linear: Linearization,
    arrays: tuple[Array, ...],
    block_mask: BlockMask | None,
    known: tuple[Array, ...],
) -> dict[Any, Float[Array, "B H N"]]:
    """Those of leaves, by a kernel with queries or keys as its rows."""
    if not leaves:
        return {}
    query, key, value, d_out = arrays
    sides = ((query, d_out), (key, value))
    stay, visit = sides if rows == "q" else sides[::-1]
    blocks, other = call.blocks, "k" if rows == "q" else "q"
    if blocks is not None and rows == "k":
        blocks = blocks[1], blocks[0]
    kind = Kernel("captured", (key.shape[3], value.shape[3]), blocks)
    config = kind.config(NOTHING)
    loaded = {rows: config.span, other: reach(config, blocks)}
    score, mask = mods_of(call, linear.with_slopes(leaves), block_mask, loaded)
    columns = columns_of((score, mask), other, config, kind.room(config))
    lists = block_mask and as_lists(block_mask.lists(transposed=rows == "k"))
    gradient = Gradient(
        call, config, rows, blocks, score, mask, query.dtype, columns, of_each_head=True
    )
    operands = _Arrays(stay, visit, known, lists or (), tuple(gradient.mods))
    diagonals = tuple(x.kind == DIFFERENCE for x in leaves)
    kernel = _Captured(gradient, diagonals)
    _check_memory(kernel)
    found = kernel(operands)
    return {
        leaf.variable: _by_difference(x, (call.sizes["q"], call.sizes["k"]), block_mask)
        if leaf.kind == DIFFERENCE
        else x[..., : call.sizes[rows]]
        for leaf, x in zip(leaves, found, strict=True)
    }


def _check_memory(kernel: "_Captured") -> None:
    """Sums along diagonals are there for each tile: 0.1 to 0.25 bytes for a score."""
    if len(kernel.diagonals) > CAPTURED_LEAVES:
        raise Inseparable(f"registers hold {CAPTURED_LEAVES} slopes at once")
    diagonals = zip(kernel.shapes, kernel.diagonals, strict=True)
    held = sum(4 * math.prod(x) for x, is_diagonal in diagonals if is_diagonal)
    if held > _MOST:
        raise Inseparable(f"sums along diagonals would take {held} bytes")


def _by_difference(
    found: Float[Array, "B H R C P E"],
    lengths: tuple[int, int],
    mask: BlockMask | None,
) -> Float[Array, "B H N"]:
    """The sums along diagonals of tiles, put together: from key S - 1 to query T - 1.

    Args:
        found: The e-th of the tile in row r and column c is that of the difference
            64 r - N (c + 1) + e + 1, of tiles of 64 rows and N columns; P are added.
        lengths: Queries and keys.
        mask: Says which tiles are visited; None for all.
    """
    (T, S), N = lengths, found.shape[5] - UNIT
    if mask is not None:
        is_visited = _visited(mask, (found.shape[2], found.shape[3]), N)
        found = jnp.where(is_visited[..., None, None], found, 0)
    found = jnp.flip(jnp.sum(found, axis=4), axis=3)
    B, H, R, C, _ = found.shape
    first, rest = found[..., :N], found[..., N:]
    rest = jnp.pad(rest, [(0, 0)] * 4 + [(0, N - UNIT)])
    before, behind = [(0, 0)] * 3 + [(N, 0)], [(0, 0)] * 3 + [(0, N)]
    lines = jnp.pad(first.reshape(B, H, R, -1), behind)
    lines += jnp.pad(rest.reshape(B, H, R, -1), before)
    # A row begins 64 behind the one before: so it does in rows that are 64 shorter.
    length = N * (C + 1) + UNIT * (R - 1)
    lines = jnp.pad(lines, [(0, 0)] * 3 + [(0, length + UNIT - lines.shape[3])])
    lines = lines.reshape(B, H, -1)[..., : R * length].reshape(B, H, R, length)
    start = N * C - S
    return jnp.sum(lines, axis=2)[..., start : start + T + S - 1]


def _visited(mask: BlockMask, tiles: tuple[int, int], columns: int) -> Array:
    """Which tiles are visited, of so many rows and columns of tiles."""
    found = mask.to_dense() != 0
    for axis, (n, size) in enumerate(zip(tiles, (UNIT, columns), strict=True), 2):
        found = jnp.repeat(found, mask.block_size[axis - 2] // size, axis=axis)
        missing = max(0, n - found.shape[axis])
        widths = [(0, missing if a == axis else 0) for a in range(found.ndim)]
        found = lax.slice_in_dim(jnp.pad(found, widths), 0, n, axis=axis)
    return found


class _Arrays(NamedTuple):
    """The operands of a kernel, and the references to them.

    Attributes:
        stay: Queries and cotangents of the output, or keys and values.
        visit: The other pair.
        statistics: Of each query.
        lists: Of the mask; or ().
        mods: What mods are given.
    """

    stay: Any
    visit: Any
    statistics: Any
    lists: Any
    mods: Any


@dataclass(frozen=True)
class _Scratch:
    stay: Any  # of each warpgroup
    visit: Any
    known: Any  # statistics of the queries that are visited
    columns: Any  # what mods know of what is visited
    sums: Any  # of each warpgroup's rows, for each leaf
    tiles: Any  # of each warpgroup, whose diagonals are added
    stay_here: Any
    here: Any  # barriers of what is visited: loaded
    free: Any  # read by all


@dataclass(frozen=True)
class _Captured:
    """The kernel; for each leaf `diagonals` says whether its sums are along these."""

    gradient: Gradient
    diagonals: tuple[bool, ...]

    def __call__(self, arrays: _Arrays) -> list[Array]:
        leaves, tree = jax.tree.flatten(arrays)
        config = self.gradient.config

        def body(refs: Any, scratch: Any) -> None:
            given = jax.tree.unflatten(tree, refs[: len(leaves)])
            _ThreadBlock(self, given, refs[len(leaves) :], _Scratch(*scratch)).run()

        return run_kernel(
            body,
            self.scratch(arrays),
            self.grid.sizes,
            config,
            self.gradient.call.interpret,
            out_type=[jax.ShapeDtypeStruct(x, jnp.float32) for x in self.shapes],
            has_own_barriers=not config.has_mover,
        )(*leaves)

    def scratch(self, arrays: _Arrays) -> tuple[Any, ...]:
        """What the fields of `_Scratch` are."""
        gradient, config = self.gradient, self.gradient.config
        smem = partial(shared_memory, gradient.dtype)
        floats = partial(plgpu.SMEM, dtype=jnp.float32)
        barriers = partial(plgpu.Barrier, num_barriers=config.stages)
        known = arrays.statistics if gradient.rows == "k" else ()
        more = len(known) + len(gradient.columns.places)
        tile = config.groups, UNIT, config.columns + _APART
        return (
            [smem(config.groups, config.rows, x.shape[3]) for x in arrays.stay],
            [smem(config.stages, config.columns, x.shape[3]) for x in arrays.visit],
            [floats((config.stages, config.columns)) for _ in known],
            gradient.columns.scratch(),
            floats((config.groups, len(self.diagonals), config.rows)),
            floats(tile) if any(self.diagonals) else (),
            plgpu.Barrier(num_arrivals=2, num_barriers=config.groups),
            [barriers(num_arrivals=1 + n) for n in (more, 0)],
            [barriers(num_arrivals=config.groups) for _ in arrays.visit],
        )

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the sums for each leaf."""
        config, sizes = self.gradient.config, self.gradient.call.sizes
        rows, (B, H) = self.grid.tiles * config.span, (sizes["b"], sizes["h"])
        of_tiles = rows // UNIT, self.column_tiles, _LANES // config.columns
        of_diagonals = B, H, *of_tiles, UNIT + config.columns
        return [of_diagonals if x else (B, H, rows) for x in self.diagonals]

    @property
    def grid(self) -> Grid:
        """Thread blocks for the rows of each query head."""
        sizes, config = self.gradient.call.sizes, self.gradient.config
        tiles = -(-sizes[self.gradient.rows] // config.span)
        return Grid(sizes["b"], sizes["h"], tiles, config.gathers_heads)

    @property
    def column_tiles(self) -> int:
        """Of a row of tiles, as many as may be visited."""
        gradient = self.gradient
        length = gradient.call.sizes["k" if gradient.rows == "q" else "q"]
        whole = reach(gradient.config, gradient.blocks)
        return -(-length // whole) * whole // gradient.config.columns


@dataclass(frozen=True)
class _ThreadBlock:
    """One thread block: `run` is what each of its warpgroups does."""

    kernel: _Captured
    arrays: _Arrays
    outputs: Any
    scratch: _Scratch

    def run(self) -> None:
        config, side = self.side.gradient.config, self.side
        b, h, tile = self.kernel.grid.place()
        group, first = lax.axis_index("wg"), tile * config.span
        compute, move = config.registers
        if not config.has_mover:
            self.compute(group, b, h, first)
            return

        @pl.when(group < config.groups)
        def _() -> None:
            plgpu.set_max_registers(compute, action="increase")
            self.compute(group, b, h, first)

        @pl.when(group == config.groups)
        def _() -> None:
            plgpu.set_max_registers(move, action="decrease")
            side.move(b, h, first)

    @property
    def side(self) -> OneSide:
        """What the rows are combined with."""
        return OneSide(self.kernel.gradient, self.arrays, self.scratch)

    def compute(self, group: Any, b: Any, h: Any, first: Any) -> None:
        """A warpgroup's sums."""
        gradient, side = self.kernel.gradient, self.side
        config, call = gradient.config, gradient.call
        mine = first + group * config.rows
        self.load(group, b, h, mine)
        visits = side.visits(b, h, first)
        if not config.has_mover:
            side.load_first(visits, i32(0), (b, h))
        whole = reach(config, gradient.blocks)
        tile = Tile(
            b, h, mine, config, whole, gradient.rows, call.sizes, call.interpret
        )
        mods = on_tile(tile, (gradient.score, gradient.mask), self.arrays.mods)
        step = _Step(self, group, visits, Weights(gradient, tile, *mods))
        known = self.row_statistics(b, h, mine)
        full, partly = (partial(step, known, x) for x in (True, False))
        sums = [zeros(config.rows) for x in self.kernel.diagonals if not x]
        sums = lax.fori_loop(i32(0), visits.full, full, sums)
        sums = lax.fori_loop(visits.full, visits.total, partly, sums)
        self.store(group, (b, h, pl.ds(mine, config.rows)), sums)

    def load(self, group: Any, b: Any, h: Any, first: Any) -> None:
        """A warpgroup's rows of what stays."""
        gradient, here = self.kernel.gradient, self.scratch.stay_here.at[group]
        rows = pl.ds(first, gradient.config.rows)
        place = (b, h) if gradient.rows == "q" else gradient.call.place_of_keys(b, h)
        for array, buffer in zip(self.arrays.stay, self.scratch.stay, strict=True):
            at = array.at[place[0], rows, place[1]]
            plgpu.copy_gmem_to_smem(at, buffer.at[group], here)
        plgpu.barrier_wait(here)

    def row_statistics(self, b: Any, h: Any, first: Any) -> list[Any] | None:
        """Those of queries, where these are the rows."""
        if self.kernel.gradient.rows == "k":
            return None
        rows = pl.ds(first, self.kernel.gradient.config.rows)
        load = partial(plgpu.load, layout=ROW, optimized=False)
        return [load(x.at[b, h, rows]) for x in self.arrays.statistics]

    def store(self, group: Any, at: Any, sums: Sequence[Any]) -> None:
        """A warpgroup's sums over rows."""
        outputs = zip(self.outputs, self.kernel.diagonals, strict=True)
        of_rows = [out for out, is_diagonal in outputs if not is_diagonal]
        gradient = self.kernel.gradient
        await_other_warps(gradient.config, gradient.call.interpret)
        for n, (x, out) in enumerate(zip(sums, of_rows, strict=True)):
            buffer = self.scratch.sums.at[group, n]
            buffer[...] = x
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, out.at[at])
        await_copies_read()


@dataclass(frozen=True)
class _Step:
    """One visit, which adds to the sums of the rows, or writes those of diagonals."""

    block: _ThreadBlock
    group: Any
    visits: Visits
    weights: Weights

    def __call__(self, rows: Any, is_full: bool, i: Any, sums: Any) -> Any:
        kernel, side, tile = self.block.kernel, self.block.side, self.weights.tile
        slot, (first, met) = lax.rem(i, i32(tile.config.stages)), self.visits.place(i)
        free = side.releases(self.visits, (tile.b, tile.h), i, i)
        columns = self.block.scratch.columns, slot
        scores = side.product(0, slot)
        *shifts, delta = side.statistics(tile, rows, slot)
        weights, *slopes = self.weights.of_mod(scores, first, shifts, columns)
        if not is_full:
            weights = self.weights.hide(first, weights, columns, met)
        d_scores = weights * (side.product(1, slot) - delta)
        for release in free:
            release()
        left, found = iter(sums), []
        for n, slope in enumerate(slopes):
            # Of what is hidden the slope, or a value, may be anything.
            x = jnp.where(weights == 0, 0.0, d_scores * slope)
            if kernel.diagonals[n]:
                self.add_diagonals(n, x, first)
            else:
                found.append(next(left) + x.sum(axis=1))
        return found

    def add_diagonals(self, n: int, x: Any, first: Any) -> None:
        """Writes the sums along the diagonals of the n-th leaf."""
        tile = self.weights.tile
        if (is_real := tile.is_row_real()) is not None:  # rows meet others here
            x = jnp.where(is_real, x, 0.0)
        place = [
            lax.div(i32(y), i32(m))
            for y, m in zip((tile.first, first), x.shape, strict=True)
        ]
        out = self.block.outputs[n].at[(tile.b, tile.h, *place)]
        if not tile.interpret:
            memory = self.block.scratch.tiles.at[self.group]
            add_diagonals(x, TILE, memory, out)
            return
        rows, columns = x.shape
        x = jnp.pad(x[:, ::-1], [(0, 0), (0, rows)])  # each row one behind the other
        length = rows + columns - 1
        x = x.reshape(-1)[: rows * length].reshape(rows, length).sum(axis=0)
        whole = jnp.zeros(out.shape, x.dtype)
        out[...] = whole.at[0, :length].set(x)
