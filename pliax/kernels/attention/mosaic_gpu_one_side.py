"""What kernels share that have queries or keys as their rows, and visit the others.

A thread block's warpgroups have rows of their own, and all make the same visits: for
each the pair that is visited comes into shared memory, with what is known of the
columns, and is multiplied by the pair that stays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .mosaic_gpu_copies import begin_copies
from .mosaic_gpu_gradients import Gradient
from .mosaic_gpu_tiles import COLUMN, Tile, i32, multiply
from .mosaic_gpu_visits import Blocks, Visits


@dataclass(frozen=True)
class OneSide:
    """What the rows of a thread block are combined with.

    Attributes:
        gradient: What is computed.
        arrays: References: the pair that stays, `stay`, the one that is visited,
            `visit`, `statistics` of queries, the mask's `lists`, and what `mods` are
            given.
        scratch: Shared memory: `stay` and `visit`, what is `known` of visited queries,
            what mods know of `columns`; and barriers, `here` and `free`.
    """

    gradient: Gradient
    arrays: Any
    scratch: Any

    def visits(self, b: Any, h: Any, first: Any) -> Visits:
        """Those of the rows from `first` on."""
        gradient = self.gradient
        length = gradient.call.sizes["k" if gradient.rows == "q" else "q"]
        lists = self.arrays.lists if gradient.blocks else None
        told = gradient.call.lists_tell
        blocks = Blocks(gradient.blocks, length, gradient.config, told)
        return blocks.visits(lists, b, h, first)

    # --- what moves data: a warpgroup, or the one that computes ---

    def move(self, b: Any, h: Any, first: Any) -> None:
        """All that is visited, where a warpgroup does nothing else."""
        gradient, scratch = self.gradient, self.scratch
        stages = gradient.config.stages

        def of_head(n: Any, count: Any) -> Any:
            place = gradient.seen_by(n, b, h)
            visits = self.visits(*place, first)

            def one(i: Any, count: Any) -> Any:
                slot, start = lax.rem(count, i32(stages)), visits.first(i)
                for side, free in enumerate(scratch.free):
                    wait = partial(plgpu.barrier_wait, free.at[slot])
                    pl.when(count >= stages)(wait)
                    self.load(side, count, start, place)
                return count + 1

            return lax.fori_loop(i32(0), visits.total, one, count)

        count = gradient.over_heads(of_head, i32(0))

        @pl.loop(jnp.maximum(count - stages, 0), count)
        def _(i: Any) -> None:  # nobody leaves before all have read
            for free in scratch.free:
                plgpu.barrier_wait(free.at[lax.rem(i, i32(stages))])

    def load(self, side: int, count: Any, start: Any, place: Any) -> None:
        """One of the pair that is visited.

        Args:
            side: Keys or queries, 0, or values or cotangents, 1.
            count: Visits before this one.
            start: Its first column.
            place: Sequence and query head.
        """
        gradient, scratch = self.gradient, self.scratch
        slot = lax.rem(count, i32(gradient.config.stages))
        here, rows = scratch.here[side].at[slot], pl.ds(start, gradient.config.columns)
        b, h = place if gradient.rows == "k" else gradient.call.place_of_keys(*place)
        array, there = self.arrays.visit[side], scratch.visit[side].at[slot]
        plgpu.copy_gmem_to_smem(array.at[b, rows, h], there, here)
        if side == 0:
            self.move_columns((*place, start), slot, here)

    def load_first(self, visits: Visits, count: Any, place: Any) -> None:
        """Those of a query head's first visits, where no other warpgroup does it."""

        def start() -> None:
            for n in range(self.gradient.config.stages):

                @pl.when(n < visits.total)
                def _(n: int = n) -> None:
                    first = visits.first(i32(n))
                    for side in (0, 1):
                        self.load(side, count + n, first, place)

        begin_copies(start, self.gradient.call.interpret)

    def move_columns(self, at: Any, slot: Any, here: Any) -> None:
        """What is known of the columns of a visit: statistics of queries, and mods'."""
        (*place, first), scratch = at, self.scratch
        columns = pl.ds(first, self.gradient.config.columns)
        for array, there in zip(self.arrays.statistics, scratch.known, strict=False):
            x = array.at[(*place, columns)]
            plgpu.copy_gmem_to_smem(x, there.at[slot], here)
        given = scratch.columns, slot, at, here
        self.gradient.columns.load(self.arrays.mods, *given)

    # --- a visit ---

    def releases(
        self, visits: Visits, place: Any, i: Any, count: Any
    ) -> list[Callable[[], None]]:
        """What says that the i-th visit has read one of the pair, and leaves room.

        Args:
            visits: All of the rows.
            place: Sequence and query head.
            i: The number of the visit.
            count: Visits before it, of all heads.
        """
        config = self.gradient.config
        following = None if config.has_mover else visits.ahead(i, config.stages)

        def release(side: int) -> None:
            if config.has_mover:
                free = self.scratch.free[side]
                plgpu.barrier_arrive(free.at[lax.rem(count, i32(config.stages))])
                return

            def start() -> None:
                self.load(side, count + config.stages, following, place)

            begin = partial(begin_copies, start, self.gradient.call.interpret)
            pl.when(i + config.stages < visits.total)(begin)

        return [partial(release, side) for side in (0, 1)]

    def product(self, side: int, slot: Any) -> Any:
        """Of what stays and what is visited."""
        scratch = self.scratch
        plgpu.barrier_wait(scratch.here[side].at[slot])
        # Who we are is asked in each visit: addresses kept over all of them would not
        # fit into registers. ALiBi with 128 channels, one H100: 374 against 340.
        mine = scratch.stay[side].at[lax.axis_index("wg")]
        return multiply(mine, scratch.visit[side].at[slot])

    def statistics(self, tile: Tile, rows: Any, slot: Any) -> list[Any]:
        """Of queries, on the tile; `rows` has them where these are its rows."""
        if rows is not None:
            return [tile.spread(x, "row", "tile") for x in rows]
        load = partial(plgpu.load, layout=COLUMN, optimized=False)
        loaded = [load(x.at[slot]) for x in self.scratch.known]
        return [tile.spread(x, "column", "tile") for x in loaded]
