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

from pliax.core._jax import store_registers, take_number
from pliax.core.manual_axes import varying_axes

from .mosaic_gpu_copies import (
    await_copies,
    await_copies_read,
    await_other_warps,
    begin_copies,
)
from .mosaic_gpu_forward_step import Step
from .mosaic_gpu_merging import join
from .mosaic_gpu_next_tiles import NextTiles
from .mosaic_gpu_softmax import Softmax
from .mosaic_gpu_tiles import (
    ROW,
    TILE,
    Tile,
    Verdict,
    i32,
    on_tile,
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
    here: Any  # barriers of keys and of values, or of both: loaded
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
        kernel = self.kernel
        if not kernel.is_persistent:
            place = self.place(*kernel.tile_of_each.place())
            body(place, self.visits(*place), None, None)
            return None

        def one(carry: Any) -> Any:
            k, n, counts, before = carry
            place = self.nth(n)
            visits = self.visits(*place, counts)
            heard = body(place, visits, partial(following, k, n), before)
            return k + 1, *heard, before + visits.total

        n = lax.axis_index("workers")
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
        given = call.blocks, call.sizes["k"], config
        descends = self.kernel.score is not None  # `mosaic_gpu_visits` says why
        return Blocks(*given, tell=call.lists_tell, descends=descends)

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
                self.load(side, slot, first, place)
                if side == 0:
                    at, here = (*place[:2], first), scratch.here[0].at[slot]
                    given = scratch.columns, slot, at, here
                    self.kernel.columns.load(self.arrays[2:], *given)

    def load(self, side: int, slot: Any, first: Any, place: Any) -> None:
        """Keys, side 0, or values of a visit, of which the first key is told."""
        scratch, config = self.scratch, self.kernel.config
        b, h = self.kernel.call.place_of_keys(*place[:2])
        rows = pl.ds(first, config.columns)
        array, there = self.arrays[0][1 + side], (scratch.keys, scratch.values)[side]
        here = scratch.here[0 if config.loads_together else side].at[slot]
        plgpu.copy_gmem_to_smem(array.at[b, rows, h], there.at[slot], here)

    def load_first(self, visits: Visits, place: Any) -> None:
        """Those of the first visits, where no other warpgroup does it."""
        config, interpret = self.kernel.config, self.kernel.call.interpret

        def start() -> None:
            for n in range(config.stages):

                @pl.when(n < visits.total)
                def _(n: int = n) -> None:
                    first = visits.first(i32(n))
                    for side in (0, 1):
                        self.load(side, n, first, place)

        begin_copies(start, interpret, by_one_warp=self.may_divide_warps)

    @property
    def may_divide_warps(self) -> bool:
        """Whether Pallas lets warps differ: not where arrays vary in a `shard_map`."""
        return not varying_axes(*self.arrays[0])

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
            self.load_first(visits, (b, h))
        whole = reach(config, call.blocks)
        tile = Tile(b, h, first, config, whole, "q", call.sizes, call.interpret)
        mods = self.kernel.score, self.kernel.mask
        score, mask = on_tile(tile, mods, self.arrays[2:])
        plgpu.barrier_wait(scratch.queries_here.at[group])
        turn, softmax = group if config.shares_rows else i32(0), self.softmax
        step = Step(
            self, visits, turn, mine, score, mask, tile, softmax, is_careful, before
        )
        here = scratch.here[0].at[step.slot(turn)]
        pl.when(visits.total > turn)(lambda: plgpu.barrier_wait(here))
        self.take_turn(group == 1)
        sums = step.over_all(softmax.start(self.arrays[0][2].shape[3]))
        is_whole = self.kernel.splits is None
        found = softmax.whole(sums) if is_whole else softmax.part(sums)
        self.take_turn(group == 0)
        is_spoiled = None
        if self.verdict is not None and not is_careful:
            is_spoiled = self.verdict(group, found[0])
        heard = None if after is None else after()
        self.store(group, (b, h, first), *found)
        return is_spoiled if after is None else heard

    @property
    def softmax(self) -> Softmax:
        """Of a warpgroup's rows."""
        kernel, config = self.kernel, self.kernel.config
        factor = LOG2E * (kernel.call.scale if kernel.is_linear else 1)
        return Softmax(
            config.rows,
            factor,
            is_linear=kernel.is_linear,
            puts_off=config.puts_off,
            settles=kernel.settles,
            interpret=kernel.call.interpret,
        )

    def take_turn(self, condition: Any = None) -> None:
        """Lets the other warpgroup have the tensor cores, and waits for it."""
        if not self.kernel.config.takes_turns:
            return

        self.meet() if condition is None else pl.when(condition)(self.meet)

    def store(self, group: Any, place: Any, out: Any, top: Any, rest: Any) -> None:
        """What was found of whole rows, or of a part (`Softmax.whole` and `.part`)."""
        if self.kernel.is_linear:
            top = top * self.kernel.call.scale
        if self.kernel.splits is not None:
            put = self.put_joined if self.kernel.config.shares_rows else self.put
            put(group, self.of_part(place), out, top, rest)
            return
        if self.kernel.is_inference:
            (b, h, first), rows, log_sum = place, self.kernel.config.rows, rest
            for ref, x in zip(self.outputs[1:], (top + log_sum, top), strict=True):
                store_registers(ref.at[b, pl.ds(first, rows), h], x)
            self.put(group, place, out)
            return
        self.put(group, place, out, top, rest)

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
        await_other_warps(self.kernel.config, self.kernel.call.interpret)
        self.keep(group, acc, *statistics)
        plgpu.copy_smem_to_gmem(out, self.outputs[0].at[self.kernel.rows(*place)])
        for n, _ in enumerate(statistics):
            there = self.outputs[1 + n].at[b, h, rows]
            plgpu.copy_smem_to_gmem(scratch.statistics.at[n, group], there)
        if not self.kernel.is_persistent:
            await_copies_read()
