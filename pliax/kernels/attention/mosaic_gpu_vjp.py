"""flex_attention on Hopper GPUs: the backward pass, as one fused kernel.

A thread block has the keys of a row of tiles and visits the queries that see them, the
last ones first; a tile lies on its side. Its warpgroups keep dk and dv in registers and
exchange ds in shared memory. What they add to dq is handed over to the warpgroup that
moves data, which adds it to dq in global memory:

    s' = k q',  p' = exp(s' - maximum - log sum),  ds' = p' (v do' - delta) ds/d(q k)
    dv = p' do,  dk = ds' q,  dq += ds k

The additions to a row of tiles of dq happen in the order of the keys: a counter says
whose turn it is. So the sum is the same in every run, and as all thread blocks visit
queries in the same order, and those of the first keys start first, few wait.

References:
    Dao, "FlashAttention-2", 2023, Algorithm 2.
    Shah et al., "FlashAttention-3", 2024, section B.1 (a warp that adds to dq).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int

from pliax.kernels._hopper import shared_memory

from .block_mask import BlockMask
from .configs import Kernel
from .mosaic_gpu import NOTHING, Call, aligned, call_of, mods_of
from .mosaic_gpu_gradients import (
    Gradient,
    Weights,
    blind_tiles,
    statistics,
    with_slope_of_hidden,
)
from .mosaic_gpu_split_vjp import gradients_of
from .mosaic_gpu_tiles import (
    COLUMN,
    ROW,
    Tile,
    as_lists,
    clear_rows,
    i32,
    make_finite,
    multiply,
    on_tile,
    run_kernel,
    sums,
    zeros,
)
from .mosaic_gpu_visits import Backwards, Blocks, reach
from .normalization import with_slope


_WIDE = 128  # channels: registers hold dk, dv and a tile, but no score_mod besides
_SQUARE = 64  # rows and columns of the pieces of dq
_TOGETHER = 16  # heads whose thread blocks start together, while L2 holds their queries


def backward(
    arrays: Any,
    score_mod: Any,
    block_mask: BlockMask | None,
    results: tuple[Array, Array, Array],
    cotangents: tuple[Array, Array],
    *,
    scale: float,
    interpret: bool = False,
    asked: Mapping[str, int] = NOTHING,
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value, in their dtype."""
    call = call_of(arrays, block_mask, scale=scale, interpret=interpret, asked=asked)
    d_out = cotangents[0].astype(arrays[0].dtype)
    padded = tuple(aligned(x) for x in (*arrays, d_out))
    is_linear = score_mod is None and scale > 0
    block = call.blocks[0] if call.blocks else 1
    known = statistics(is_linear, block, results, cotangents)
    given = call, padded, score_mod, block_mask, known
    channels = max(padded[1].shape[3], padded[2].shape[3])
    if channels > _WIDE:
        found = [x for name in "qkv" for x in gradients_of(name, *given)]
    elif channels == _WIDE and score_mod is not None:
        found = [*gradients_of("q", *given), *gradients_of("kv", *given)]
    else:
        found = _all_gradients(*given)
    pairs = zip(found, arrays, strict=True)
    return tuple(  # type: ignore[return-value]
        d[:, : x.shape[1], :, : x.shape[3]] for d, x in pairs
    )


