"""BlockMask: which blocks of the score matrix a mask leaves, as data.

Classification looks at one row of blocks at a time, so that the mask of T queries and
S keys costs T S evaluations and never T S memory. It runs under `jit` without the host:
a train step builds the mask from the document ids it is given.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import reduce
from jaxtyping import Array, Bool, Int

from pliax.core.jaxprs import ClosedFunction
from pliax.core.typing import Leaf

from .arguments import close_mask_mod, integer
from .tiles import block_positions, mask_tile


class BlockLists(NamedTuple):
    """For every row of blocks the columns to visit: partial ones and full ones."""

    num: Int[Array, "Bm Hm R"]
    indices: Int[Array, "Bm Hm R C"]
    full_num: Int[Array, "Bm Hm R"]
    full_indices: Int[Array, "Bm Hm R C"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockMask:
    """The blocks of a mask, and the mask itself.

    A pytree: `jax.jit` takes it as an argument and does not compile again when only its
    contents change, since the mask is stored as its jaxpr (static) and the arrays it
    captured (leaves). Built by `create_block_mask`.

    Attributes:
        kv_num_blocks: Number of partial blocks of each row, int32 (B, H, rows).
        kv_indices: Their columns, ascending, the first `kv_num_blocks` valid;
            int32 (B, H, rows, columns).
        full_kv_num_blocks: Number of full blocks of each row: no score is masked.
        full_kv_indices: Their columns.
        q_num_blocks: The transpose: number of partial blocks of each column.
        q_indices: Their rows; int32 (B, H, columns, rows).
        full_q_num_blocks: Number of full blocks of each column.
        full_q_indices: Their rows.
        mask_mod: The mask, `(b, h, q_idx, kv_idx) -> bool`.
        seq_lengths: Query and key length.
        block_size: Queries and keys of a block.
    """

    kv_num_blocks: Leaf
    kv_indices: Leaf
    full_kv_num_blocks: Leaf
    full_kv_indices: Leaf
    q_num_blocks: Leaf
    q_indices: Leaf
    full_q_num_blocks: Leaf
    full_q_indices: Leaf
    mask_mod: Leaf
    seq_lengths: tuple[int, int] = field(metadata={"static": True})
    block_size: tuple[int, int] = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, query length and key length."""
        batch, heads = self.kv_num_blocks.shape[:2]
        return (batch, heads, *self.seq_lengths)

    def lists(self, *, transposed: bool) -> BlockLists:
        """The blocks of every row; `transposed`: of every column."""
        if transposed:
            return BlockLists(
                self.q_num_blocks,
                self.q_indices,
                self.full_q_num_blocks,
                self.full_q_indices,
            )
        return BlockLists(
            self.kv_num_blocks,
            self.kv_indices,
            self.full_kv_num_blocks,
            self.full_kv_indices,
        )


def create_block_mask(
    mask_mod: Any,
    B: Any,
    H: Any,
    q_len: Any,
    kv_len: Any,
    *,
    block_size: Any = 128,
    separate_full_blocks: bool = True,
) -> BlockMask:
    """Classify the blocks of a mask as empty, partial or full.

    Args:
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, written for scalar int32 indices;
            True where the query may see the key. It may capture arrays, also tracers.
            No gradient flows to them.
        B: Sequences of the batch; None if the mask is the same for all of them.
        H: Query heads; None if the mask is the same for all of them.
        q_len: Queries, at least 1.
        kv_len: Keys, at least 1.
        block_size: Queries and keys of a block, or one number for both. 128 is
            FlexAttention's default.
        separate_full_blocks: Whether blocks without a masked score are listed apart, so
            that attention skips `mask_mod` in them. A block that reaches beyond the end
            is never full.

    Returns:
        The mask as a pytree; its first two dimensions are 1 where B or H is None.

    Raises:
        ValueError: If a length or block size is not positive.
        TypeError: If a size is no integer, or if `mask_mod` has the wrong number of
            arguments or does not return one bool.

    Example:
        >>> import pliax as px
        >>> mask = px.create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
        >>> mask.kv_num_blocks.tolist(), mask.full_kv_num_blocks.tolist()
        ([[[1, 1]]], [[[0, 1]]])
    """
    sizes = _block_sizes(block_size)
    batch, heads, queries, keys = _check_sizes(
        B=1 if B is None else B, H=1 if H is None else H, q_len=q_len, kv_len=kv_len
    )
    closed = close_mask_mod(mask_mod)
    some, every = _classify(closed, batch, heads, (queries, keys), sizes)
    full = every if separate_full_blocks else jnp.zeros_like(every)
    partial = some & ~full
    return BlockMask(
        *_list_blocks(partial),
        *_list_blocks(full),
        *_list_blocks(jnp.swapaxes(partial, 2, 3)),
        *_list_blocks(jnp.swapaxes(full, 2, 3)),
        mask_mod=closed,
        seq_lengths=(queries, keys),
        block_size=sizes,
    )


