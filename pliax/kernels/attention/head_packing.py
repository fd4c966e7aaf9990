"""The query heads of one key head as rows: one product with its keys for all of them.

    query t of head h = n G + g   ->   row t G + g of key head n,    G = H / K

What a mod asks by head or by query is then a function of the row.
"""

from dataclasses import replace
from typing import Any

from jax import lax
from jaxtyping import Array, Float

from pliax.core.jaxprs import ClosedFunction, close

from .block_mask import BlockMask
from .limits import scalars


_SPAN = 128  # rows that a thread block has at most


def pack(query: Float[Array, "B T H D"], group: int) -> Float[Array, "B K R D"]:
    """Queries as rows of key heads."""
    B, T, H, D = query.shape
    x = query.reshape(B, T, H // group, group, D)
    return x.transpose(0, 2, 1, 3, 4).reshape(B, H // group, T * group, D)


def pack_mod(mod: ClosedFunction | None, group: int) -> ClosedFunction | None:
    """A mod that is asked about key heads and rows."""
    if mod is None or group == 1:
        return mod

    def of_row(*args: Any) -> Array:
        *score, b, h, row, kv_idx = args
        head, query = h * group + lax.rem(row, group), lax.div(row, group)
        return mod(*score, b, head, query, kv_idx)

    return close(of_row, *scalars(mod))


def pack_mask(mask: BlockMask | None, group: int) -> BlockMask | None:
    """A mask of rows: its lists by row of blocks alone, for the forward pass.

    A single row of blocks is for all rows there are.
    """
    if mask is None:
        return None
    (queries, keys), (block, columns) = mask.seq_lengths, mask.block_size
    rows = queries * group
    block = block * group if has_rows(mask) else -(-rows // _SPAN) * _SPAN
    return replace(
        mask,
        mask_mod=pack_mod(mask.mask_mod, group),
        seq_lengths=(rows, keys),
        block_size=(block, columns),
    )


def has_rows(mask: BlockMask) -> bool:
    """Whether queries have several lists of blocks."""
    return mask.kv_num_blocks.shape[2] != 1


def refused_mask(mask: BlockMask | None, group: int) -> str | None:
    """Why the lists of a mask are none of rows; None where they are."""
    if mask is None or group == 1 or mask.kv_num_blocks.shape[1] == 1:
        return None
    return "query heads of one key head have lists of blocks of their own"
