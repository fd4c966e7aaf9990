"""A thread block of the backward kernel: two warpgroups move, the others compute.

What they do is said in `mosaic_gpu_vjp`; one step is a visit of a tile of keys, on its
side, to a tile of queries.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pliax.core._jax import take_number

from .mosaic_gpu_backward_step import SQUARE, Squares, Step
from .mosaic_gpu_copies import await_copies, await_copies_read
from .mosaic_gpu_gradients import Gradient, Weights
from .mosaic_gpu_next_tiles import NextTiles
from .mosaic_gpu_tiles import (
    Tile,
    i32,
    make_finite,
    on_tile,
    zeros,
)
from .mosaic_gpu_visits import Backwards, Blocks, reach


@dataclass(frozen=True)
class Scratch:
    """What the warpgroups of a thread block share."""

    d_scores: Any  # of all warpgroups: of this visit, and the one before
    d_keys: Any  # in the same place: dk and dv, where a thread block takes many tiles
    stay: Any  # of each warpgroup; of one tile its gradients in the end
    finite_keys: Any  # for what is added to dq, where nobody may see a key
    visit: Any
    known: Any  # statistics of the queries that are visited
    columns: Any  # what mods know of them
    squares: Any  # of dq
    stay_here: Any
    here: Any  # barriers of what is visited: loaded
    free: Any  # read by all
    exchanged: Any
    added: Any  # squares written
    taken: Any  # squares read
    next: Any  # tile, where a thread block takes many
    now: Any  # the tile of each warpgroup: number, sequence, head, tile of a head
    counters: Any  # in global memory, of `counters_of`


def counters_of(sequences: int, heads: int, tiles: int) -> tuple[int, int, int]:
    """How often each tile of dq was added to, and at `taken_at` how many were taken."""
    return sequences, heads, tiles + 1


def taken_at(counters: tuple[int, ...]) -> tuple[int, int, int]:
    """Where the number of tiles of keys is that thread blocks have taken."""
    return 0, 0, counters[2] - 1


@dataclass(frozen=True)
class Order:
    """In which order tiles are taken: of some heads all, then of some others.

    Attributes:
        heads: Of all sequences.
        tiles: Of keys of a head.
        together: Heads whose n-th tiles follow each other.
        of_sequence: Heads of a sequence.
    """

    heads: int
    tiles: int
    together: int
    of_sequence: int

    @property
    def total(self) -> int:
        """Of all heads."""
        return self.heads * self.tiles

    @property
    def grid(self) -> dict[str, int]:
        """Thread blocks by name, where each has one tile."""
        many = self.heads // self.together
        return {"many": many, "tiles": self.tiles, "few": self.together}

    def place(self, n: Any = None) -> tuple[Any, Any, Any]:
        """Sequence, head and tile of the n-th, or of a thread block that has one."""
        if n is None:
            many, tile, few = (lax.axis_index(name) for name in self.grid)
        else:
            few, n = lax.rem(n, i32(self.together)), lax.div(n, i32(self.together))
            tile, many = lax.rem(n, i32(self.tiles)), lax.div(n, i32(self.tiles))
        head, of_sequence = many * self.together + few, i32(self.of_sequence)
        return lax.div(head, of_sequence), lax.rem(head, of_sequence), tile


@dataclass(frozen=True)
class ThreadBlock:
    """One thread block: `run` is what each of its warpgroups does."""

    kernel: Any  # of `mosaic_gpu_vjp`
    arrays: Any
    outputs: Any
    scratch: Scratch
    order: Order
    workers: int | None  # thread blocks that take many tiles; None for one each

    def run(self) -> None:
        """What one warpgroup does."""
        config, group = self.gradient.config, lax.axis_index("wg")
        compute, move = config.registers
        if not config.has_mover:
            self.compute_all(group)
            return

        @pl.when(group < config.groups)
        def _() -> None:
            plgpu.set_max_registers(compute, action="increase")
            self.compute_all(group)

        for n, work in enumerate((self.load_all, self.add_all)):

            @pl.when(group == config.groups + n)
            def _(work: Any = work) -> None:
                plgpu.set_max_registers(move, action="decrease")
                work()

    @property
    def gradient(self) -> Gradient:
        """What the gradients are of."""
        return self.kernel.gradient

    # --- the tiles of a thread block ---

    def over_tiles(self, body: Any, following: Any, first: Any = lambda n: None) -> Any:
        """`body(before, then)` for each tile of a thread block.

        Args:
            body: Gets how many visits were made for the tiles before, and how to hear
                the number of the next one, which it asks once; None if there is none.
                It returns how many visits were made by then, and what it heard.
            following: To the number of the next tile, of which it is told whether that
                is the first.
            first: Gets the number of the first of several.

        Returns:
            How many visits were made for all tiles.
        """
        if self.workers is None:
            return body(i32(0), None)[0]

        def one(carry: Any) -> Any:
            n, before = carry
            self.set_now(n)
            count, n = body(before, partial(following, is_first=False))
            return n, count

        first(n := following(is_first=True))
        is_left = lambda carry: carry[0] < self.order.total  # noqa: E731
        return lax.while_loop(is_left, one, (n, i32(0)))[1]

    @property
    def now(self) -> Any:
        """The tile of this warpgroup, which takes many: its number, and its place.

        It is read whenever it is needed: there are no registers for it.
        """
        return self.scratch.now.at[lax.axis_index("wg")]

    def set_now(self, n: Any) -> None:
        """The tile of this warpgroup is another."""
        plgpu.commit_smem()  # all warps have read
        for i, x in enumerate((n, *self.order.place(n))):
            self.now[i] = x
        plgpu.commit_smem()

    def take_next(self, *, is_first: bool) -> Any:
        """Takes a tile that nobody has, and tells the other warpgroups.

        The first one, too: those before a tile, which it waits for, then belong to
        thread blocks that run, however many of them the GPU has room for.
        """

        def take(to: Any) -> None:
            if self.gradient.call.interpret:
                to[...] = self.neighbour(is_first=is_first)
            else:
                counters = self.scratch.counters
                take_number(counters.at[taken_at(counters.shape)], to, start=0)

        return NextTiles(*self.scratch.next).tell(int(not is_first), take)[0]

    def hear_next(self, *, is_first: bool) -> Any:
        """What the warpgroup that loads has taken."""
        return NextTiles(*self.scratch.next).hear(int(not is_first))[0]

    def neighbour(self, *, is_first: bool) -> Any:
        """The next tile in the interpreter, or as many as there are if none is left.

        It runs thread blocks one after another, and the first of the tiles that add to
        a square of dq has to come first: each takes its share of neighbours.
        """
        assert self.workers is not None
        share = -(-self.order.total // self.workers)
        if is_first:
            return lax.axis_index("workers") * share
        n = self.now[0] + 1
        return jnp.where(lax.rem(n, i32(share)) != 0, n, self.order.total)

    def load_keys(self, group: Any, n: Any = None) -> None:
        """Keys and values of a warpgroup, of the n-th tile, or of its only one."""
        b, h, number = self.order.place(n)
        config, here = self.gradient.config, self.scratch.stay_here.at[group]
        rows = pl.ds(number * config.span + group * config.rows, config.rows)
        for array, buffer in zip(self.arrays.stay, self.scratch.stay, strict=True):
            plgpu.copy_gmem_to_smem(array.at[b, rows, h], buffer.at[group], here)

    def load_keys_if_left(self, group: Any, n: Any) -> None:
        """Those of the n-th tile, if there are so many."""
        pl.when(n < self.order.total)(partial(self.load_keys, group, n))

    # --- the warpgroups ---

    def load_all(self) -> None:
        """Queries into shared memory."""
        stages = self.gradient.config.stages

        def one(before: Any, then: Any) -> Any:
            count = self.load_visits(before)
            return count, None if then is None else then()

        count = self.over_tiles(one, self.take_next)

        @pl.loop(jnp.maximum(count - stages, 0), count)
        def _(i: Any) -> None:  # nobody leaves before all have read
            plgpu.barrier_wait(self.scratch.free.at[lax.rem(i, i32(stages))])

        if self.workers is not None:
            NextTiles(*self.scratch.next).await_listeners(1)

    def add_all(self) -> None:
        """What is added to dq, from shared memory."""

        def one(before: Any, then: Any) -> Any:
            self.add_visits()
            return before, None if then is None else then()

        self.over_tiles(one, self.hear_next)

    def compute_all(self, group: Any) -> None:
        """A warpgroup's dk and dv of all tiles."""
        run = partial(self.compute_tiles, group)
        if not self.arrays.rare:
            run(is_careful=False)
            return
        is_rare = self.arrays.rare[0][0] != 0  # apart: it would slow down the rest
        pl.when(is_rare)(partial(run, is_careful=True))
        pl.when(~is_rare)(partial(run, is_careful=False))

    def compute_tiles(self, group: Any, *, is_careful: bool) -> None:
        """The same, with care for what is rare, or without."""
        compute = partial(self.compute, group, is_careful=is_careful)
        load = partial(self.load_keys_if_left, group)
        count = self.over_tiles(compute, self.hear_next, load)
        if self.workers is not None:
            pl.when(count > 0)(partial(self.await_taken, group))

    def await_taken(self, group: Any) -> None:
        """Until what a warpgroup's last visit adds to dq has been read."""
        plgpu.barrier_wait(self.scratch.taken.at[group])

    # --- one tile ---

    @property
    def place(self) -> tuple[Any, Any, Any]:
        """Sequence, head and number of the tile of this warpgroup."""
        if self.workers is None:
            return self.order.place()
        return self.now[1], self.now[2], self.now[3]

    @property
    def first(self) -> Any:
        """Its first key."""
        return self.place[2] * self.gradient.config.span

    @property
    def is_inside(self) -> Any:
        """Whether its rows are keys; None if those of all are.

        What is beyond the end has weights, too: its scores are those of zeros.
        """
        span, n = self.gradient.config.span, self.gradient.call.sizes["k"]
        return None if n % span == 0 else self.first + span <= n

    def visits(self, b: Any, h: Any) -> Backwards:
        """The queries of a head that see the keys, the last ones first."""
        gradient = self.gradient
        length = gradient.call.sizes["q"]
        lists = self.arrays.lists if gradient.blocks else None
        blocks = Blocks(gradient.blocks, length, gradient.config)
        return blocks.backwards(lists, b, h, self.first)

    # --- the warpgroups that move data ---

    def load_visits(self, before: Any) -> Any:
        """Queries into shared memory, after so many others; how many these are now."""
        stages = self.gradient.config.stages

        def one(count: Any, b: Any, h: Any, tile: Any) -> Any:
            slot = lax.rem(count, i32(stages))
            wait = partial(plgpu.barrier_wait, self.scratch.free.at[slot])
            pl.when(count >= stages)(wait)
            for side in (0, 1):
                self.load_side(side, slot, b, h, tile)
            return count + 1

        return self.over_visits(one, before)

    def add_visits(self) -> None:
        """What is added to dq, from shared memory."""

        def one(count: Any, b: Any, h: Any, tile: Any) -> Any:
            for group in range(self.gradient.config.groups):
                plgpu.barrier_wait(self.scratch.added.at[group])
            self.start_to_add(b, h, tile)
            self.finish_adding(b, h, tile)
            return count

        self.over_visits(one, i32(0))

    def over_visits(self, body: Any, carry: Any) -> Any:
        """`body(carry, b, h, tile)` for all queries that see the keys."""

        def of_head(n: Any, carry: Any) -> Any:
            seen = self.gradient.seen_by(n, *self.place[:2])
            visits = self.visits(*seen)

            def one(i: Any, carry: Any) -> Any:
                found, left = carry
                tile, _, left = visits.next(i, left)
                return body(found, *seen, tile), left

            start = carry, visits.start()
            return lax.fori_loop(i32(0), visits.total, one, start)[0]

        return self.gradient.over_heads(of_head, carry)

    def load_side(self, side: int, slot: Any, b: Any, h: Any, tile: Any) -> None:
        """Queries, side 0, or the output's cotangents."""
        config, scratch, arrays = self.gradient.config, self.scratch, self.arrays
        rows = pl.ds(tile * config.columns, config.columns)
        here, buffer = scratch.here[side].at[slot], scratch.visit[side].at[slot]
        plgpu.copy_gmem_to_smem(arrays.visit[side].at[b, rows, h], buffer, here)
        last = len(arrays.known) - 1
        for n in (last,) if side else range(last):
            buffer = scratch.known[n].at[slot]
            plgpu.copy_gmem_to_smem(arrays.known[n].at[b, h, rows], buffer, here)
        if side == 0:
            given = scratch.columns, slot, (b, h, tile * config.columns), here
            self.gradient.columns.load(arrays.mods, *given)

    def start_to_add(self, b: Any, h: Any, tile: Any) -> None:
        """Squares to dq, in their turn."""
        config, scratch = self.gradient.config, self.scratch
        turn = self.turn(b, h, tile)
        if scratch.counters is not None:
            counter = scratch.counters.at[b, h, tile]
            plgpu.semaphore_wait(counter, turn, decrement=False, memory_scope="gpu")
        for group in range(config.groups):
            for n in range(self.kernel.squares):
                square = group * self.kernel.squares + n
                row, column = self.kernel.place_of(square)
                rows = pl.ds(tile * config.columns + row, SQUARE)
                out = self.outputs[2].at[b, rows, h, pl.ds(column, SQUARE)]
                self.add_square(scratch.squares.at[group, n], out, turn)

    def finish_adding(self, b: Any, h: Any, tile: Any) -> None:
        """Squares may be overwritten, and others add to these queries."""
        if self.gradient.config.has_mover:
            await_copies_read()
            for group in range(self.gradient.config.groups):
                plgpu.barrier_arrive(self.scratch.taken.at[group])
        await_copies()
        if self.scratch.counters is not None:
            counter = self.scratch.counters.at[b, h, tile]
            plgpu.semaphore_signal(counter, memory_scope="gpu")

    def add_square(self, square: Any, out: Any, turn: Any) -> None:
        """The first one is written, since nothing is there."""
        if self.gradient.call.interpret:
            out[...] = jnp.where(turn == 0, 0.0, out[...]) + square[...]
            return
        copy = partial(plgpu.copy_smem_to_gmem, square, out)
        pl.when(turn == 0)(copy)
        pl.when(turn != 0)(partial(copy, reduction_op="add"))

    def turn(self, b: Any, h: Any, tile: Any) -> Any:
        """How many rows of tiles add to these queries before this one."""
        mine, gradient = self.place[2], self.gradient
        if not gradient.blocks:
            return mine
        (turns,) = self.arrays.turns
        per = gradient.blocks[0] // gradient.config.span
        query = lax.div(tile * gradient.config.columns, i32(gradient.blocks[1]))
        b, h = b if turns.shape[0] > 1 else 0, h if turns.shape[1] > 1 else 0
        before = turns[b, h, query, lax.div(mine, i32(per))]
        return before * per + lax.rem(mine, i32(per))

    # --- the warpgroups that compute ---

    def rows_of(self, group: Any) -> tuple[Any, Any, Any]:
        """Where a warpgroup's keys are."""
        (b, h, _), rows = self.place, self.gradient.config.rows
        return b, pl.ds(self.first + group * rows, rows), h

    def compute(self, group: Any, before: Any, then: Any, *, is_careful: bool) -> Any:
        """Stores dk and dv of a warpgroup's keys.

        Args:
            group: Which warpgroup.
            before: Visits for the tiles before.
            then: How to hear of the next tile; None if this is the only one.
            is_careful: Whether some query sees nothing, and may hold anything, or that
                `some_are_far`.

        Returns:
            How many visits there were, and what was heard.
        """
        gradient, scratch = self.gradient, self.scratch
        config, here = gradient.config, scratch.stay_here.at[group]
        mine = self.first + group * config.rows
        stay = [x.at[group] for x in scratch.stay]
        if then is None:
            self.load_keys(group)
        plgpu.barrier_wait(here)
        if gradient.call.has_unseen:  # scores are those of the keys as they are
            make_finite(stay[0], scratch.finite_keys.at[group])
            make_finite(stay[1], stay[1])

        def of_head(n: Any, carry: Any) -> Any:
            seen = gradient.seen_by(n, *self.place[:2])
            visits, whole = self.visits(*seen), reach(config, gradient.blocks)
            sizes, interpret = gradient.call.sizes, gradient.call.interpret
            tile = Tile(*seen, mine, config, whole, "k", sizes, interpret)
            mods = on_tile(tile, (gradient.score, gradient.mask), self.arrays.mods)
            weights = Weights(gradient, tile, *mods)
            ahead = self.load_first(carry[0], visits, seen)

            def one(i: Any, carry: Any) -> Any:
                found, left, ahead = carry
                at, is_full, left = visits.next(i, left)
                after = None
                if not config.has_mover:
                    number = i + config.stages
                    tile, _, ahead = visits.next(number, ahead)
                    after = number < visits.total, tile
                # Who we are is asked in each visit: what follows from it would be kept
                # over all of them, and is more than registers have room for.
                squares = Squares(self, lax.axis_index("wg"))
                step = Step(self, squares, weights, is_careful)
                return step(at, is_full, after, *found), left, ahead

            start = carry, visits.start(), ahead
            return lax.fori_loop(i32(0), visits.total, one, start)[0]

        waiting = () if config.has_mover else (i32(0),) * 3
        start = before, waiting, *(zeros(*x.shape) for x in stay)
        count, waiting, dk, dv = gradient.over_heads(of_head, start)
        self.finish_visits(group, count, waiting, is_only=then is None)
        heard = None
        if then is not None:
            heard = self.load_next(group, then)
            twin = lax.rem(count, i32(scratch.d_keys.shape[0]))  # nobody reads it now
            stay = [scratch.d_keys.at[twin, group, n] for n in (0, 1)]
        self.store(group, (dk * gradient.call.scale, dv), stay)
        return count, heard

    def finish_visits(
        self, group: Any, count: Any, waiting: Any, *, is_only: bool
    ) -> None:
        """Hands over what the last visit adds to dq, until all have read our keys.

        Of a thread block's only tile also until that may be overwritten.
        """
        if self.gradient.is_pipelined:
            assert is_only, "a visit asks whether it is the first of a thread block"
            squares = Squares(self, group)
            pl.when(count > 0)(partial(squares.hand_over, count - 1))
        if is_only:
            pl.when(count > 0)(partial(self.await_squares, group, waiting))
        self.arrive()
        self.await_others()

    def store(self, group: Any, gradients: Any, buffers: Any) -> None:
        """Both gradients of the keys, by way of shared memory."""
        outputs = self.outputs[:2]
        for x, buffer, out in zip(gradients, buffers, outputs, strict=True):
            buffer[...] = x.astype(self.gradient.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, out.at[self.rows_of(group)])
        await_copies_read()

    def load_next(self, group: Any, then: Any) -> Any:
        """Keys and values of the next tile, whose number it returns."""
        self.load_keys_if_left(group, n := then())
        return n

    def load_first(self, count: Any, visits: Backwards, seen: Any) -> Any:
        """Without a warpgroup for it: as many visits as there is room for."""
        config, ahead = self.gradient.config, visits.start()
        if config.has_mover:
            return ()
        for n in range(config.stages):
            tile, _, ahead = visits.next(i32(n), ahead)
            slot = lax.rem(count + n, i32(config.stages))

            @pl.when(n < visits.total)
            def _(slot: Any = slot, tile: Any = tile) -> None:
                for side in (0, 1):
                    self.load_side(side, slot, seen[0], seen[1], tile)

        return ahead

    def await_squares(self, group: Any, waiting: Any) -> None:
        """Until those of the last visit, at `waiting`, were added to dq."""
        if self.gradient.config.has_mover:
            self.await_taken(group)
        else:
            self.finish_adding(*waiting)

    def arrive(self) -> None:
        """Tells the other warpgroups that compute what one has done so far."""
        if self.gradient.config.groups > 1:
            plgpu.barrier_arrive(self.scratch.exchanged)

    def await_others(self) -> None:
        """Until they have done it, too."""
        if self.gradient.config.groups > 1:
            plgpu.barrier_wait(self.scratch.exchanged)
