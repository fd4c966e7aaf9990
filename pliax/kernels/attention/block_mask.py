"""BlockMask: which blocks of the score matrix a mask leaves, as data.

Classification decides most blocks from bounds on their indices and looks at the scores
of the others, never in T S memory. It runs under `jit` without the host: a train step
builds the mask from the document ids it is given.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pliax.core.jaxprs import ClosedFunction
from pliax.core.padded_calls import InBucket, has_size, padded_call
from pliax.core.typing import Leaf

from . import drawing
from .arguments import check_has_mask_mod, close_mask_mod, kind_of
from .block_arguments import (
    FROM_LISTS,
    block_sizes,
    check_contents,
    check_flag,
    check_lengths,
    check_lists,
    check_sizes,
    full_lists,
    lengths_of_lists,
    or_one,
    picks,
    reaches,
    taken_length,
)
from .block_lists import (
    BlockLists,
    all_lists,
    block_counts,
    known,
    listed,
    spread,
    with_ragged_partial,
)
from .classification import classify
from .limits import hiding, limited, limits_of
from .masks import noop_mask
from .tiles import broadcast


_PICTURES = 4  # of batch and heads, in a drawing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockMask:
    """The blocks of a mask, and the mask itself.

    A pytree: `jax.jit` takes it as an argument and does not compile again when only its
    contents change, since the mask is stored as its jaxpr (static) and the arrays it
    captured (leaves). Built by `create_block_mask`, or by `from_kv_blocks` from lists.

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
        mask_mod: The mask, `(b, h, q_idx, kv_idx) -> bool`; None after indexing.
        seq_lengths: Query and key length.
        block_size: Queries and keys of a block.
        lists_decide: False where `mask_mod` alone is the mask, and the lists follow
            from it (`create_block_mask`). True where the lists are part of it
            (`from_kv_blocks`, `with_mask_mod`): see `visible`.
        halves: Lists of smaller blocks, and what is known of each (`refinement`), which
            `flex_attention` adds to a sparse mask for kernels that gain by them; None
            in what users make.

    Examples:
        >>> import pliax as px
        >>> mask = px.create_block_mask(lambda b, h, q, k: q >= k, None, None, 384, 384)
        >>> print(mask)
        BlockMask(shape=(1, 1, 384, 384), block_size=(128, 128), sparsity=33.3%)
        b=0, h=0
        ░░
        ██░░
        ████░░
        ██ full, ░░ partial, blank empty: each cell a block of 128 x 128
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
    seq_lengths: tuple[Any, Any] = field(metadata={"static": True})
    block_size: tuple[int, int] = field(metadata={"static": True})
    lists_decide: bool = field(default=False, metadata={"static": True})
    halves: Any = None

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Any,
        kv_indices: Any,
        full_kv_num_blocks: Any = None,
        full_kv_indices: Any = None,
        *,
        block_size: Any = 128,
        mask_mod: Any = None,
        seq_lengths: Any = None,
    ) -> "BlockMask":
        """A mask from the key blocks each row of query blocks attends to.

        Concrete lists are checked. Traced ones cannot be: what they list twice counts
        once, what lies outside is left out, what is listed as both is full.

        Args:
            kv_num_blocks: Number of partial blocks of each row, int32 (B, H, rows).
            kv_indices: Their columns, in any order, the first `kv_num_blocks` valid;
                int32 (B, H, rows, columns), or fewer columns beside `seq_lengths`.
            full_kv_num_blocks: Number of blocks in which `mask_mod` is True everywhere,
                or has no say. A block that reaches beyond the end is moved to
                the partial ones.
            full_kv_indices: Their columns.
            block_size: Queries and keys of a block, or one number for both.
            mask_mod: `(b, h, q_idx, kv_idx) -> bool` inside the partial blocks. None
                hides nothing there.
            seq_lengths: Query and key length; None for rows and columns of whole
                blocks.

        Returns:
            The mask, with its lists ascending and transposed.

        Raises:
            ValueError: If shapes do not fit each other or the lengths, only one of the
                full arrays is given, or concrete lists name a block twice or one
                outside.
            TypeError: If an array is not int32.

        Examples:
            >>> import jax.numpy as jnp, pliax as px
            >>> num = jnp.array([[[1, 2]]], jnp.int32)
            >>> indices = jnp.array([[[[1, 0], [0, 1]]]], jnp.int32)
            >>> px.BlockMask.from_kv_blocks(num, indices).to_dense().tolist()
            [[[[0, 1], [1, 1]]]]
        """
        sizes = block_sizes(FROM_LISTS, block_size)
        full = full_lists(kv_num_blocks, full_kv_num_blocks, full_kv_indices)
        lists = BlockLists(kv_num_blocks, kv_indices, *full)
        check_lists(lists)
        lengths, columns = lengths_of_lists(lists, seq_lengths, sizes)
        check_contents(lists, columns)
        partial, full = spread(BlockLists(*map(jnp.asarray, lists)), columns)
        closed = close_mask_mod(noop_mask if mask_mod is None else mask_mod)
        states = with_ragged_partial(partial & ~full, full, lengths, sizes)
        return _from_blocks(*states, closed, lengths, sizes, lists_decide=True)

    @property
    def shape(self) -> tuple[Any, Any, Any, Any]:
        """Batch, heads, query length and key length."""
        self._check_single("shape")
        batch, heads = self.kv_num_blocks.shape[:2]
        return (batch, heads, *self.seq_lengths)

    def numel(self) -> int:
        """Number of scores: batch times heads times both lengths."""
        return math.prod(self.shape)

    def sparsity(self) -> float:
        """Percentage of the blocks that are not computed.

        Raises:
            TypeError: If the mask is traced: its contents are not known yet.
        """
        self._check_single("sparsity")
        self._check_known("sparsity", "jnp.mean(mask.to_dense())")
        # Told to JAX's guards of transfers; an array that has been read is not again.
        counts = jax.device_get((self.kv_num_blocks, self.full_kv_num_blocks))
        computed = sum(np.sum(x) for x in counts)
        return float(100 * (1 - computed / math.prod(self.kv_indices.shape)))

    def to_dense(self) -> Int[Array, "B H R C"]:
        """The blocks as a matrix: 1 where a block is computed, partial or full.

        Its entries are blocks, not scores; those are `create_mask(mask.visible, ...)`.

        Examples:
            >>> import pliax as px
            >>> mask = px.create_block_mask(
            ...     lambda b, h, q, k: q >= k, None, None, 256, 256
            ... )
            >>> mask.to_dense().tolist()
            [[[[1, 0], [1, 1]]]]
        """
        self._check_single("to_dense")
        partial, full = self._blocks()
        return (partial | full).astype(jnp.int32)

    @property
    def visible(self) -> Callable[[Any, Any, Any, Any], Bool[Array, ""]]:
        """The whole mask as a `mask_mod`: `(b, h, q_idx, kv_idx) -> bool`.

        That is `mask_mod` itself where it decides alone. Where the lists do, a key is
        seen in a full block, and in a partial one if `mask_mod` says so.

        Raises:
            ValueError: If the mask has no `mask_mod`.
        """
        self._check_single("visible")
        check_has_mask_mod("BlockMask.visible", self)
        batch, heads = self.kv_num_blocks.shape[:2]
        rows, columns = self.block_size
        blocks = self._blocks() if self.lists_decide else None

        def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            b, h, q, kv = (jnp.asarray(x, jnp.int32) for x in (b, h, q_idx, kv_idx))
            seen = self.mask_mod(b, h, q, kv)
            if blocks is None:
                return seen
            partial, full = blocks
            b, h = b if batch > 1 else 0, h if heads > 1 else 0
            block = (b, h, q // rows, kv // columns)
            return full[block] | (partial[block] & seen)

        return visible

    def with_mask_mod(self, mask_mod: Any) -> "BlockMask":
        """The same blocks with another `mask_mod` inside the partial ones.

        Indexing leaves a mask without one, because it renumbers batch, heads and
        queries. For `mask[2]` pass `lambda b, h, q, k: old(b + 2, h, q, k)`.

        Args:
            mask_mod: `(b, h, q_idx, kv_idx) -> bool`. It has no say in full blocks,
                and blocks that are not listed stay hidden, whatever it says.

        Raises:
            TypeError: If it has the wrong number of arguments, or does not return one
                bool.
        """
        return replace(self, mask_mod=close_mask_mod(mask_mod), lists_decide=True)

    def __getitem__(self, index: Any) -> "BlockMask":
        """Select sequences, heads and query blocks: `mask[b, h, q_block]`.

        Each index selects in its own dimension and keeps it: an integer leaves size 1.
        Besides there are slices, and lists or arrays of integers. Traced ones cannot be
        checked; out of range they take the nearest, as everywhere in JAX.

        Returns:
            A mask without `mask_mod`, since b, h and q_idx are renumbered: attention
            refuses it until `with_mask_mod` gives it one.

        Raises:
            IndexError: If there are more than 3 indices, or one is out of range,
                selects nothing or is none of these.
            ValueError: If the last query block, being shorter than the others, would no
                longer be last.
        """
        self._check_single("indexing")
        taken = picks(index, self.kv_num_blocks.shape)
        length = taken_length(taken[2], self.seq_lengths[0], self.block_size[0])
        partial, full = self._blocks()
        for axis, pick in enumerate(taken):
            partial = jnp.take(partial, pick, axis=axis, mode="clip")
            full = jnp.take(full, pick, axis=axis, mode="clip")
        lengths = (length, self.seq_lengths[1])
        return _from_blocks(
            partial, full, None, lengths, self.block_size, lists_decide=True
        )

    def adjust(self, q_len: Any, kv_len: Any) -> "BlockMask":
        """The mask for other lengths.

        Shorter lengths cut the lists; a last block that has become ragged is partial.
        For a longer one the blocks are classified anew from `mask_mod`, with full ones
        apart, as `create_block_mask` does. What `mask_mod` captured must reach as far.

        Args:
            q_len: Queries, at least 1.
            kv_len: Keys, at least 1.

        Raises:
            ValueError: If a length is not positive, or a mask grows whose lists decide:
                they say nothing of the blocks to come.
            TypeError: If a length is no integer.

        Examples:
            >>> import pliax as px
            >>> mask = px.create_block_mask(
            ...     lambda b, h, q, k: q >= k, None, None, 256, 256
            ... )
            >>> mask.adjust(128, 256).to_dense().tolist()
            [[[[1, 0]]]]
        """
        self._check_single("adjust")
        queries, keys = check_lengths("BlockMask.adjust", q_len, kv_len)
        lengths = (queries, keys)
        if lengths == self.seq_lengths:
            return self
        if not reaches(self.seq_lengths, lengths):
            return self._grown(lengths)
        rows, columns = block_counts(lengths, self.block_size)
        partial, full = (x[:, :, :rows, :columns] for x in self._blocks())
        states = with_ragged_partial(partial, full, lengths, self.block_size)
        mask_mod, given = self.mask_mod, self.lists_decide
        if given and mask_mod is not None:  # has no say in blocks that were full
            mask_mod = close_mask_mod(self.visible)
        sizes = self.block_size
        return _from_blocks(*states, mask_mod, lengths, sizes, lists_decide=given)

    def _grown(self, lengths: tuple[Any, Any]) -> "BlockMask":
        if self.lists_decide:
            raise ValueError(
                f"BlockMask.adjust: asked for (q_len, kv_len) = {lengths} of a mask "
                f"for {self.seq_lengths} whose lists of blocks are given: they say "
                "nothing of the blocks to come.\nMake the mask for these lengths with "
                "create_block_mask or BlockMask.from_kv_blocks."
            )
        batch, heads = self.kv_num_blocks.shape[:2]
        return create_block_mask(
            self.mask_mod, batch, heads, *lengths, block_size=self.block_size
        )

    def __repr__(self) -> str:
        shape = getattr(self.kv_num_blocks, "shape", None)
        if shape is None or len(shape) != 3:
            lists = f"kv_num_blocks={kind_of(self.kv_num_blocks)}"
            return f"BlockMask({lists}, seq_lengths={self.seq_lengths})"
        mod = ", mask_mod=None" if self.mask_mod is None else ""
        return f"BlockMask(shape={self.shape}, block_size={self.block_size}{mod})"

    def __str__(self) -> str:
        """A drawing of the blocks; of a traced mask or a stack, its shape."""
        single = getattr(self.kv_num_blocks, "ndim", None) == 3
        if not single or not known(self.lists(transposed=False)):
            return repr(self)
        places = product(*map(range, self.kv_num_blocks.shape[:2]))
        pictures = [
            (f"b={b}, h={h}", self._host_states(b, h))
            for b, h in islice(places, _PICTURES)
        ]
        head = f"{repr(self)[:-1]}, sparsity={self.sparsity():.1f}%)"
        more = math.prod(self.kv_num_blocks.shape[:2]) - len(pictures)
        foot = f"\nand {more} more: index the mask to see them, mask[b, h]"
        return f"{head}\n{drawing.draw(pictures, self.block_size)}{foot * (more > 0)}"

    def plot(self, b: Any = 0, h: Any = 0, ax: Any = None) -> Any:
        """Draw the blocks of one head with matplotlib: empty, partial and full.

        Args:
            b: Sequence of the batch.
            h: Query head.
            ax: The Axes to draw on; None makes a figure.

        Returns:
            The Axes.

        Raises:
            ImportError: Without matplotlib, which the extra `plots` installs.
            IndexError: If b or h is out of range.
            TypeError: If the mask is traced: its contents are not known yet.
        """
        self._check_single("plot")
        self._check_known("plot", "mask.to_dense()")
        b, h = (int(pick[0]) for pick in picks((b, h), self.kv_num_blocks.shape)[:2])
        states = self._host_states(b, h)
        title = f"sparsity {100 * np.mean(states == drawing.EMPTY):.1f} %"
        if self.kv_num_blocks.shape[:2] != (1, 1):
            title = f"b = {b}, h = {h}: {title}"
        return drawing.plot(states, title=title, block_size=self.block_size, ax=ax)

    def _host_states(self, b: int, h: int) -> Int[np.ndarray, "R C"]:
        lists = BlockLists(*(np.asarray(x[b, h]) for x in self.lists(transposed=False)))
        states = np.full(lists.indices.shape, drawing.EMPTY)
        for state, num, indices in (
            (drawing.PARTIAL, lists.num, lists.indices),
            (drawing.FULL, lists.full_num, lists.full_indices),
        ):
            row, place = np.nonzero(listed(num, indices))
            states[row, indices[row, place]] = state
        return states

    def _blocks(self) -> tuple[Bool[Array, "B H R C"], Bool[Array, "B H R C"]]:
        """Which blocks are partial, and which are full."""
        return spread(self.lists(transposed=False), self.kv_indices.shape[3])

    def _check_single(self, asked: str) -> None:
        if self.kv_num_blocks.ndim != 3:
            raise ValueError(
                f"BlockMask.{asked}: kv_num_blocks must have 3 dimensions (B, H, "
                f"rows), found {kind_of(self.kv_num_blocks)}: a stack of masks.\n"
                "Map over the stack with jax.vmap or jax.lax.scan, or index its leaves."
            )

    def _check_known(self, asked: str, instead: str) -> None:
        if not known(self.lists(transposed=False)):
            raise TypeError(
                f"BlockMask.{asked}: the mask's contents are not known: it is traced, "
                "donated or spread over other hosts (kv_num_blocks "
                f"{kind_of(self.kv_num_blocks)}).\n"
                f"Call it outside jax.jit, or use {instead} there."
            )

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
    separate_full_blocks: Any = True,
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
            that `mask_mod` need not be asked in them. A block that reaches beyond the
            end is never full.

    Returns:
        The mask as a pytree; its first two dimensions are 1 where B or H is None.

    Raises:
        ValueError: If a length or block size is not positive.
        TypeError: If a size is no integer, or if `mask_mod` has the wrong number of
            arguments or does not return one bool.

    Examples:
        >>> import pliax as px
        >>> mask = px.create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
        >>> mask.kv_num_blocks.tolist(), mask.full_kv_num_blocks.tolist()
        ([[[1, 1]]], [[[0, 1]]])
    """
    sizes = block_sizes("create_block_mask", block_size)
    check_flag("create_block_mask", "separate_full_blocks", separate_full_blocks)
    batch, heads, queries, keys = check_sizes(
        "create_block_mask", *or_one(B, H), q_len, kv_len
    )
    closed = close_mask_mod(mask_mod)
    shape = batch, heads, queries, keys
    if has_size((closed, shape)):
        lists = _lists_of_any_size(closed, shape, sizes, bool(separate_full_blocks))
    else:
        lists = _lists(closed, shape, sizes, bool(separate_full_blocks))
    return BlockMask(
        *lists, mask_mod=closed, seq_lengths=(queries, keys), block_size=sizes
    )


def _lists(
    mask_mod: ClosedFunction, shape: Any, sizes: tuple[int, int], separate_full: bool
) -> tuple[Array, ...]:
    """The lists of a mask, by row and by column."""
    batch, heads, *lengths = shape
    some, every = classify(mask_mod, batch, heads, tuple(lengths), sizes)
    full = every if separate_full else jnp.zeros_like(every)
    return all_lists(some & ~full, full)


def _lists_of_any_size(
    mask_mod: ClosedFunction, shape: Any, sizes: tuple[int, int], separate_full: bool
) -> tuple[Array, ...]:
    """The same for symbolic sizes: what is beyond the valid ones is hidden."""

    def lists(here: InBucket, mask_mod: ClosedFunction) -> tuple[Array, ...]:
        limits = limits_of(here, shape)
        mod = hiding(limited(here, mask_mod, limits), limits)
        return _lists(mod, tuple(map(here.length, shape)), sizes, separate_full)

    rows, columns = (-(-n // size) for n, size in zip(shape[2:], sizes, strict=True))
    by_row, by_column = (*shape[:2], rows), (*shape[:2], columns)
    shapes = [by_row, (*by_row, columns)] * 2 + [by_column, (*by_column, rows)] * 2
    results = tuple(jax.ShapeDtypeStruct(x, jnp.int32) for x in shapes)
    return padded_call("create_block_mask", lists, (mask_mod,), results)


def create_mask(
    mask_mod: Any, B: Any, H: Any, q_len: Any, kv_len: Any
) -> Bool[Array, "B H T S"]:
    """Every score of a mask as an array: for pictures and tests of short sequences.

    Args:
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, written for scalar int32 indices.
        B: Sequences of the batch; None if the mask is the same for all of them.
        H: Query heads; None if the mask is the same for all of them.
        q_len: Queries, at least 1.
        kv_len: Keys, at least 1.

    Returns:
        True where the query may see the key; the first two dimensions are 1 where B or
        H is None.

    Raises:
        ValueError: If a size is not positive.
        TypeError: If a size is no integer, or if `mask_mod` has the wrong number of
            arguments or does not return one bool.

    Examples:
        >>> from pliax.kernels.attention.block_mask import create_mask
        >>> create_mask(lambda b, h, q, k: q >= k, None, None, 2, 3)[0, 0].tolist()
        [[True, False, False], [True, True, False]]
    """
    sizes = check_sizes("create_mask", *or_one(B, H), q_len, kv_len)
    return _dense_mask(close_mask_mod(mask_mod), sizes)


def _from_blocks(
    partial: Bool[Array, "B H R C"],
    full: Bool[Array, "B H R C"],
    mask_mod: ClosedFunction | None,
    lengths: tuple[Any, Any],
    sizes: tuple[int, int],
    *,
    lists_decide: bool = False,
) -> BlockMask:
    """The mask of given blocks, with lists by row and by column."""
    return BlockMask(
        *all_lists(partial, full),
        mask_mod=mask_mod,
        seq_lengths=lengths,
        block_size=sizes,
        lists_decide=lists_decide,
    )


@jax.jit(static_argnums=1)
def _dense_mask(
    mask_mod: ClosedFunction, sizes: tuple[Any, ...]
) -> Bool[Array, "B H T S"]:
    b, h, q_idx, kv_idx = jnp.ix_(*(jnp.arange(n, dtype=jnp.int32) for n in sizes))
    return jnp.broadcast_to(broadcast(mask_mod, 4, b, h, q_idx, kv_idx), sizes)
