"""One visit of the backward kernel: weights, gradients of scores, and their products.

What is computed is said in `mosaic_gpu_vjp`, who calls it in `mosaic_gpu_backward`.
"""

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .mosaic_gpu_gradients import Weights, with_slope_of_hidden
from .mosaic_gpu_tiles import (
    COLUMN,
    ROW,
    accumulate,
    accumulate_beside,
    clear_rows,
    i32,
    multiply,
    sums,
)


SQUARE = 64  # rows and columns of the pieces of dq


@dataclass(frozen=True)
class Squares:
    """What visits add to dq: pieces that a warpgroup makes, with the keys of all."""

    block: Any  # of `mosaic_gpu_backward`
    group: Any

    def hand_over(
        self, visit: Any, have_read: Any = None, is_there: Any = True
    ) -> None:
        """Those of a visit, to the warpgroup that adds them.

        The tensor cores make them also where none was, of whatever is there, rather
        than in a branch; nobody gets these.

        Args:
            visit: Its number, of those of the thread block.
            have_read: Runs when they are made.
            is_there: Whether there was such a visit.
        """
        numbers = range(self.block.kernel.squares)
        pl.when(is_there)(self.block.await_others)
        found = self.make(numbers, visit)
        if have_read is not None:
            have_read()

        @pl.when(is_there)
        def _() -> None:
            pl.when(visit > 0)(partial(self.block.await_taken, self.group))
            self.write(numbers, found)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.block.scratch.added.at[self.group])

    def make_each(self, visit: Any, have_read: Any) -> None:
        """One after another, for this warpgroup to add; the first one has read all."""
        self.block.await_others()
        for n in range(self.block.kernel.squares):
            found = self.make([n], visit)
            if n == 0:
                have_read()
            self.write([n], found)
        plgpu.commit_smem()

    def make(self, numbers: Any, visit: Any) -> list[Any]:
        """Some of a visit, in registers."""

        def run(*squares: Any) -> list[Any]:
            self.start(numbers, visit, squares)
            return [plgpu.wgmma_accumulator_load(x, wait_n=0) for x in squares]

        square = plgpu.ACC((SQUARE, SQUARE), jnp.float32)
        return pl.run_scoped(run, *[square] * len(numbers))

    def start(self, numbers: Any, visit: Any, squares: Any) -> None:
        """The tensor cores start to make some."""
        kernel, scratch = self.block.kernel, self.block.scratch
        keys = scratch.finite_keys or scratch.stay[0]
        d_scores = self.d_scores(visit)
        for n, square in zip(numbers, squares, strict=True):
            row, column = kernel.place_of(self.group * kernel.squares + n)
            for group in range(kernel.gradient.config.groups):
                left = d_scores.at[group, :, pl.ds(row, SQUARE)]
                right = keys.at[group, :, pl.ds(column, SQUARE)]
                plgpu.wgmma(square, left.transpose((1, 0)), right)

    def d_scores(self, visit: Any) -> Any:
        """Where the gradients of the scores of a visit are, of all warpgroups."""
        twins = self.block.scratch.d_scores
        return twins.at[lax.rem(visit, i32(twins.shape[0]))]

    def write(self, numbers: Any, squares: Any) -> None:
        """Some into shared memory."""
        for n, x in zip(numbers, squares, strict=True):
            self.block.scratch.squares.at[self.group, n][...] = x


