"""One visit of the forward kernel: keys and values become part of what is found."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .mosaic_gpu_conditions import Condition, all_meet, hide
from .mosaic_gpu_copies import begin_copies
from .mosaic_gpu_softmax import Softmax, Sums
from .mosaic_gpu_tiles import (
    ModOnTile,
    Tile,
    accumulate,
    add_seen,
    i32,
    load_row,
    multiply,
)
from .mosaic_gpu_visits import Visits


@dataclass(frozen=True)
class Step:
    """The visits of a warpgroup to the keys of one tile."""

    block: Any  # thread block, of `mosaic_gpu_forward`
    visits: Visits
    turn: Any  # the first of its warpgroup's visits
    queries: Any
    score: ModOnTile | None
    mask: ModOnTile | None
    tile: Tile
    softmax: Softmax
    is_careful: bool  # about hidden values that are not finite
    before: Any  # visits for other tiles; None if there are none

    def slot(self, i: Any) -> Any:
        """Where the keys and values of the i-th visit are."""
        i = i if self.before is None else self.before + i
        return lax.rem(i, i32(self.tile.config.stages))

    def over_all(self, sums: Sums) -> Sums:
        """All visits of a warpgroup: first those that see everything."""
        full, total = map(self.count, (self.visits.full, self.visits.total))
        sums = self.over_full(full, sums)
        return lax.fori_loop(full, total, partial(self, is_full=False), sums)

    def over_full(self, count: Any, sums: Sums) -> Sums:
        """The first so many visits, in a loop for what a mod may guess, too.

        To choose in each visit gains nothing: what waits for a branch is not computed
        beside anything.
        """

        def run(step: Step, sums: Sums) -> Sums:
            return lax.fori_loop(i32(0), count, partial(step, is_full=True), sums)

        is_long = self.block.kernel.visits_many
        holds = self.score.guess_holds if self.score and is_long else None
        if self.score is None or holds is None:
            return run(self, sums)
        guessing = replace(self, score=replace(self.score, guesses=True))
        return lax.cond(holds, partial(run, guessing), partial(run, self), sums)

    def count(self, visits: Any) -> Any:
        """How many of the first visits are its warpgroup's."""
        takers = self.block.kernel.config.takers
        if takers == 1:
            return visits
        return lax.div(visits - self.turn + (takers - 1), i32(takers))

    def __call__(self, n: Any, sums: Sums, *, is_full: bool) -> Sums:
        """The sums after the n-th of its warpgroup's visits.

        Args:
            n: Which.
            sums: Those before.
            is_full: Whether nothing is hidden.
        """
        block, config = self.block, self.block.kernel.config
        i = n * config.takers + self.turn if config.shares_rows else n
        scratch, slot = block.scratch, self.slot(i)
        # Beside the product: lists are far away.
        (first, met), ahead = self.place(i, is_full), self.ahead(i)
        scores, seen = multiply(
            self.queries, scratch.keys.at[slot], partial(self.meanwhile, first, is_full)
        )
        known = self.known(slot, is_full, first)
        self.release(0, i, slot, ahead)
        scores = self.modified(scores, first, met, is_full, known, seen)
        weights, sums = self.softmax(scores, sums)
        weights = weights.astype(self.queries.dtype)
        sums, weights = lax.optimization_barrier((sums, weights))
        self.await_values(slot, sums)
        if self.is_careful and not is_full:
            acc = self.add_seen(sums.acc, weights, self.visits.first(i), known[1])
            self.await_next_keys(i)
        else:
            given = sums.acc, weights, scratch.values.at[slot]
            meanwhile = partial(self.await_next_keys, i)
            acc = accumulate(*given, self.tile.interpret, meanwhile)
        self.release(1, i, slot, ahead)
        return sums._replace(acc=acc)

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

    def ahead(self, i: Any) -> Any:
        """Where what takes the place of the i-th visit begins, if this loads it."""
        config = self.tile.config
        return None if config.has_mover else self.visits.ahead(i, config.stages)

    def release(self, side: int, i: Any, slot: Any, ahead: Any) -> None:
        """Keys or values that have been read make room for others.

        Those that load together do so when both have been read.
        """
        config, block = self.tile.config, self.block
        if config.has_mover:
            plgpu.barrier_arrive(block.scratch.free[side].at[slot])
            return
        if config.loads_together and side == 0:
            return
        sides = (0, 1) if config.loads_together else (side,)

        def start() -> None:
            for side in sides:
                block.load(side, slot, ahead, (self.tile.b, self.tile.h))

        begin = partial(begin_copies, start, self.tile.interpret)
        is_left = i + config.stages < self.visits.total
        pl.when(is_left)(partial(begin, by_one_warp=block.may_divide_warps))

    def known(self, slot: Any, is_full: bool, first: Any) -> list[dict[int, Any]]:
        """What score_mod and mask_mod know of the keys, where it came with them."""
        there = self.block.scratch.columns
        known = partial(self.block.kernel.columns.known, there, slot, first=first)
        return [known(x) for x in (self.score, None if is_full else self.mask)]

    def place(self, i: Any, is_full: bool) -> tuple[Any, Any]:
        """The first key of a visit, and what is met; None where nobody asks for it."""
        is_asked = self.score is not None or not is_full
        return self.visits.place(i) if is_asked else (None, None)

    def modified(
        self, scores: Any, first: Any, met: Any, is_full: bool, known: Any, seen: Any
    ) -> Any:
        """Scores of products, those that are hidden -inf."""
        if not self.softmax.is_linear:
            scores = scores * self.block.kernel.call.scale
        if self.score is not None:
            (scores,) = self.score(first, scores, known[0])
        if not is_full:
            asked = [Condition.of(x) for x in seen]
            asked = asked or self.conditions(first, known[1], met)
            scores = hide(scores, -jnp.inf, asked)
        return scores

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

    def await_values(self, slot: Any, sums: Sums) -> None:
        """Those of a visit, and the warpgroup's turn."""
        config, scratch = self.block.kernel.config, self.block.scratch
        if config.takes_turns:
            plgpu.barrier_arrive(scratch.turn)
            self.softmax.settle(sums)
        if not config.loads_together:  # else they came with the keys
            plgpu.barrier_wait(scratch.here[1].at[slot])
        if config.takes_turns:
            plgpu.barrier_wait(scratch.turn)

    def await_next_keys(self, i: Any) -> None:
        """Those of the visit after the i-th, if there is one."""
        following = i + self.block.kernel.config.takers
        here = self.block.scratch.here[0].at[self.slot(following)]
        wait = partial(plgpu.barrier_wait, here)
        pl.when(following < self.visits.total)(wait)
