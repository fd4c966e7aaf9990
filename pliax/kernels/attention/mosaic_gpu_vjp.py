"""flex_attention on Hopper GPUs: the backward pass, mostly as one fused kernel.

A thread block has the keys of a row of tiles and visits the queries that see them, the
last ones first; a tile lies on its side. Its warpgroups keep dk and dv in registers and
exchange ds in shared memory. What they add to dq is handed over to a warpgroup which
adds it to dq in global memory, while another one loads queries:

    s' = k q',  p' = exp(s' - maximum - log sum),  ds' = p' (v do' - delta) ds/d(q k)
    dv = p' do,  dk = ds' q,  dq += ds k

The additions to a row of tiles of dq happen in the order of the keys: a counter says
whose turn it is. So the sum is the same in every run, and as all thread blocks visit
queries in the same order, and those of the first keys start first, few wait.

Under a mask, where no mod needs the registers, a thread block takes one tile after
another (`mosaic_gpu_next_tiles`): keys, values and queries of the next arrive while dk
and dv of this one leave. With neither mod nor mask, or under a mod that only adds, what
a visit adds to dq is made during the next one, when the others have long exchanged ds.

References:
    Dao, "FlashAttention-2", 2023, Algorithm 2.
    Shah et al., "FlashAttention-3", 2024, section B.1 (a warp that adds to dq).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int

from pliax.kernels._hopper import MULTIPROCESSORS, shared_memory

from .block_lists import BlockLists, TellingLists
from .block_mask import BlockMask
from .configs import Kernel
from .mosaic_gpu import CHANNELS, NOTHING, Call, aligned, call_of, mods_of
from .mosaic_gpu_backward import Order, Scratch, ThreadBlock, counters_of
from .mosaic_gpu_backward_step import SQUARE
from .mosaic_gpu_columns import columns_of
from .mosaic_gpu_gradients import (
    Gradient,
    blind_tiles,
    some_are_far,
    whole_tiles,
)
from .mosaic_gpu_next_tiles import NextTiles
from .mosaic_gpu_split_vjp import gradients_of
from .mosaic_gpu_tiles import as_lists, run_kernel
from .mosaic_gpu_visits import reach
from .normalization import with_slope
from .refinement import for_keys, for_queries, halves_of
from .row_statistics import filled, is_linear, statistics


_WIDE = 128  # channels: registers hold dk, dv and a tile, but little besides
# Heads whose thread blocks start together: the fewer, the more of a head wait for each
# other; of the wide as many as L2 holds queries, cotangents and dq of. One H100, 128
# channels, no mask: of 4,096 tokens 519 TFLOP/s with 4 heads, 507 with 8, 476 with 16
# and 301 with 64; of 16,384 tokens 540 with 2, 509 with 8 and 399 with 16. With 64
# channels, of the time with 16 heads: causal masks with 32 of them 0.87 (1,024 tokens),
# 0.96, 0.97 and 0.98 (16,384), with 64 1.13 (4,096); no mask with 32 0.99 to 1.01.
_TOGETHER, _MASKED_TOGETHER, _L2 = 16, 32, 24 * 2**20


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
    """Gradients of query, key and value, in their dtype.

    Args:
        arrays: Query, key and value.
        score_mod: The mod, or None.
        block_mask: The mask, or None.
        results: The output, and each row's maximum and log-sum.
        cotangents: Of the output and the log-sum-exp.
        scale: What scores are multiplied by.
        interpret: Whether to run in Pallas's interpreter.
        asked: The `kernel_options` of the user.
    """
    call = call_of(arrays, block_mask, scale=scale, interpret=interpret, asked=asked)
    d_out = cotangents[0].astype(arrays[0].dtype)
    padded = tuple(aligned(x) for x in (*arrays, d_out))
    linear, whole = is_linear(score_mod, scale), whole_tiles(call)
    given = call, padded, score_mod, block_mask
    of_rows = partial(statistics, linear, whole, results, cotangents)
    channels = max(padded[1].shape[3], padded[2].shape[3])
    is_sparse = block_mask is not None and block_mask.halves is not None
    is_wide, is_careful = channels > _WIDE, call.has_unseen and not linear
    if is_wide or is_sparse or (channels == _WIDE and is_careful):
        out = filled(filled(results[0], 3, CHANNELS), 1, whole)
        found = _of_each_side(*given, of_rows(with_sums=False), out)
    else:
        found = _all_gradients(*given, of_rows())
    pairs = zip(found, arrays, strict=True)
    return tuple(  # type: ignore[return-value]
        d[:, : x.shape[1], :, : x.shape[3]] for d, x in pairs
    )


def _of_each_side(
    call: Call,
    arrays: tuple[Array, ...],
    score_mod: Any,
    block_mask: BlockMask | None,
    known: tuple[Array, ...],
    out: Array,
) -> list[Array]:
    """By a kernel for dq and others for dk and dv, each in the blocks it gains by.

    That for dq completes delta, as it has the output's cotangent in shared memory: for
    XLA to read both again takes 8 to 11 percent of the pass for short documents.
    """
    channels = max(x.shape[3] for x in arrays[1:3])
    of_queries, of_keys = _in_blocks(call, block_mask, channels)
    given = arrays, score_mod, block_mask
    dq, delta = gradients_of("q", *of_queries, *given, known, out)
    delta = filled(delta, 2, known[-1].shape[2])  # beyond its tiles: 0 times NaN is NaN
    known, found = (*known[:-1], delta), [dq]
    for names in ("k", "v") if channels > _WIDE else ("kv",):
        found += gradients_of(names, *of_keys, *given, known)
    return found


def _in_blocks(
    call: Call, block_mask: BlockMask | None, channels: int
) -> list[tuple[Call, BlockLists | TellingLists | None]]:
    """For queries, and for keys: the call in the blocks they gain by, and the lists."""
    halves = None if channels > _WIDE else halves_of(block_mask, call.asked)
    if halves is not None:
        cuts = for_queries(halves, is_wide=channels > CHANNELS), for_keys(halves)
        return [(replace(call, blocks=x.sizes, lists_tell=True), x.lists) for x in cuts]
    if block_mask is None:
        return [(call, None)] * 2
    return [(call, block_mask.lists(transposed=x)) for x in (False, True)]


def _all_gradients(
    call: Call,
    arrays: tuple[Array, ...],
    score_mod: Any,
    block_mask: BlockMask | None,
    known: tuple[Array, ...],
) -> tuple[Array, Array, Array]:
    query, key, value, d_out = arrays
    blocks, lists, turns, is_seen = None, None, (), None
    if block_mask is not None:
        blocks = block_mask.block_size[1], block_mask.block_size[0]
        lists = block_mask.lists(transposed=True)
        turn, is_seen = _turns(block_mask)
        turns = (turn,)
    channels = key.shape[3], value.shape[3]
    kind = Kernel("backward", channels, blocks)
    config = kind.config(call.asked)
    if score_mod is not None:
        score_mod = with_slope(score_mod)
    loaded = {"k": config.span, "q": reach(config, blocks)}
    mods = mods_of(call, score_mod, block_mask, loaded)
    columns = columns_of(mods, "q", config, kind.room(config))
    gradient = Gradient(call, config, "k", blocks, *mods, query.dtype, columns)
    workers = MULTIPROCESSORS if _takes_many(gradient, channels) else None
    kernel = _Backward(gradient, key.shape[3] // SQUARE, workers)
    rest = as_lists(lists), turns, _rare(gradient, known)
    dk, dv, dq = kernel((key, value), (query, d_out), known, *rest)
    if is_seen is not None:  # nobody wrote to the others
        dq = jnp.where(is_seen, dq, 0)
    return (dq * call.scale).astype(query.dtype), dk, dv


def _rare(gradient: Gradient, known: tuple[Array, ...]) -> tuple[Array, ...]:
    """Whether there is what only a careful kernel gets right, and perhaps where."""
    if gradient.call.has_unseen:
        return blind_tiles(known, gradient.call.sizes["q"], gradient.config.columns)
    return (some_are_far(known),) if gradient.is_known_ahead else ()


def _takes_many(gradient: Gradient, channels: tuple[int, int]) -> bool:
    """Whether thread blocks take one tile of keys after another.

    The gradients of a tile then leave from where those of scores were, which they fill,
    so that keys and values of the next can arrive. Not where NaN may have to be left
    out: that is written for one tile. One H100, 64 channels, parts of the time of a
    thread block for each: windows 0.91, causal masks 0.93, a prefix 0.97. It takes
    registers: no mask and ALiBi 0.99 (4,096 tokens), a table 1.10.
    """
    (D, V), config = channels, gradient.config
    fits = D == V and config.columns == D + V and config.has_mover
    is_simple = gradient.is_linear and gradient.mask is not None
    return fits and is_simple and not gradient.call.has_unseen


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


def heads_together(heads: int, visit: Any, *, is_masked: bool) -> int:
    """How many of the heads start together: a divisor of their number.

    Args:
        heads: Of all sequences.
        visit: The queries and the output's cotangents, (B, T, H, D).
        is_masked: Whether there is a mask.
    """
    length, (keys, values) = visit[0].shape[1], (x.shape[3] for x in visit)
    most = _MASKED_TOGETHER if is_masked else _TOGETHER
    if max(keys, values) >= _WIDE:
        held = length * (2 * (keys + values) + 4 * keys)
        most = max(2, min(_TOGETHER, _L2 // held))
    return max(n for n in range(1, most + 1) if heads % n == 0)


@dataclass(frozen=True)
class _Backward:
    gradient: Gradient
    widths: int  # squares of dq side by side
    workers: int | None  # thread blocks that take tiles, if there are more; or None

    def __call__(self, stay: Any, visit: Any, known: Any, *rest: Any) -> Any:
        gradient, (B, S, heads, _) = self.gradient, stay[0].shape
        config, call = gradient.config, gradient.call
        arrays = stay, visit, known, *rest, *gradient.mods
        leaves, tree = jax.tree.flatten(arrays)
        tiles = -(-S // config.span)
        is_masked = gradient.mask is not None
        together = heads_together(B * heads, visit, is_masked=is_masked)
        order = Order(B * heads, tiles, together, heads)
        workers = self.workers if order.total > (self.workers or order.total) else None
        whole = reach(config, gradient.blocks)
        queries = -(-call.sizes["q"] // whole) * whole
        dq = call.sizes["b"], queries, call.sizes["h"], visit[0].shape[3]
        out = [jax.ShapeDtypeStruct(x.shape, gradient.dtype) for x in stay]

        def body(refs: Any, scratch: Any) -> None:
            arrays = _Arrays(*jax.tree.unflatten(tree, refs[: len(leaves)]))
            shared = Scratch(*scratch[0], *scratch[1:])
            ThreadBlock(self, arrays, refs[len(leaves) :], shared, order, workers).run()

        return run_kernel(
            body,
            self.scratch(stay, visit, known, is_persistent=workers is not None),
            order.grid if workers is None else {"workers": workers},
            config,
            call.interpret,
            counters=counters_of(dq[0], dq[2], queries // config.columns),
            has_own_barriers=True,
            out_type=[*out, jax.ShapeDtypeStruct(dq, jnp.float32)],
        )(*leaves)

    def scratch(
        self, stay: Any, visit: Any, known: Any, *, is_persistent: bool
    ) -> tuple[Any, ...]:
        """The shared memory of a thread block."""
        config = self.gradient.config
        groups, stages = config.groups, config.stages
        rows, columns = config.rows, config.columns
        smem = partial(shared_memory, self.gradient.dtype)
        barriers = partial(plgpu.Barrier, num_barriers=stages)
        squares = (groups, self.squares, SQUARE, SQUARE)
        d_scores = smem(min(groups, 2), groups, rows, columns)
        d_keys = smem(min(groups, 2), groups, 2, rows, stay[0].shape[3])
        return (
            plgpu.RefUnion(d_scores, d_keys) if is_persistent else (d_scores, ()),
            [smem(groups, rows, x.shape[3]) for x in stay],
            smem(groups, rows, stay[0].shape[3])
            if self.gradient.call.has_unseen
            else (),
            [smem(stages, columns, x.shape[3]) for x in visit],
            [plgpu.SMEM((stages, columns), jnp.float32) for _ in known],
            self.gradient.columns.scratch(),
            shared_memory(jnp.float32, *squares),
            plgpu.Barrier(num_arrivals=2, num_barriers=groups),
            [
                barriers(num_arrivals=n)
                for n in (len(known) + len(self.gradient.columns.places), 2)
            ],
            barriers(num_arrivals=groups),
            plgpu.Barrier(num_arrivals=groups),
            plgpu.Barrier(num_barriers=groups),
            plgpu.Barrier(num_barriers=groups),
            NextTiles.scratch(groups + 1, ahead=1) if is_persistent else (),
            plgpu.SMEM((config.threads, 4), jnp.int32) if is_persistent else (),
        )

    @property
    def squares(self) -> int:
        """Of dq, of each warpgroup."""
        config = self.gradient.config
        return config.columns // SQUARE * self.widths // config.groups

    def place_of(self, square: Any) -> tuple[Any, Any]:
        """Query and channel of a square's first; one of the two has more than 64."""
        if self.widths == 1:
            return square * SQUARE, 0
        return 0, square * SQUARE


class _Arrays:
    """The references of a kernel's operands; `rare` is what `_rare` found."""

    def __init__(
        self,
        stay: Any,
        visit: Any,
        known: Any,
        lists: Any,
        turns: Any,
        rare: Any,
        *mods: Any,
    ) -> None:
        self.stay, self.visit, self.known = stay, visit, known
        self.lists, self.turns, self.mods = lists, turns, mods
        self.rare = rare
