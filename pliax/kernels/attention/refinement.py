"""A sparse mask's blocks cut smaller, and what is known of each before a kernel runs.

    block_mask  ->  the same mask, with `halves` beside its lists

Where few queries see a key, as in packed documents, most blocks are partial: of 12
documents in 4,096 tokens 53 percent of what blocks of 128 x 128 compute is seen, of
blocks of 64 x 64 70 percent. Each kernel has the blocks it gains by. Of a partial one
its entry says which conditions of the mask (`normalization.conditions`) every score
meets: on the diagonal all are of one document, elsewhere no key is in the future.
`mosaic_gpu` does not ask those again; `triton` takes the blocks alone. The mask's
contents must be at hand: what is traced may be of any kind.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from pliax.core.evaluation import at_trace_time
from pliax.core.jaxprs import Program

from .block_lists import (
    COLUMN_BITS,
    MET_BITS,
    BlockLists,
    TellingLists,
    known,
    listed,
)
from .block_mask import BlockMask
from .classification import look_at
from .normalization import flatten


# A mask is sparse where so many percent of its blocks are not computed, and a key is
# seen by so few queries: then there is a backward kernel for each side, which makes two
# products more, but no thread block waits for its turn to add to dq. TFLOP/s on one
# H200 of 12 documents, and with one kernel: 128 channels 145 and 128 of 4,096 tokens,
# 317 and 257 of 16,384. Kernels of one warpgroup, several of which share a
# multiprocessor, take blocks of 64 x 64. Milliseconds, and with blocks of 128 rows: 64
# channels, one H100, of 4,096 tokens 0.239 and 0.278 backward, of 16,384 tokens 0.947
# and 1.000 backward, 0.311 and 0.320 forward; 128 channels, one H200, of 4,096 tokens
# 0.107 and 0.123 forward, 0.358 and 0.380 backward, of which dk and dv take them; of
# 16,384 tokens as long forward, 1.47 and 1.50 backward. With them for dq, too, 0.345
# and 1.56. Windows of 1,024 tokens, 128 channels, take 0.849 with a kernel for each
# side and 0.835 with one.
_SPARSE, _FEW = 66.0, 900
_WHOLE, _HALF = 128, 64


class Halves(NamedTuple):
    """Lists of the blocks of a mask, cut smaller.

    Attributes:
        queries: Of 64 x 64, by row.
        keys: Of 64 x 64, by column, for the gradients of keys and values.
        wide_queries: Of 128 x 128, by row, for wide kernels: forward beyond 128
            channels, for dq beyond 64.
    """

    queries: TellingLists
    keys: TellingLists
    wide_queries: TellingLists


class Cut(NamedTuple):
    """The blocks that a kernel gains by.

    Attributes:
        sizes: Queries and keys of a block.
        lists: Which there are, by row or by column.
    """

    sizes: tuple[int, int]
    lists: TellingLists


def refined(mask: BlockMask, sequences: int, heads: int) -> BlockMask:
    """The mask with its halves, if it is known to be sparse.

    They are made eagerly, also while a function is traced, and kept beside the fields
    of the mask, as `cached_property` does, so that every layer has them of one mask.

    Args:
        mask: The mask.
        sequences: Of the call. Lists that they share say nothing of `mask_mod` if it
            asks which of several it is.
        heads: Query heads of the call, likewise.
    """
    if not known(jax.tree.leaves(mask)) or mask.halves is not None:
        return mask
    if any(n % _WHOLE for n in mask.block_size):
        return mask
    counts = zip(mask.shape, (sequences, heads), strict=False)
    if any(mask.mask_mod.reads(i) and n != m for i, (n, m) in enumerate(counts)):
        return mask
    found = vars(mask).get("_halves")
    if found is None:
        # Before anything is eager: there, literals would be constants of the program.
        flat = Program(flatten(mask.mask_mod))
        with at_trace_time():
            found = _halves(mask, flat)
        vars(mask)["_halves"] = found
    return replace(mask, halves=found) if found else mask


def _halves(mask: BlockMask, flat: Program) -> Halves | tuple[()]:
    sparsity = mask.sparsity()
    queries = (1 - sparsity / 100) * mask.seq_lengths[0]
    if sparsity < _SPARSE or queries >= _FEW:
        return ()
    tiles = _tiles(mask, flat)
    return Halves(
        tiles.by_row(),
        tiles.transposed().by_row(),
        tiles.joined(2).by_row(),
    )


class _Tiles(NamedTuple):
    """Blocks of a mask, in no order; all others are empty.

    Attributes:
        shape: Sequences, heads, rows and columns of blocks.
        place: Of each, the number it has among all, int64 (N,).
        is_seen: Whether some score is seen.
        is_full: Whether no score is hidden.
        met: A bit for each condition of the mask: whether all scores meet it.
    """

    shape: tuple[int, int, int, int]
    place: Any
    is_seen: Any
    is_full: Any
    met: Any

    def joined(self, n: int) -> "_Tiles":
        """The blocks that n of their rows and columns make."""
        *many, row, column = np.unravel_index(self.place, self.shape)
        last = -(-self.shape[2] // n), -(-self.shape[3] // n)
        shape = (*self.shape[:2], *last)
        place: Any = np.ravel_multi_index((*many, row // n, column // n), shape)
        order = np.argsort(place, kind="stable")
        places, starts = np.unique(place[order], return_index=True)
        seen, full, met = (x[order] for x in (self.is_seen, self.is_full, self.met))
        full = np.add.reduceat(full.astype(int), starts) == n * n
        seen = np.logical_or.reduceat(seen, starts)
        return _Tiles(shape, places, seen, full, np.bitwise_and.reduceat(met, starts))

    def transposed(self) -> "_Tiles":
        """Their columns as rows."""
        *many, row, column = np.unravel_index(self.place, self.shape)
        shape = (*self.shape[:2], self.shape[3], self.shape[2])
        place = np.ravel_multi_index((*many, column, row), shape)
        return self._replace(shape=shape, place=place)

    def by_row(self) -> TellingLists:
        """The columns of each row, with what they meet: a power of two, or less.

        There are up to four times as many blocks as in the mask, few of them listed;
        and other documents seldom need another executable.
        """
        columns, rows = self.shape[3], math.prod(self.shape[:3])
        seen = np.nonzero(self.is_seen)[0]
        row = self.place[seen] // columns
        seen = seen[np.lexsort((self.place[seen], ~self.is_full[seen], row))]
        full, (row, column) = self.is_full[seen], np.divmod(self.place[seen], columns)
        total, whole = (np.bincount(x, minlength=rows) for x in (row, row[full]))
        width = min(columns, 1 << max(0, int(total.max()) - 1).bit_length())
        met = np.where(full, 2**MET_BITS - 1, self.met[seen])
        entries = np.zeros((rows, width), np.int32)
        place = np.arange(len(row)) - (np.cumsum(total) - total)[row]
        entries[row, place] = column | (met << COLUMN_BITS)
        found = [
            x.astype(np.int32).reshape(*self.shape[:3], *x.shape[1:])
            for x in (whole, total, entries)
        ]
        return TellingLists(*jax.device_put(found))


def _tiles(mask: BlockMask, flat: Program) -> _Tiles:
    """Of 64 x 64: those in full and in partial blocks."""
    lists = BlockLists(*jax.device_get(mask.lists(transposed=False)))
    shape = (*lists.num.shape[:2], *(-(-n // _HALF) for n in mask.seq_lengths))
    full = _inside(mask, shape, lists.full_num, lists.full_indices)
    partial = _inside(mask, shape, lists.num, lists.indices)
    places = np.unravel_index(partial, shape)
    (some, every), *of_conditions = _looked_at(mask, flat, places)
    met = np.zeros(len(some), int)
    for n, (_, all_meet) in enumerate(of_conditions):
        met |= all_meet.astype(int) << n
    lengths = (n // _HALF for n in mask.seq_lengths)
    is_whole = [x < n for x, n in zip(places[2:], lengths, strict=True)]
    ones = np.ones(len(full), bool)
    return _Tiles(
        shape,
        np.concatenate([full, partial]),
        np.concatenate([ones, some]),
        np.concatenate([ones, every & np.all(is_whole, axis=0)]),
        np.concatenate([ones * (2**MET_BITS - 1), met]),
    )


def _inside(mask: BlockMask, shape: Any, num: Any, indices: Any) -> Any:
    """The numbers of the tiles inside of listed blocks."""
    b, h, row, n = np.nonzero(listed(num, indices))
    column = indices[b, h, row, n]
    rows, columns = (n // _HALF for n in mask.block_size)
    r, c = (x.reshape(-1) for x in np.indices((rows, columns)))
    places = [x[:, None] for x in (b, h, row * rows, column * columns)]
    places[2] = places[2] + r
    places[3] = places[3] + c
    is_there = (places[2] < shape[2]) & (places[3] < shape[3])
    places = [np.broadcast_to(x, is_there.shape)[is_there] for x in places]
    return np.ravel_multi_index(places, shape)


def _looked_at(mask: BlockMask, flat: Program, places: Any) -> list[tuple[Any, Any]]:
    """Some and every of such tiles: of what is seen, of what meets each condition."""
    count = len(places[0])
    if not count:
        return [(np.zeros(0, bool), np.zeros(0, bool))]
    more = (1 << (count - 1).bit_length()) - count
    padded = tuple(np.pad(x, (0, more), "edge").astype(np.int32) for x in places)
    # Captured arrays may lie on a mesh; the tiles do not.
    mod, given = jax.device_put((jax.device_get(mask.mask_mod), padded))
    found = jax.device_get(look_at(mod, flat, given, mask.seq_lengths, (_HALF, _HALF)))
    return [(some[:count], every[:count]) for some, every in found]


def halves_of(mask: BlockMask | None, asked: Mapping[str, int]) -> Halves | None:
    """Those of a mask that has them, if the user asks for nothing of the kernels."""
    return mask.halves if mask is not None and mask.halves and not asked else None


def for_queries(halves: Halves, *, is_wide: bool) -> Cut:
    """The blocks that the forward kernel and that for dq gain by.

    Args:
        halves: Of the mask.
        is_wide: Whether the kernel has so many channels that it gains by larger ones.
    """
    if is_wide:
        return Cut((_WHOLE, _WHOLE), halves.wide_queries)
    return Cut((_HALF, _HALF), halves.queries)


def for_keys(halves: Halves) -> Cut:
    """The blocks that the kernel for dk and dv gains by."""
    return Cut((_HALF, _HALF), halves.keys)