@dataclass(frozen=True)
class Step:
    """One visit, which adds to the gradients of the keys and of the queries.

    Attributes:
        block: The thread block, of `mosaic_gpu_backward`.
        squares: What visits add to dq.
        weights: Those on the keys of this warpgroup.
        is_careful: Whether there may be what is rare.
    """

    block: Any
    squares: Squares
    weights: Weights
    is_careful: bool

    @property
    def group(self) -> Any:
        """Which warpgroup."""
        return self.squares.group

    def __call__(
        self, at: Any, is_full: Any, after: Any, count: Any, waiting: Any, *given: Any
    ) -> Any:
        """Adds the visit to the sums `given`: dk and dv, behind count and `waiting`.

        Args:
            at: The number of the tile of queries.
            is_full: Whether nothing there is hidden; None if nothing is anywhere.
            after: Whether there is a visit to load now, and of which tile; None where a
                warpgroup loads them all.
            count: Visits before this one.
            waiting: Where the one before adds to dq, if this warpgroup sees to it.
            *given: The sums so far.
        """
        gradient, scratch = self.block.gradient, self.block.scratch
        slot = lax.rem(count, i32(gradient.config.stages))
        first = at * gradient.config.columns
        meanwhile = partial(self.meanwhile, after, count, waiting)
        weights, d_scores = self.on_tile(slot, first, is_full, meanwhile)
        weights = weights.astype(gradient.dtype)
        d_scores = d_scores.astype(gradient.dtype)
        query, d_out = (x.at[slot] for x in scratch.visit)
        if self.is_careful and gradient.call.has_unseen:  # 0 times NaN is not
            (_, flags), tile = self.block.arrays.rare, self.weights.tile
            is_here = flags[tile.b, tile.h, at] != 0
            clear = partial(clear_rows, query, partial(self.is_blind, slot))
            pl.when(is_here)(clear)

        release = partial(self.release, slot, after)

        def body(add: Any) -> None:
            add(1, weights, d_out)
            self.squares.d_scores(count).at[self.group][...] = d_scores
            plgpu.commit_smem()
            self.block.arrive()
            add(0, d_scores, query)  # while the others arrive
            if after is not None:
                self.squares.make_each(count, release)
            elif not gradient.is_pipelined:
                self.squares.hand_over(count, release)

        dk, dv = sums(given, body, gradient.call.interpret)
        if gradient.is_pipelined:
            release()
        if after is not None:
            place = self.weights.tile.b, self.weights.tile.h, at
            self.block.start_to_add(*place)
            waiting = tuple(jnp.asarray(x, jnp.int32) for x in place)
        return count + 1, waiting, dk, dv

    def meanwhile(self, after: Any, count: Any, waiting: Any) -> None:
        """What is left of the visit before, beside the products of this one."""
        if after is not None:
            pl.when(count > 0)(partial(self.block.finish_adding, *waiting))
        elif self.block.gradient.is_pipelined:
            self.squares.hand_over(jnp.maximum(count - 1, 0), is_there=count > 0)

    def release(self, slot: Any, after: Any) -> None:
        """What has been read makes room for other queries."""
        if after is None:
            plgpu.barrier_arrive(self.block.scratch.free.at[slot])
            return
        is_there, at = after
        tile = self.weights.tile

        @pl.when(is_there)
        def _() -> None:
            plgpu.commit_smem()  # all warps have read
            for side in (0, 1):
                self.block.load_side(side, slot, tile.b, tile.h, at)

    def on_tile(
        self, slot: Any, first: Any, is_full: Any, meanwhile: Any
    ) -> tuple[Any, Any]:
        """Weights, and gradients of the scores before `score_mod`.

        The tensor cores make both products at once, or, to leave registers to a mod
        that only adds, one after the other: ALiBi with 64 channels 305 TFLOP/s against
        250. Under a mod with a slope that is slower, soft cap 181 against 200, and also
        where unseen keys need care. Where visits are pipelined, and without a mod,
        weights are made beside the second one, as what the visit before adds to dq is
        beside the first.
        """
        gradient = self.weights.gradient
        if gradient.is_linear:
            make = self.beside if gradient.is_pipelined else self.from_statistics
            return make(slot, first, is_full, meanwhile)
        if gradient.has_slope or gradient.call.has_unseen:
            return self.at_once(slot, first, is_full, meanwhile)
        return self.in_turn(slot, first, is_full, meanwhile)

    def from_statistics(
        self, slot: Any, first: Any, is_full: Any, meanwhile: Any
    ) -> tuple[Any, Any]:
        """Without a mod, sums begin with what would be subtracted from them."""
        gradient, scratch = self.weights.gradient, self.block.scratch
        factor = gradient.exponent_factor
        plgpu.barrier_wait(scratch.here[0].at[slot])
        shift = self.known(0, slot) * (-1 / factor)
        plgpu.barrier_wait(scratch.here[1].at[slot])

        def body(add: Any) -> None:
            sides = zip(scratch.stay, scratch.visit, strict=True)
            for n, (mine, theirs) in enumerate(sides):
                add(n, mine.at[self.group], theirs.at[slot].transpose((1, 0)))
            meanwhile()

        start = shift, -self.known(-1, slot)
        scores, products = sums(start, body, gradient.call.interpret)
        weights = self.hide(slot, first, is_full, jnp.exp2(scores * factor))
        return weights, weights * products

    def beside(
        self, slot: Any, first: Any, is_full: Any, meanwhile: Any
    ) -> tuple[Any, Any]:
        """The same, with the weights made beside the second product."""
        gradient, scratch = self.weights.gradient, self.block.scratch
        factor, interpret = gradient.exponent_factor, gradient.call.interpret
        keys, values = (x.at[self.group] for x in scratch.stay)
        query, d_out = (x.at[slot].transpose((1, 0)) for x in scratch.visit)
        plgpu.barrier_wait(scratch.here[0].at[slot])
        shift = self.known(0, slot) * (-1 / factor)
        scores = accumulate(shift, keys, query, interpret, meanwhile)
        plgpu.barrier_wait(scratch.here[1].at[slot])

        def make() -> Any:
            return self.hide(slot, first, is_full, jnp.exp2(scores * factor))

        given = -self.known(-1, slot), values, d_out
        products, weights = accumulate_beside(*given, make, interpret)
        return weights, weights * products

    def in_turn(
        self, slot: Any, first: Any, is_full: Any, meanwhile: Any
    ) -> tuple[Any, Any]:
        """One product after the other: a mod that only adds needs the registers."""
        scratch = self.block.scratch
        keys, values = (x.at[self.group] for x in scratch.stay)
        query, d_out = (x.at[slot] for x in scratch.visit)
        plgpu.barrier_wait(scratch.here[0].at[slot])
        is_ahead = self.weights.gradient.is_known_ahead and not self.is_careful
        make = self.weights_ahead if is_ahead else self.weights_given
        weights = make(partial(multiply, keys, query), slot, first, meanwhile)
        weights = self.hide(slot, first, is_full, weights)
        plgpu.barrier_wait(scratch.here[1].at[slot])
        given = -self.known(-1, slot), values, d_out.transpose((1, 0))
        return weights, weights * accumulate(*given, self.weights.tile.interpret)

    def weights_given(self, product: Any, slot: Any, first: Any, meanwhile: Any) -> Any:
        """Under a mod that is given the scores, which `product` makes."""
        scores, _ = product(meanwhile)
        columns = self.block.scratch.columns, slot
        return self.weights(scores, first, self.shifts(slot), columns)[0]

    def weights_ahead(self, product: Any, slot: Any, first: Any, meanwhile: Any) -> Any:
        """Under a mod whose addend is computed while `product` runs."""

        def powers() -> Any:
            meanwhile()
            columns = self.block.scratch.columns, slot
            return self.weights.powers(first, self.shifts(slot), columns)

        scores, shift = product(powers)
        return jnp.exp2(scores * self.weights.gradient.exponent_factor + shift)

    def at_once(
        self, slot: Any, first: Any, is_full: Any, meanwhile: Any
    ) -> tuple[Any, Any]:
        """Both products in flight while the weights are made of the first."""
        scratch, weights = self.block.scratch, self.weights
        keys, values = (x.at[self.group] for x in scratch.stay)
        tile = plgpu.ACC(weights.tile.shape, jnp.float32)

        def run(scores: Any, products: Any) -> tuple[Any, Any]:
            query, d_out = (x.at[slot].transpose((1, 0)) for x in scratch.visit)
            plgpu.barrier_wait(scratch.here[0].at[slot])
            plgpu.wgmma(scores, keys, query)
            plgpu.barrier_wait(scratch.here[1].at[slot])
            plgpu.wgmma(products, values, d_out)
            meanwhile()
            here = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            columns = scratch.columns, slot
            found, slope = weights(here, first, self.shifts(slot), columns)
            found = self.hide(slot, first, is_full, found)
            here = plgpu.wgmma_accumulator_load(products, wait_n=0)
            d_scores = found * (here - self.known(-1, slot))
            return found, with_slope_of_hidden(found, d_scores, slope)

        return pl.run_scoped(run, tile, tile)

    def is_blind(self, slot: Any, first: int, count: int) -> Any:
        """Which queries see nothing, as rows."""
        here = self.block.scratch.known[0].at[slot, pl.ds(first, count)]
        return plgpu.load(here, layout=ROW, optimized=False) == jnp.inf

    def shifts(self, slot: Any) -> list[Any]:
        """What is subtracted from scores, on the tile."""
        return [self.known(n, slot) for n in range(len(self.block.scratch.known) - 1)]

    def known(self, n: int, slot: Any) -> Any:
        """A statistic of the queries, on the tile."""
        ref = self.block.scratch.known[n].at[slot]
        x = plgpu.load(ref, layout=COLUMN, optimized=False)
        return self.weights.tile.spread(x, "column", "tile")

    def hide(self, slot: Any, first: Any, is_full: Any, found: Any) -> Any:
        """The weights with 0 for what is hidden, where something may be."""
        is_shown = [x for x in (is_full, self.block.is_inside) if x is not None]
        if not is_shown:
            return found
        is_shown = functools.reduce(jnp.logical_and, is_shown)
        columns = self.block.scratch.columns, slot
        hide = partial(self.weights.hide, first, columns=columns)
        return lax.cond(is_shown, lambda x: x, hide, found)