def dense_lists(
    lengths: tuple[int, int], blocks: tuple[int, int], *, transposed: bool
) -> BlockLists:
    """Every block: full, but for those which reach beyond the end."""
    whole = [
        (np.arange(-(-length // block)) + 1) * block <= length
        for length, block in zip(lengths, blocks, strict=True)
    ]
    full = jnp.asarray(whole[0][:, None] & whole[1][None, :])[None, None]
    full = jnp.swapaxes(full, 2, 3) if transposed else full
    return BlockLists(*_list_blocks(~full), *_list_blocks(full))


def _block_sizes(block_size: Any) -> tuple[int, int]:
    remedy = "Pass one block_size such as 128, or a pair (of queries, of keys)."
    pair = block_size if isinstance(block_size, tuple | list) else (block_size,) * 2
    if len(pair) != 2:
        raise ValueError(
            "create_block_mask: block_size must be an integer or a pair of them, found "
            f"{block_size!r}.\n{remedy}"
        )
    sizes = tuple(integer("create_block_mask", "block_size", n, remedy) for n in pair)
    if min(sizes) < 1:
        raise ValueError(
            "create_block_mask: block_size must be at least 1, found "
            f"{block_size!r}.\n{remedy}"
        )
    return sizes[0], sizes[1]


def _check_sizes(**sizes: Any) -> tuple[int, ...]:
    remedy = "Pass B=None or H=None for a mask shared by all sequences or heads."
    found = {
        name: integer("create_block_mask", name, n, remedy) for name, n in sizes.items()
    }
    wrong = {name: n for name, n in found.items() if n < 1}
    if wrong:
        raise ValueError(
            f"create_block_mask: sizes must be at least 1, found {wrong}.\n{remedy}"
        )
    return tuple(found.values())


@jax.jit(static_argnums=(1, 2, 3, 4))
def _classify(
    mask_mod: ClosedFunction,
    B: int,
    H: int,
    lengths: tuple[int, int],
    sizes: tuple[int, int],
) -> tuple[Bool[Array, "B H R C"], Bool[Array, "B H R C"]]:
    """Which blocks hold some visible score, and which hold no masked one."""
    rows, columns = (-(-n // size) for n, size in zip(lengths, sizes, strict=True))
    b, h = jnp.arange(B, dtype=jnp.int32), jnp.arange(H, dtype=jnp.int32)
    kv_idx, kv_real = block_positions(0, columns * sizes[1], lengths[1])
    tiles = jax.vmap(mask_tile, (None, 0, None, None, None))

    def row(r: Int[Array, ""]) -> tuple[Array, Array]:
        q_idx, q_real = block_positions(r, sizes[0], lengths[0])
        visible = tiles(mask_mod, b, h, q_idx, kv_idx)
        visible &= (q_real[:, None] & kv_real[None, :])[None, None]
        pattern = "b h q (c n) -> b h c"
        some = reduce(visible, pattern, "any", n=sizes[1])
        return some, reduce(visible, pattern, "all", n=sizes[1])

    some, every = jax.lax.map(row, jnp.arange(rows, dtype=jnp.int32))
    return jnp.moveaxis(some, 0, 2), jnp.moveaxis(every, 0, 2)


def _list_blocks(
    blocks: Bool[Array, "B H R C"],
) -> tuple[Int[Array, "B H R"], Int[Array, "B H R C"]]:
    """Number of True columns of each row, and their indices in front, ascending."""
    indices = jnp.argsort(~blocks, axis=-1, stable=True)
    return jnp.sum(blocks, axis=-1, dtype=jnp.int32), indices.astype(jnp.int32)
