"""A thread block of the forward kernel: a warpgroup moves, the others compute.

What they do is said in `mosaic_gpu`; one step is a visit of a tile of queries to a tile
of keys and values.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pliax.core._jax import store_rows, take_number

from .mosaic_gpu_conditions import Condition, all_meet, hide
from .mosaic_gpu_merging import join
from .mosaic_gpu_next_tiles import NextTiles
from .mosaic_gpu_tiles import (
    ROW,
    TILE,
    ModOnTile,
    Tile,
    Verdict,
    accumulate,
    add_seen,
    await_copies,
    await_copies_read,
    i32,
    load_row,
    multiply,
    on_tile,
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
    turn: Any  # where warpgroups that compute wait for each other
    verdict: Any
    next: Any  # tiles, where a thread block takes several
    counter: Any  # in global memory: how many tiles were taken


@dataclass(frozen=True)
class ThreadBlock:
    """One thread block: `run` is what each of its warpgroups does."""

    kernel: Any  # of `mosaic_gpu`
    arrays: Any
    outputs: Any
    scratch: Scratch

    def run(self) -> None:
        """What one warpgroup does."""
        config, group = self.kernel.config, lax.axis_index("wg")
        compute, move = config.registers
        if not config.has_mover:
            self.compute_all(group)
            return

        @pl.when(group < config.groups)
        def _() -> None:
            plgpu.set_max_registers(compute, action="increase")
            self.compute_all(group)

        @pl.when(group == config.groups)
        def _() -> None:
            plgpu.set_max_registers(move, action="decrease")
            self.move_all(group)

    # --- the tiles of a thread block ---

    def over_tiles(self, body: Any, following: Any) -> Any:
        """`body(place, visits, then, before)` for each tile of a thread block.

        Args:
            body: Gets where the tile is, `(b, h, first)`, its visits, how to hear of
                the next one, and how many visits were made for those before; None and
                None if it is the only tile. It asks once, when nobody needs its queries
                any more, and returns what it heard: the number of the next one, and its
                counts.
            following: From k and the k-th tile's number to what is said of the next.

        Returns:
            How many tiles there were, and visits for all; None if there is one.
        """
        kernel, axes = self.kernel, lax.axis_index
        if not kernel.is_persistent:
            place = self.place(axes("batch"), axes("heads"), axes("tiles"))
            body(place, self.visits(*place), None, None)
            return None

        def one(carry: Any) -> Any:
            k, n, counts, before = carry
            place = self.nth(n)
            visits = self.visits(*place, counts)
            heard = body(place, visits, partial(following, k, n), before)
            return k + 1, *heard, before + visits.total

        n = axes("workers")
        start = i32(0), n, self.counts(n), i32(0)
        is_left = lambda carry: carry[1] < kernel.tiles_in_all  # noqa: E731
        k, *_, count = lax.while_loop(is_left, one, start)
        return k, count

    def nth(self, n: Any) -> tuple[Any, Any, Any]:
        """Where the n-th tile is."""
        batch, tiles = self.kernel.call.sizes["b"], self.kernel.tiles
        n, b = lax.div(n, i32(batch)), lax.rem(n, i32(batch))
        return self.place(b, lax.div(n, i32(tiles)), lax.rem(n, i32(tiles)))

    def counts(self, n: Any) -> tuple[Any, ...]:
        """How many visits the n-th tile makes, or the last if there are not so many."""
        place = self.nth(jnp.minimum(n, self.kernel.tiles_in_all - 1))
        return self.blocks.counts(self.lists, *place)

    def take_next(self, k: Any, n: Any) -> tuple[Any, tuple[Any, ...]]:
        """Takes a tile that nobody has, and tells the warpgroups that compute."""
        workers = self.kernel.workers

        def take(to: Any) -> None:
            if self.kernel.call.interpret:  # thread blocks run one after another
                to[...] = n + workers
            else:
                take_number(self.scratch.counter.at[0], to, workers)

        return NextTiles(*self.scratch.next).tell(k, take, self.counts)

    def hear_next(self, k: Any, n: Any) -> tuple[Any, tuple[Any, ...]]:
        """What the warpgroup that moves has taken."""
        return NextTiles(*self.scratch.next).hear(k, self.blocks.counted)

    def place(self, b: Any, h: Any, n: Any) -> tuple[Any, Any, Any]:
        """Of a head's n-th tile, the last first: under a causal mask it has most."""
        tile = self.kernel.tiles - 1 - n
        return b, h, tile * self.kernel.config.span

    @property
    def lists(self) -> Any:
        """The mask's; None without one."""
        return self.arrays[1] if self.kernel.has_lists else None

    @property
    def blocks(self) -> Blocks:
        """What the lists are of."""
        call, config = self.kernel.call, self.kernel.config
        return Blocks(call.blocks, call.sizes["k"], config, call.lists_tell)

    def visits(self, b: Any, h: Any, first: Any, counts: Any = None) -> Visits:
        """The keys that a tile of queries sees."""
        visits = self.blocks.visits(self.lists, b, h, first, counts)
        if self.kernel.splits is None:
            return visits
        return visits.part(lax.axis_index("parts"), self.kernel.splits)

    @property
    def verdict(self) -> Verdict | None:
        """Whether something hidden spoiled the output; None if nothing is hidden."""
        return Verdict(*self.scratch.verdict) if self.scratch.verdict else None

    # --- the warpgroup that moves keys and values ---

    def move_all(self, group: Any) -> None:
        """Keys and values of all visits into shared memory, as room becomes free."""

        def one(place: Any, visits: Visits, then: Any, before: Any) -> Any:
            self.move(visits, place, before)
            if then is not None:
                return then()
            self.await_readers(visits.total)
            if self.verdict is None:
                return None

            @pl.when(self.verdict(group))
            def _() -> None:
                self.move(visits, place, None)
                self.await_readers(visits.total)

            return None

        found = self.over_tiles(one, self.take_next)
        if found is not None:
            told, count = found
            self.await_readers(count)
            NextTiles(*self.scratch.next).await_listeners(told)

    def await_readers(self, count: Any) -> None:
        """Nobody leaves before all have read the last of so many visits."""
        stages = self.kernel.config.stages

        @pl.loop(jnp.maximum(count - stages, 0), count)
        def _(i: Any) -> None:
            for free in self.scratch.free:
                plgpu.barrier_wait(free.at[lax.rem(i, i32(stages))])

    def move(self, visits: Visits, place: Any, before: Any) -> None:
        """Those of one tile, after so many visits for others."""
        stages, scratch = self.kernel.config.stages, self.scratch

        @pl.loop(i32(0), visits.total)
        def _(i: Any) -> None:
            first, count = visits.first(i), i if before is None else before + i
            slot = lax.rem(count, i32(stages))
            for side in (0, 1):
                free = scratch.free[side].at[slot]
                pl.when(count >= stages)(partial(plgpu.barrier_wait, free))
                self.load(side, count, first, place)
                if side == 0:
                    at, here = (*place[:2], first), scratch.here[0].at[slot]
                    given = scratch.columns, slot, at, here
                    self.kernel.columns.load(self.arrays[2:], *given)

    def load(self, side: int, i: Any, first: Any, place: Any) -> None:
        """Keys, side 0, or values of the i-th visit."""
        scratch, config = self.scratch, self.kernel.config
        b, h = self.kernel.call.place_of_keys(*place[:2])
        slot, rows = lax.rem(i, i32(config.stages)), pl.ds(first, config.columns)
        array, there = self.arrays[0][1 + side], (scratch.keys, scratch.values)[side]
        here = scratch.here[side].at[slot]
        plgpu.copy_gmem_to_smem(array.at[b, rows, h], there.at[slot], here)

    def load_both(self, visits: Visits, i: Any, place: Any) -> None:
        """Keys and values of the i-th visit."""
        first = visits.first(i)
        for side in (0, 1):
            self.load(side, i, first, place)

    # --- the warpgroups that compute ---

    def compute_all(self, group: Any) -> None:
        """The results of all tiles."""

        def one(place: Any, visits: Visits, then: Any, before: Any) -> Any:
            run = partial(self.compute, visits, group, *self.rows_of(group, place))
            if then is not None:
                return run(before, partial(self.load_next, group, then))
            self.load_queries(group, place)
            is_spoiled = run()
            if is_spoiled is None:
                return None

            @pl.when(is_spoiled)
            def _() -> None:
                await_copies()
                self.load_queries(group, place)
                run(is_careful=True)

            return None

        if not self.kernel.is_persistent:
            self.over_tiles(one, None)
            return
        self.load_queries(group, self.nth(lax.axis_index("workers")))
        self.over_tiles(one, self.hear_next)
        await_copies_read()

    def rows_of(self, group: Any, place: Any) -> tuple[Any, Any, Any]:
        """Where a warpgroup's queries of a tile are."""
        (b, h, first), config = place, self.kernel.config
        return b, h, first + (0 if config.shares_rows else group * config.rows)

    def load_queries(self, group: Any, place: Any) -> None:
        """Those of a warpgroup, of a tile."""
        mine = self.scratch.queries.at[group, 0]
        where = self.arrays[0][0].at[self.kernel.rows(*self.rows_of(group, place))]
        plgpu.copy_gmem_to_smem(where, mine, self.scratch.queries_here.at[group])

    def load_next(self, group: Any, then: Any) -> Any:
        """Those of the next tile, of which it returns what it hears."""
        n, counts = then()
        load = partial(self.load_queries, group)
        pl.when(n < self.kernel.tiles_in_all)(lambda: load(self.nth(n)))
        return n, counts

    def compute(
        self,
        visits: Visits,
        group: Any,
        b: Any,
        h: Any,
        first: Any,
        before: Any = None,
        after: Any = None,
        *,
        is_careful: bool = False,
    ) -> Any:
        """Stores the results.

        Args:
            visits: What the tile sees.
            group: Which warpgroup this is.
            b: Sequence.
            h: Query head.
            first: The first query.
            before: Visits that were made for other tiles; None if there are none.
            after: What can be done once nobody needs the queries; None for nothing.
            is_careful: Whether something hidden may not be finite.

        Returns:
            What `after` does; without it whether something hidden spoiled the results,
            or None if nothing is hidden.
        """
        config, call, scratch = self.kernel.config, self.kernel.call, self.scratch
        mine = scratch.queries.at[group, 0]
        if not config.has_mover:
            for n in range(config.stages):
                early = partial(self.load_both, visits, i32(n), (b, h))
                pl.when(n < visits.total)(early)
        whole = reach(config, call.blocks)
        tile = Tile(b, h, first, config, whole, "q", call.sizes, call.interpret)
        mods = self.kernel.score, self.kernel.mask
        score, mask = on_tile(tile, mods, self.arrays[2:])
        plgpu.barrier_wait(scratch.queries_here.at[group])
        turn = group if config.shares_rows else i32(0)
        step = _Step(self, visits, turn, mine, score, mask, tile, is_careful, before)
        here = scratch.here[0].at[step.slot(turn)]
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
        heard = None if after is None else after()
        self.store(group, (b, h, first), *carry)
        return is_spoiled if after is None else heard

    def take_turn(self, condition: Any = None) -> None:
        """Lets the other warpgroup have the tensor cores, and waits for it."""
        if not self.kernel.config.takes_turns:
            return

        self.meet() if condition is None else pl.when(condition)(self.meet)

    def store(self, group: Any, place: Any, acc: Any, top: Any, total: Any) -> None:
        """Results of whole rows, or the sums of a part."""
        if self.kernel.is_linear:
            top = top * self.kernel.call.scale
        if self.kernel.splits is not None:
            put = self.put_joined if self.kernel.config.shares_rows else self.put
            put(group, self.of_part(place), acc, top, total)
            return
        is_empty = total == 0
        some = jnp.where(is_empty, 1.0, total)
        acc = acc * lax.broadcast_in_dim(1 / some, acc.shape, [0])
        log_sum = jnp.log2(some) * (1 / LOG2E)
        if self.kernel.is_inference:
            (b, h, first), rows = place, self.kernel.config.rows
            for ref, x in zip(self.outputs[1:], (top + log_sum, top), strict=True):
                store_rows(ref.at[b, pl.ds(first, rows), h], x)
            self.put(group, place, acc)
            return
        self.put(group, place, acc, top, log_sum)

    def of_part(self, place: Any) -> Any:
        """Where the sums of a part are: parts stand where sequences do."""
        b, h, first = place
        return lax.axis_index("parts") * self.kernel.call.sizes["b"] + b, h, first

    def put_joined(self, group: Any, place: Any, *sums: Any) -> None:
        """Copies what all warpgroups have found for the same rows, as one part."""
        shape = sums[0].shape

        @pl.when(group > 0)
        def _() -> None:
            self.keep(group, *sums)
            self.meet()
            self.meet()

        @pl.when(group == 0)
        def _() -> None:
            self.meet()
            others = map(self.kept, range(1, self.kernel.config.groups))
            joined = join(
                [sums, *others], lambda x: lax.broadcast_in_dim(x, shape, [0])
            )
            self.meet()
            self.put(group, place, *joined)

    def meet(self) -> None:
        """Waits for the other warpgroups that compute."""
        plgpu.barrier_arrive(self.scratch.turn)
        plgpu.barrier_wait(self.scratch.turn)

    def keep(self, group: Any, acc: Any, *statistics: Any) -> None:
        """Leaves what a warpgroup has found in shared memory."""
        out = self.scratch.output.at[group]
        out[...] = acc.astype(out.dtype)
        for n, x in enumerate(statistics):
            self.scratch.statistics.at[n, group][...] = x
        plgpu.commit_smem()

    def kept(self, group: int) -> tuple[Any, Any, Any]:
        """What a warpgroup has left there: output, maximum and sum of its rows."""
        load = partial(plgpu.load, layout=ROW, optimized=False)
        top, total = (load(self.scratch.statistics.at[n, group]) for n in (0, 1))
        return plgpu.load(self.scratch.output.at[group], layout=TILE), top, total

    def put(self, group: Any, place: Any, acc: Any, *statistics: Any) -> None:
        """Copies what a warpgroup has found."""
        b, h, first = place
        rows, scratch = pl.ds(first, self.kernel.config.rows), self.scratch
        out = scratch.output.at[group]
        if self.kernel.is_persistent:  # what it found for the tile before is on its way
            await_copies_read()
        self.keep(group, acc, *statistics)
        plgpu.copy_smem_to_gmem(out, self.outputs[0].at[self.kernel.rows(*place)])
        for n, _ in enumerate(statistics):
            there = self.outputs[1 + n].at[b, h, rows]
            plgpu.copy_smem_to_gmem(scratch.statistics.at[n, group], there)
        if not self.kernel.is_persistent:
            await_copies_read()


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
    before: Any  # visits for other tiles; None if there are none

    def slot(self, i: Any) -> Any:
        """Where the keys and values of the i-th visit are."""
        i = i if self.before is None else self.before + i
        return lax.rem(i, i32(self.tile.config.stages))

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
        scratch, slot = block.scratch, self.slot(i)
        # Beside the product: lists are far away.
        (first, met), following = self.place(i, is_full), self.following(i)
        scores, seen = multiply(
            self.queries, scratch.keys.at[slot], partial(self.meanwhile, first, is_full)
        )
        known = self.known(slot, is_full)
        self.release(0, i, following)
        weights, top, decay, added = self.soften(
            scores, top, first, met, is_full, known, seen
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
        self.release(1, i, following)
        return acc, top, total

    def meanwhile(self, first: Any, is_full: bool) -> list[Any]:
        """While the tensor cores work: what hides scores, where no list tells it.

        To ask later, and only what is not known to be met, takes less: 0.9 of the time
        for documents of 341 tokens (64 channels, one H100).
        """
        self.block.take_turn()
        lists_tell = self.block.kernel.call.lists_tell
        if is_full or lists_tell or self.tile.config.has_mover:
            return []
        asked = self.conditions(first, {})
        return [all_meet(asked)] if asked else []

    def following(self, i: Any) -> Any:
        """Where what takes the place of the i-th visit begins, if this loads it."""
        config = self.tile.config
        return None if config.has_mover else self.visits.ahead(i, config.stages)

    def release(self, side: int, i: Any, following: Any) -> None:
        """Keys or values that have been read make room for others."""
        config, scratch = self.tile.config, self.block.scratch
        if config.has_mover:
            plgpu.barrier_arrive(scratch.free[side].at[self.slot(i)])
            return
        ahead = i + config.stages

        @pl.when(ahead < self.visits.total)
        def _() -> None:
            plgpu.commit_smem()  # all warps have read
            place = self.tile.b, self.tile.h
            self.block.load(side, ahead, following, place)

    def known(self, slot: Any, is_full: bool) -> list[dict[int, Any]]:
        """What score_mod and mask_mod know of the keys, where it came with them."""
        there = self.block.scratch.columns
        known = partial(self.block.kernel.columns.known, there, slot)
        return [known(self.score), known(None if is_full else self.mask)]

    def place(self, i: Any, is_full: bool) -> tuple[Any, Any]:
        """The first key of a visit, and what is met; None where nobody asks for it."""
        is_asked = self.score is not None or not is_full
        return self.visits.place(i) if is_asked else (None, None)

    def soften(
        self,
        scores: Any,
        top: Any,
        first: Any,
        met: Any,
        is_full: bool,
        known: Any,
        seen: Any,
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
            asked = [Condition.of(x) for x in seen]
            asked = asked or self.conditions(first, known[1], met)
            scores = hide(scores, -jnp.inf, asked)
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
        seen = all_meet(self.conditions(first, known))
        place = self.block.kernel.call.place_of_keys(tile.b, tile.h)
        row = partial(load_row, value, place, first, tile.sizes["k"])
        return add_seen(acc, weights.astype(jnp.float32), seen, row)

    def conditions(self, first: Any, known: Any, met: Any = None) -> list[Condition]:
        """What hides scores of a partial block."""
        real = self.tile.is_column_real(first)
        found = [] if real is None else [Condition.of(real)]
        if self.mask is None:
            return found
        return [*found, *self.mask.conditions(first, known, met)]

    def await_values(self, slot: Any) -> None:
        takes_turns = self.block.kernel.config.takes_turns
        turn = self.block.scratch.turn
        if takes_turns:
            plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(self.block.scratch.here[1].at[slot])
        if takes_turns:
            plgpu.barrier_wait(turn)

    def await_next_keys(self, i: Any) -> None:
        following = i + self.block.kernel.config.takers
        here = self.block.scratch.here[0].at[self.slot(following)]
        wait = partial(plgpu.barrier_wait, here)
        pl.when(following < self.visits.total)(wait)
