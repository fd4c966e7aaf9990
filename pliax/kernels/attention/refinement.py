"""A sparse mask's blocks in halves, for kernels that waste less of a tile by them.

    block_mask  ->  the same mask, with `halves` beside its lists

Where few queries see a key, as in packed documents, most blocks are partial: of 12
documents in 4,096 tokens 53 percent of what blocks of 128 x 128 compute is seen, of
blocks of 64 x 64 70 percent. Each kernel has the half it gains by. It takes a mask
whose contents are at hand: what is traced may be of any kind.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, use_abstract_mesh

from .block_lists import BlockLists, known, listed
from .block_mask import BlockMask
from .classification import look_at


# A mask is sparse where so many percent of its blocks are not computed, and a key is
# seen by so few queries: then there is a backward kernel for each side, which makes two
# products more, but no thread block waits for its turn to add to dq. TFLOP/s on one
# H200 of 12 documents with these halves, and with one kernel: 64 channels 101 and 92 of
# 4,096 tokens, 222 and 222 of 16,384; 128 channels 145 and 128, 317 and 257. Windows of
# 1,024 tokens, on one H100: 0.99 and 0.95 of one kernel.
_SPARSE, _FEW = 66.0, 900
# So few that the forward kernel of 64 channels gains by blocks of 64 x 64: documents of
# 341 tokens 146 against 118, of 1,365 tokens 270 against 276.
_FEWER = 512
_WHOLE, _HALF = 128, 64


class Halves(NamedTuple):
    """Lists of the blocks of a mask cut in halves.

    Attributes:
        forward: Of 64 x 64, by row, for 64 channels; None where it would not gain.
        queries: Of 128 x 64, by row, for the gradient of queries of 64 channels.
        keys: Of 64 x 128, by column, for the gradients of keys and values.
    """

    forward: BlockLists | None
    queries: BlockLists
    keys: BlockLists


def refined(mask: BlockMask) -> BlockMask:
    """The mask with its halves, if it is known to be sparse.

    They are made eagerly, also while a function is traced, and kept beside the fields
    of the mask, as `cached_property` does, so that every layer has them of one mask.
    """
    if not known(jax.tree.leaves(mask)):
        return mask
    if any(n % _WHOLE for n in mask.block_size) or mask.halves is not None:
        return mask
    found = vars(mask).get("_halves")
    if found is None:
        # Whoever calls may have a mesh, which is not meant for this, and a guard
        # against transfers that nobody asked for: these are asked for.
        with (
            jax.ensure_compile_time_eval(),
            use_abstract_mesh(AbstractMesh((), ())),
            jax.transfer_guard("allow"),
        ):
            found = _halves(mask)
        vars(mask)["_halves"] = found
    return replace(mask, halves=found) if found else mask


def _halves(mask: BlockMask) -> Halves | tuple[()]:
    sparsity = mask.sparsity()
    queries = (1 - sparsity / 100) * mask.seq_lengths[0]
    if sparsity < _SPARSE or queries >= _FEW:
        return ()
    tiles = _tiles(mask)
    return Halves(
        tiles.by_row() if queries < _FEWER else None,
        tiles.joined(rows=2).by_row(),
        tiles.joined(columns=2).transposed().by_row(),
    )


class _Tiles(NamedTuple):
    """Blocks of a mask of which some score is seen, in no order.

    Attributes:
        shape: Sequences, heads, rows and columns of blocks.
        place: Of each, the number it has among all, int64 (N,).
        is_full: Whether no score is hidden.
    """

    shape: tuple[int, int, int, int]
    place: Any
    is_full: Any

    def joined(self, rows: int = 1, columns: int = 1) -> "_Tiles":
        """The blocks that so many of their rows or columns make."""
        *many, row, column = np.unravel_index(self.place, self.shape)
        last = -(-self.shape[2] // rows), -(-self.shape[3] // columns)
        shape = (*self.shape[:2], *last)
        place = np.ravel_multi_index((*many, row // rows, column // columns), shape)
        places, which = np.unique(place, return_inverse=True)
        full = np.bincount(which, self.is_full, minlength=len(places))
        return _Tiles(shape, places, full == rows * columns)

    def transposed(self) -> "_Tiles":
        """Their columns as rows."""
        *many, row, column = np.unravel_index(self.place, self.shape)
        shape = (*self.shape[:2], self.shape[3], self.shape[2])
        place = np.ravel_multi_index((*many, column, row), shape)
        return _Tiles(shape, place, self.is_full)

    def by_row(self) -> BlockLists:
        """The columns of each row."""
        of_kind = (np.sort(self.place[self.is_full == x]) for x in (False, True))
        (num, indices), (full_num, full_indices) = map(self._listed, of_kind)
        return BlockLists(num, indices, full_num, full_indices)

    def _listed(self, place: Any) -> tuple[jax.Array, jax.Array]:
        """How many of each row there are, and their columns: a power of two, or less.

        There are up to four times as many blocks as in the mask, few of them listed;
        and other documents seldom need another executable.
        """
        columns = self.shape[3]
        row, column = np.divmod(place, columns)
        num = np.bincount(row, minlength=math.prod(self.shape[:3]))
        width = min(columns, 1 << max(0, int(num.max()) - 1).bit_length())
        indices = np.zeros((len(num), width), np.int32)
        indices[row, np.arange(len(row)) - (np.cumsum(num) - num)[row]] = column
        num, indices = (
            x.reshape(*self.shape[:3], *x.shape[1:]) for x in (num, indices)
        )
        return jax.device_put((num.astype(np.int32), indices))


def _tiles(mask: BlockMask) -> _Tiles:
    """Of 64 x 64: those in full blocks, and of partial ones those with a seen score."""
    lists = BlockLists(*jax.device_get(mask.lists(transposed=False)))
    shape = (*lists.num.shape[:2], *(-(-n // _HALF) for n in mask.seq_lengths))
    partial = _inside(mask, shape, lists.num, lists.indices)
    full = _inside(mask, shape, lists.full_num, lists.full_indices)
    some, every = _seen(mask, np.unravel_index(partial, shape))
    place = np.concatenate([full, partial[some]])
    is_full = np.concatenate([np.ones(len(full), bool), every[some]])
    return _Tiles(shape, place, is_full)


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


def _seen(mask: BlockMask, places: Any) -> Any:
    """Of such tiles, whether some score is seen, and whether every one."""
    count = len(places[0])
    if not count:
        return np.zeros((2, 0), bool)
    more = (1 << (count - 1).bit_length()) - count
    padded = (np.pad(x, (0, more), "edge").astype(np.int32) for x in places)
    sizes = _HALF, _HALF
    # Captured arrays may lie on a mesh; the tiles do not.
    mod, given = jax.device_put((jax.device_get(mask.mask_mod), tuple(padded)))
    found = look_at(mod, given, mask.seq_lengths, sizes)
    some, every = (x[:count] for x in jax.device_get(found))
    lengths = (n // _HALF for n in mask.seq_lengths)
    pairs = zip(places[2:], lengths, strict=True)
    return some, every & np.all([x < n for x, n in pairs], axis=0)


def for_forward(mask: BlockMask, channels: int) -> BlockMask:
    """The mask in the blocks that the forward kernel gains by."""
    if mask.halves is None or channels > _HALF:
        return mask
    lists = mask.halves.forward
    return mask if lists is None else _by_row(mask, lists, (_HALF, _HALF))


def for_queries(mask: BlockMask, channels: int) -> BlockMask:
    """The mask in the blocks that the kernel for dq gains by."""
    if mask.halves is None or channels > _HALF:
        return mask
    return _by_row(mask, mask.halves.queries, (_WHOLE, _HALF))


def for_keys(mask: BlockMask) -> BlockMask:
    """The mask in the blocks that the kernel for dk and dv gains by."""
    if mask.halves is None:
        return mask
    num, indices, full_num, full_indices = mask.halves.keys
    return replace(
        mask,
        q_num_blocks=num,
        q_indices=indices,
        full_q_num_blocks=full_num,
        full_q_indices=full_indices,
        block_size=(_HALF, _WHOLE),
        halves=None,
    )


def _by_row(mask: BlockMask, lists: BlockLists, sizes: tuple[int, int]) -> BlockMask:
    num, indices, full_num, full_indices = lists
    return replace(
        mask,
        kv_num_blocks=num,
        kv_indices=indices,
        full_kv_num_blocks=full_num,
        full_kv_indices=full_indices,
        block_size=sizes,
        halves=None,
    )