def _all_gradients(
    call: Call,
    arrays: tuple[Array, ...],
    score_mod: Any,
    block_mask: BlockMask | None,
    known: tuple[Array, ...],
) -> tuple[Array, Array, Array]:
    query, key, value, d_out = arrays
    blocks, lists, turns, blind, is_seen = None, None, (), (), None
    if block_mask is not None:
        blocks = block_mask.block_size[1], block_mask.block_size[0]
        lists = block_mask.lists(transposed=True)
        turn, is_seen = _turns(block_mask)
        turns = (turn,)
    channels = key.shape[3], value.shape[3]
    config = Kernel("backward", channels, blocks).config(call.asked)
    if call.has_unseen:
        blind = blind_tiles(known, call.sizes["q"], config.columns)
    if score_mod is not None:
        score_mod = with_slope(score_mod)
    loaded = {"k": config.span, "q": reach(config, blocks)}
    mods = mods_of(call, score_mod, block_mask, loaded)
    gradient = Gradient(call, config, "k", blocks, *mods, query.dtype)
    kernel = _Backward(gradient, key.shape[3] // _SQUARE)
    rest = as_lists(lists), turns, blind
    dk, dv, dq = kernel((key, value), (query, d_out), known, *rest)
    if is_seen is not None:  # nobody wrote to the others
        dq = jnp.where(is_seen, dq, 0)
    return (dq * call.scale).astype(query.dtype), dk, dv


def _turns(
    mask: BlockMask,
) -> tuple[Int[Array, "B H R C"], Bool[Array, "B T2 H 1"]]:
    """How many blocks of keys a block of queries sees before each, and who sees any.

    By comparing, which is one small kernel: to spread the lists took six, 20 us.
    """
    lists = mask.lists(transposed=False)
    columns = mask.lists(transposed=True).num.shape[2]
    block = lax.broadcasted_iota(jnp.int32, (1, 1, 1, columns, 1), 3)

    def before(num: Any, indices: Any) -> Array:
        here = indices[..., None, :]
        place = lax.broadcasted_iota(jnp.int32, here.shape, here.ndim - 1)
        is_before = (place < num[..., None, None]) & (here < block)
        return jnp.sum(is_before, axis=-1, dtype=jnp.int32)

    turns = before(lists.num, lists.indices)
    turns += before(lists.full_num, lists.full_indices)
    is_seen = jnp.repeat(lists.num + lists.full_num > 0, mask.block_size[0], axis=-1)
    return turns, jnp.swapaxes(is_seen, 1, 2)[..., None]


@dataclass(frozen=True)
class _Backward:
    gradient: Gradient
    widths: int  # squares of dq side by side

    def __call__(self, stay: Any, visit: Any, known: Any, *rest: Any) -> Any:
        gradient, (B, S, heads, _) = self.gradient, stay[0].shape
        config, call = gradient.config, gradient.call
        arrays = stay, visit, known, *rest, *gradient.mods
        leaves, tree = jax.tree.flatten(arrays)
        together = max(n for n in range(1, _TOGETHER + 1) if B * heads % n == 0)
        tiles = -(-S // config.span)
        whole = reach(config, gradient.blocks)
        queries = -(-call.sizes["q"] // whole) * whole
        dq = call.sizes["b"], queries, call.sizes["h"], visit[0].shape[3]
        out = [jax.ShapeDtypeStruct(x.shape, gradient.dtype) for x in stay]

        def body(refs: Any, scratch: Any) -> None:
            arrays = _Arrays(*jax.tree.unflatten(tree, refs[: len(leaves)]))
            block = lax.axis_index("many") * together + lax.axis_index("few")
            place = lax.div(block, i32(heads)), lax.rem(block, i32(heads))
            outputs = refs[len(leaves) :]
            _ThreadBlock(self, arrays, outputs, _Scratch(*scratch), *place).run()

        return run_kernel(
            body,
            self.scratch(stay, visit, known),
            {"many": B * heads // together, "tiles": tiles, "few": together},
            config,
            call.interpret,
            counters=(dq[0], dq[2], queries // config.columns),
            out_type=[*out, jax.ShapeDtypeStruct(dq, jnp.float32)],
        )(*leaves)

    def scratch(self, stay: Any, visit: Any, known: Any) -> tuple[Any, ...]:
        """The shared memory of a thread block."""
        config = self.gradient.config
        groups, stages = config.groups, config.stages
        rows, columns = config.rows, config.columns
        smem = partial(shared_memory, self.gradient.dtype)
        barriers = partial(plgpu.Barrier, num_barriers=stages)
        squares = (groups, self.squares, _SQUARE, _SQUARE)
        return (
            [smem(groups, rows, x.shape[3]) for x in stay],
            smem(groups, rows, stay[0].shape[3])
            if self.gradient.call.has_unseen
            else (),
            [smem(stages, columns, x.shape[3]) for x in visit],
            [plgpu.SMEM((stages, columns), jnp.float32) for _ in known],
            smem(min(groups, 2), groups, rows, columns),
            shared_memory(jnp.float32, *squares),
            plgpu.Barrier(num_arrivals=2, num_barriers=groups),
            [barriers(num_arrivals=n) for n in (len(known), 2)],
            [barriers(num_arrivals=groups) for _ in visit],
            plgpu.Barrier(num_arrivals=groups),
            plgpu.Barrier(num_barriers=groups),
            plgpu.Barrier(num_barriers=groups),
        )

    @property
    def squares(self) -> int:
        """Of dq, of each warpgroup."""
        config = self.gradient.config
        return config.columns // _SQUARE * self.widths // config.groups

    @property
    def parts(self) -> list[list[int]]:
        """The squares that a warpgroup's registers hold at once."""
        every = list(range(self.squares))
        return [every] if self.gradient.config.has_mover else [[n] for n in every]

    def place_of(self, square: Any) -> tuple[Any, Any]:
        """Query and channel of a square's first; one of the two has more than 64."""
        if self.widths == 1:
            return square * _SQUARE, 0
        return 0, square * _SQUARE


class _Arrays:
    """The references of a kernel's operands."""

    def __init__(
        self,
        stay: Any,
        visit: Any,
        known: Any,
        lists: Any,
        turns: Any,
        blind: Any,
        *mods: Any,
    ) -> None:
        self.stay, self.visit, self.known = stay, visit, known
        self.lists, self.turns, self.mods = lists, turns, mods
        self.blind = blind


@dataclass(frozen=True)
class _Scratch:
    stay: Any  # of each warpgroup; its gradients in the end
    finite_keys: Any  # for what is added to dq, where nobody may see a key
    visit: Any
    known: Any  # statistics of the queries that are visited
    d_scores: Any  # of all warpgroups: of this visit, and the one before
    squares: Any  # of dq
    stay_here: Any
    here: Any  # barriers of what is visited: loaded
    free: Any  # read by all
    exchanged: Any
    added: Any  # squares written
    taken: Any  # squares read
    counters: Any  # in global memory: how often a tile of dq was added to


@dataclass(frozen=True)
class _ThreadBlock:
    """One thread block: `run` is what each of its warpgroups does."""

    kernel: _Backward
    arrays: _Arrays
    outputs: Any
    scratch: _Scratch
    b: Any
    h: Any

    def run(self) -> None:
        config, group = self.gradient.config, lax.axis_index("wg")
        compute, move = config.registers

        def compute_all() -> None:
            if not self.arrays.blind:
                self.compute(group, is_careful=False)
            else:  # apart, as what is rare would slow down the rest
                some, _ = self.arrays.blind
                is_careful = some[0] != 0
                pl.when(is_careful)(partial(self.compute, group, is_careful=True))
                pl.when(~is_careful)(partial(self.compute, group, is_careful=False))

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
            self.move()

    @property
    def gradient(self) -> Gradient:
        return self.kernel.gradient

    @property
    def first(self) -> Any:
        """Its first key."""
        return lax.axis_index("tiles") * self.gradient.config.span

    @property
    def is_inside(self) -> Any:
        """Whether its rows are keys; None if those of all are.

        What is beyond the end has weights, too: its scores are those of zeros.
        """
        span, n = self.gradient.config.span, self.gradient.call.sizes["k"]
        return None if n % span == 0 else self.first + span <= n

    def visits(self, b: Any, h: Any) -> Backwards:
        gradient = self.gradient
        length = gradient.call.sizes["q"]
        lists = self.arrays.lists if gradient.blocks else None
        blocks = Blocks(gradient.blocks, length, gradient.config)
        return blocks.backwards(lists, b, h, self.first)

    # --- the warpgroup that moves data ---

    def move(self) -> None:
        stages, scratch = self.gradient.config.stages, self.scratch

        def of_head(n: Any, carry: Any) -> Any:
            seen = self.gradient.seen_by(n, self.b, self.h)
            visits = self.visits(*seen)

            def one(i: Any, carry: Any) -> Any:
                (count, waiting), left = carry
                tile, _, left = visits.next(i, left)
                self.load(count, *seen, tile)
                pl.when(count >= stages)(lambda: self.add(*waiting[0]))
                new = tuple(jnp.asarray(x, jnp.int32) for x in (*seen, tile))
                return (count + 1, (*waiting[1:], new)), left

            start = carry, visits.start()
            return lax.fori_loop(i32(0), visits.total, one, start)[0]

        nothing = (i32(0),) * 3
        start = i32(0), (nothing,) * stages
        count, waiting = self.gradient.over_heads(of_head, start)
        for n, place in enumerate(waiting):
            at = count - stages + n

            @pl.when(at >= 0)
            def _(at: Any = at, place: Any = place) -> None:
                for free in scratch.free:  # nobody leaves before all have read
                    plgpu.barrier_wait(free.at[lax.rem(at, i32(stages))])
                self.add(*place)

    def load(self, count: Any, b: Any, h: Any, tile: Any) -> None:
        """Queries, the output's cotangents, and what is known of them."""
        config, scratch = self.gradient.config, self.scratch
        slot = lax.rem(count, i32(config.stages))
        for side in (0, 1):
            wait = partial(plgpu.barrier_wait, scratch.free[side].at[slot])
            pl.when(count >= config.stages)(wait)
            self.load_side(side, slot, b, h, tile)

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

    def add(self, b: Any, h: Any, tile: Any) -> None:
        """The squares of a visit to dq, when they are there."""
        for group in range(self.gradient.config.groups):
            plgpu.barrier_wait(self.scratch.added.at[group])
        self.start_to_add(b, h, tile)
        self.finish_adding(b, h, tile)
        for group in range(self.gradient.config.groups):
            plgpu.barrier_arrive(self.scratch.taken.at[group])

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
                rows = pl.ds(tile * config.columns + row, _SQUARE)
                out = self.outputs[2].at[b, rows, h, pl.ds(column, _SQUARE)]
                self.add_square(scratch.squares.at[group, n], out, turn)

    def finish_adding(self, b: Any, h: Any, tile: Any) -> None:
        """Others may add to these queries, and squares be overwritten."""
        plgpu.wait_smem_to_gmem(0)
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
        mine, gradient = lax.axis_index("tiles"), self.gradient
        if not gradient.blocks:
            return mine
        (turns,) = self.arrays.turns
        per = gradient.blocks[0] // gradient.config.span
        query = lax.div(tile * gradient.config.columns, i32(gradient.blocks[1]))
        b, h = b if turns.shape[0] > 1 else 0, h if turns.shape[1] > 1 else 0
        before = turns[b, h, query, lax.div(mine, i32(per))]
        return before * per + lax.rem(mine, i32(per))

    # --- the warpgroups that compute ---

    def compute(self, group: Any, *, is_careful: bool) -> None:
        gradient, scratch = self.gradient, self.scratch
        config, here = gradient.config, scratch.stay_here.at[group]
        mine = self.first + group * config.rows
        rows = pl.ds(mine, config.rows)
        stay = [x.at[group] for x in scratch.stay]
        for array, buffer in zip(self.arrays.stay, stay, strict=True):
            plgpu.copy_gmem_to_smem(array.at[self.b, rows, self.h], buffer, here)
        plgpu.barrier_wait(here)
        if gradient.call.has_unseen:  # scores are those of the keys as they are
            make_finite(stay[0], scratch.finite_keys.at[group])
            make_finite(stay[1], stay[1])

        def of_head(n: Any, carry: Any) -> Any:
            seen = gradient.seen_by(n, self.b, self.h)
            visits, whole = self.visits(*seen), reach(config, gradient.blocks)
            sizes, interpret = gradient.call.sizes, gradient.call.interpret
            tile = Tile(*seen, mine, config, whole, "k", sizes, interpret)
            mods = on_tile(tile, (gradient.score, gradient.mask), self.arrays.mods)
            step = _Step(self, group, Weights(gradient, tile, *mods), is_careful)
            ahead = self.load_first(carry[0], visits, seen)

            def one(i: Any, carry: Any) -> Any:
                found, left, ahead = carry
                at, is_full, left = visits.next(i, left)
                after = None
                if not config.has_mover:
                    then = i + config.stages
                    tile, _, ahead = visits.next(then, ahead)
                    after = then < visits.total, tile
                return step(at, is_full, after, *found), left, ahead

            start = carry, visits.start(), ahead
            return lax.fori_loop(i32(0), visits.total, one, start)[0]

        waiting = () if config.has_mover else (i32(0),) * 3
        start = i32(0), waiting, *(zeros(*x.shape) for x in stay)
        count, waiting, dk, dv = gradient.over_heads(of_head, start)
        pl.when(count > 0)(partial(self.await_squares, group, waiting))
        self.exchange()  # all have read our keys
        for x, buffer, out in zip(
            (dk * gradient.call.scale, dv), stay, self.outputs[:2], strict=True
        ):
            buffer[...] = x.astype(gradient.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, out.at[self.b, rows, self.h])
        plgpu.wait_smem_to_gmem(0)

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
            plgpu.barrier_wait(self.scratch.taken.at[group])
        else:
            self.finish_adding(*waiting)

    def exchange(self) -> None:
        """Waits for the other warpgroups that compute."""
        if self.gradient.config.groups == 1:
            return
        plgpu.barrier_arrive(self.scratch.exchanged)
        plgpu.barrier_wait(self.scratch.exchanged)


@dataclass(frozen=True)
class _Step:
    """One visit, which adds to the gradients of the keys and of the queries."""

    block: _ThreadBlock
    group: Any
    weights: Weights
    is_careful: bool

    def __call__(
        self, at: Any, is_full: Any, after: Any, count: Any, waiting: Any, *given: Any
    ) -> Any:
        gradient, scratch = self.block.gradient, self.block.scratch
        slot = lax.rem(count, i32(gradient.config.stages))
        first = at * gradient.config.columns
        last = partial(self.block.await_squares, self.group, waiting)

        def meanwhile() -> None:
            if after is not None:
                pl.when(count > 0)(last)

        weights, d_scores = self.on_tile(slot, first, is_full, meanwhile)
        weights = weights.astype(gradient.dtype)
        d_scores = d_scores.astype(gradient.dtype)
        query, d_out = (x.at[slot] for x in scratch.visit)
        twin = scratch.d_scores.at[lax.rem(count, i32(scratch.d_scores.shape[0]))]
        if self.is_careful:  # 0 times NaN is not
            (_, flags), tile = self.block.arrays.blind, self.weights.tile
            is_here = flags[tile.b, tile.h, at] != 0
            clear = partial(clear_rows, query, partial(self.is_blind, slot))
            pl.when(is_here)(clear)

        def body(add: Any) -> None:
            add(1, weights, d_out)
            twin.at[self.group][...] = d_scores
            plgpu.commit_smem()
            self.block.exchange()

            more = partial(add, 0, d_scores, query)
            if gradient.call.interpret:  # whose sums cannot change in an inner scope
                more()

            for n, part in enumerate(self.block.kernel.parts):
                is_first = n == 0
                then = more if is_first and not gradient.call.interpret else None

                def run(*squares: Any, part: Any = part, then: Any = then) -> None:
                    self.start_squares(part, squares, twin)
                    if then is not None:
                        then()
                    wait = int(0 in part)  # for all but dk
                    found = [
                        plgpu.wgmma_accumulator_load(x, wait_n=wait) for x in squares
                    ]
                    if wait:
                        self.release(1, slot, after)
                    if wait and after is None:
                        pl.when(count > 0)(last)
                    for m, x in zip(part, found, strict=True):
                        scratch.squares.at[self.group, m][...] = x

                square = plgpu.ACC((_SQUARE, _SQUARE), jnp.float32)
                pl.run_scoped(run, *[square] * len(part))
            plgpu.commit_smem()
            if after is None:
                plgpu.barrier_arrive(scratch.added.at[self.group])

        dk, dv = sums(given, body, gradient.call.interpret)
        self.release(0, slot, after)
        if after is not None:
            place = self.weights.tile.b, self.weights.tile.h, at
            self.block.start_to_add(*place)
            waiting = tuple(jnp.asarray(x, jnp.int32) for x in place)
        return count + 1, waiting, dk, dv

    def release(self, side: int, slot: Any, after: Any) -> None:
        """Queries or cotangents that have been read make room for others."""
        if after is None:
            plgpu.barrier_arrive(self.block.scratch.free[side].at[slot])
            return
        is_there, at = after
        tile = self.weights.tile

        @pl.when(is_there)
        def _() -> None:
            plgpu.commit_smem()  # all warps have read
            self.block.load_side(side, slot, tile.b, tile.h, at)

    def on_tile(
        self, slot: Any, first: Any, is_full: Any, meanwhile: Any
    ) -> tuple[Any, Any]:
        """Weights, and gradients of the scores before `score_mod`.

        The tensor cores make both products at once, or, to leave registers to a mod
        that only adds, one after the other: ALiBi with 64 channels 305 TFLOP/s against
        250. Under a mod with a slope that is slower, soft cap 181 against 200, and also
        where unseen keys need care.
        """
        gradient = self.weights.gradient
        adds = gradient.score is not None and not gradient.has_slope
        if adds and not gradient.call.has_unseen:
            return self.in_turn(slot, first, is_full, meanwhile)
        return self.at_once(slot, first, is_full, meanwhile)

    def in_turn(
        self, slot: Any, first: Any, is_full: Any, meanwhile: Any
    ) -> tuple[Any, Any]:
        scratch = self.block.scratch
        keys, values = (x.at[self.group] for x in scratch.stay)
        query, d_out = (x.at[slot] for x in scratch.visit)
        plgpu.barrier_wait(scratch.here[0].at[slot])
        scores, _ = multiply(keys, query, meanwhile)
        weights, _ = self.weights(first, self.shifts(slot), scores)
        weights = self.hide(first, is_full, weights)
        plgpu.barrier_wait(scratch.here[1].at[slot])
        return weights, weights * (multiply(values, d_out) - self.known(-1, slot))

    def at_once(
        self, slot: Any, first: Any, is_full: Any, meanwhile: Any
    ) -> tuple[Any, Any]:
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
            found, slope = weights(first, self.shifts(slot), here)
            found = self.hide(first, is_full, found)
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

    def hide(self, first: Any, is_full: Any, found: Any) -> Any:
        is_shown = [x for x in (is_full, self.block.is_inside) if x is not None]
        if not is_shown:
            return found
        is_shown = functools.reduce(jnp.logical_and, is_shown)
        return lax.cond(is_shown, lambda x: x, partial(self.weights.hide, first), found)

    def start_squares(self, part: Any, squares: Any, twin: Any) -> None:
        """What this visit adds to dq, with the keys of all warpgroups."""
        kernel, scratch = self.block.kernel, self.block.scratch
        keys = scratch.finite_keys or scratch.stay[0]
        for n, square in zip(part, squares, strict=True):
            row, column = kernel.place_of(self.group * kernel.squares + n)
            for group in range(kernel.gradient.config.groups):
                left = twin.at[group, :, pl.ds(row, _SQUARE)]
                right = keys.at[group, :, pl.ds(column, _SQUARE)]
                plgpu.wgmma(square, left.transpose((1, 0)), right)
