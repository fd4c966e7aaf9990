"""A thread block of the forward kernel: a warpgroup moves, the others compute.

What they do is said in `mosaic_gpu`; one step is a visit of a tile of queries to a tile
of keys and values.
"""

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .mosaic_gpu_tiles import (
    ModOnTile,
    Tile,
    Verdict,
    accumulate,
    add_seen,
    i32,
    load_row,
    multiply,
    on_tile,
    window,
    zeros,
)
from .mosaic_gpu_visits import Blocks, Visits, reach
from .row_statistics import LOG2E


@dataclass(frozen=True)
class Scratch:
    """What the warpgroups of a thread block share."""

    queries: Any  # of each warpgroup
    output: Any  # likewise
    keys: Any
    values: Any
    columns: Any  # what mods know of keys
    statistics: Any
    queries_here: Any
    here: Any  # barriers of keys and values: loaded
    free: Any  # read by all
    turn: Any
    verdict: Any


@dataclass(frozen=True)
class ThreadBlock:
    """One thread block: `run` is what each of its warpgroups does."""

    kernel: Any  # of `mosaic_gpu`
    arrays: Any
    outputs: Any
    scratch: Scratch

    def run(self) -> None:
        """What one warpgroup does."""
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

        def compute_all() -> None:
            own = 0 if config.shares_rows else group
            place = b, h, tile * config.span + own * config.rows
            is_spoiled = self.compute(visits, group, *place)
            if is_spoiled is not None:
                again = partial(self.compute, visits, group, *place, is_careful=True)
                pl.when(is_spoiled)(again)

        if not config.has_mover:
            compute_all()
            return

        @pl.when(group < config.groups)
        def _() -> None:
            plgpu.set_max_registers(compute, action="increase")
            compute_all()

        @pl.when(group == config.groups)
        def _() -> None:
            plgpu.set_max_registers(move, action="decrease")
            self.move(visits, b, h)
            if self.verdict is not None:
                pl.when(self.verdict(group))(partial(self.move, visits, b, h))

    @property
    def verdict(self) -> Verdict | None:
        """Whether something hidden spoiled the output; None if nothing is hidden."""
        return Verdict(*self.scratch.verdict) if self.scratch.verdict else None

    # --- the warpgroup that moves keys and values ---

    def move(self, visits: Visits, b: Any, h: Any) -> None:
        """Keys and values of all visits into shared memory, as room becomes free."""
        stages, scratch = self.kernel.config.stages, self.scratch

        @pl.loop(i32(0), visits.total)
        def _(i: Any) -> None:
            slot, first = lax.rem(i, i32(stages)), visits.first(i)
            for side in (0, 1):
                free = scratch.free[side].at[slot]
                pl.when(i >= stages)(partial(plgpu.barrier_wait, free))
                self.load(side, i, first, (b, h))
                if side == 0:
                    here = scratch.here[0].at[slot]
                    self.move_columns((b, h), first, slot, here)

        @pl.loop(jnp.maximum(visits.total - stages, 0), visits.total)
        def _(i: Any) -> None:  # nobody leaves before all have read
            for free in scratch.free:
                plgpu.barrier_wait(free.at[lax.rem(i, i32(stages))])

    def load(self, side: int, i: Any, first: Any, place: Any) -> None:
        """Keys, side 0, or values of the i-th visit."""
        scratch, config = self.scratch, self.kernel.config
        b, h = self.kernel.call.place_of_keys(*place)
        slot, rows = lax.rem(i, i32(config.stages)), pl.ds(first, config.columns)
        array, there = self.arrays[0][1 + side], (scratch.keys, scratch.values)[side]
        here = scratch.here[side].at[slot]
        plgpu.copy_gmem_to_smem(array.at[b, rows, h], there.at[slot], here)

    def load_both(self, visits: Visits, i: Any, place: Any) -> None:
        """Keys and values of the i-th visit."""
        first = visits.first(i)
        for side in (0, 1):
            self.load(side, i, first, place)

    def move_columns(self, place: Any, first: Any, slot: Any, here: Any) -> None:
        """What mods know of the keys of a visit."""
        kernel = self.kernel
        pairs = zip(kernel.moved, self.scratch.columns, strict=True)
        for (n, number), there in pairs:
            item, ref = kernel.mods[n].separated.hoisted[number], self.arrays[2 + n]
            x = window(item, ref[number], place, first, kernel.config.columns)
            plgpu.copy_gmem_to_smem(x, there.at[slot], here)

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
        if not config.has_mover:
            for n in range(config.stages):
                early = partial(self.load_both, visits, i32(n), (b, h))
                pl.when(n < visits.total)(early)
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
        """Results of whole rows, or the sums of a part."""
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
        """Copies what a warpgroup has found."""
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

    block: ThreadBlock
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
        # A short visit would wait for its list: it is read beside the product.
        is_early = block.kernel.splits is not None or not config.has_mover
        first = self.first(i, is_full) if is_early else None
        scores, seen = multiply(
            self.queries, scratch.keys.at[slot], partial(self.meanwhile, first, is_full)
        )
        known = self.known(slot, is_full)
        self.release(0, i)
        first = first if is_early else self.first(i, is_full)
        weights, top, decay, added = self.soften(
            scores, top, first, is_full, known, seen
        )
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        total = total * decay + added
        acc, top, total, weights = lax.optimization_barrier((acc, top, total, weights))
        self.await_values(slot)
        if self.is_careful and not is_full:
            acc = self.add_seen(acc, weights, self.visits.first(i), known[1])
            self.await_next_keys(i)
        else:
            acc = accumulate(
                acc, weights, scratch.values.at[slot], self.tile.interpret,
                partial(self.await_next_keys, i),
            )  # fmt: skip
        self.release(1, i)
        return acc, top, total

    def meanwhile(self, first: Any, is_full: bool) -> list[Any]:
        """While the tensor cores work: what hides scores."""
        self.block.take_turn()
        if is_full or self.tile.config.has_mover:
            return []
        parts = self.visible(first, {})
        return [functools.reduce(jnp.logical_and, parts)] if parts else []

    def release(self, side: int, i: Any) -> None:
        """Keys or values that have been read make room for others."""
        config, scratch = self.tile.config, self.block.scratch
        if config.has_mover:
            slot = lax.rem(i, i32(config.stages))
            plgpu.barrier_arrive(scratch.free[side].at[slot])
            return
        ahead = i + config.stages

        @pl.when(ahead < self.visits.total)
        def _() -> None:
            plgpu.commit_smem()  # all warps have read
            place = self.tile.b, self.tile.h
            self.block.load(side, ahead, self.visits.first(ahead), place)

    def known(self, slot: Any, is_full: bool) -> list[dict[int, Any]]:
        """What score_mod and mask_mod know of the keys, where it came with them."""
        found, mods = [], iter(range(len(self.block.kernel.mods)))
        given = list(
            zip(self.block.kernel.moved, self.block.scratch.columns, strict=True)
        )
        for mod, is_asked in ((self.score, True), (self.mask, not is_full)):
            n = None if mod is None else next(mods)
            refs = {number: x.at[slot] for (m, number), x in given if m == n}
            found.append(mod.columns_in(refs) if mod is not None and is_asked else {})
        return found

    def first(self, i: Any, is_full: bool) -> Any:
        """The first key of a visit; None where nobody asks for it."""
        return None if is_full and self.score is None else self.visits.first(i)

    def soften(
        self, scores: Any, top: Any, first: Any, is_full: bool, known: Any, seen: Any
    ) -> Any:
        """Weights in half precision, the new maximum, exp(old - new), and the sum."""
        kernel, factor = self.block.kernel, LOG2E
        if kernel.is_linear:
            factor *= kernel.call.scale
        else:
            scores = scores * kernel.call.scale
        if self.score is not None:
            (scores,) = self.score(first, scores, known[0])
        if not is_full:
            for visible in seen or self.visible(first, known[1]):
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

    def add_seen(self, acc: Any, weights: Any, first: Any, known: Any) -> Any:
        """What is seen of each value in turn, instead of a product."""
        tile, value = self.tile, self.block.arrays[0][2]
        seen = functools.reduce(jnp.logical_and, self.visible(first, known))
        place = self.block.kernel.call.place_of_keys(tile.b, tile.h)
        row = partial(load_row, value, place, first, tile.sizes["k"])
        return add_seen(acc, weights.astype(jnp.float32), seen, row)

    def visible(self, first: Any, known: Any) -> list[Any]:
        """What hides scores of a partial block."""
        real = self.tile.is_column_real(first)
        parts = [] if real is None else [real]
        return parts if self.mask is None else [*parts, *self.mask(first, known=known)]

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
