"""What makes a BlockMask, or selects from one, checked: sizes, lists, indices.

Shapes are always checked; contents where they are at hand, which traced ones are not.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .arguments import integer, kind_of
from .block_lists import BlockLists, block_counts, known, listed


FROM_LISTS = "BlockMask.from_kv_blocks"
_LISTS = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
_DIMENSIONS = "batch index", "head index", "query block"


# --- sizes ----------------------------------------------------------------------------


def block_sizes(function: str, block_size: Any) -> tuple[int, int]:
    """Queries and keys of a block, from a pair or one number for both."""
    remedy = "Pass one block_size such as 128, or a pair (of queries, of keys)."
    pair = block_size if isinstance(block_size, tuple | list) else (block_size,) * 2
    if len(pair) != 2:
        raise ValueError(
            f"{function}: block_size must be an integer or a pair of them, found "
            f"{block_size!r}.\n{remedy}"
        )
    sizes = tuple(integer(function, "block_size", n, remedy) for n in pair)
    if min(sizes) < 1:
        raise ValueError(
            f"{function}: block_size must be at least 1, found {block_size!r}.\n"
            f"{remedy}"
        )
    return sizes[0], sizes[1]


def or_one(B: Any, H: Any) -> tuple[Any, Any]:
    """Batch and heads of the lists: one for all where the user said None."""
    return 1 if B is None else B, 1 if H is None else H


def check_sizes(
    function: str, B: Any, H: Any, q_len: Any, kv_len: Any
) -> tuple[Any, Any, Any, Any]:
    """Batch, heads, query and key length: integers of at least 1."""
    remedy = "Pass B=None or H=None for a mask shared by all sequences or heads."
    batch, heads = _positive(function, remedy, {"B": B, "H": H})
    return batch, heads, *check_lengths(function, q_len, kv_len)


def check_lengths(function: str, q_len: Any, kv_len: Any) -> tuple[Any, Any]:
    """Query and key length: integers of at least 1."""
    remedy = "Pass the lengths of the query and of the key."
    queries, keys = _positive(function, remedy, {"q_len": q_len, "kv_len": kv_len})
    return queries, keys


def _positive(function: str, remedy: str, sizes: dict[str, Any]) -> list[Any]:
    found = {name: integer(function, name, n, remedy) for name, n in sizes.items()}
    wrong = {name: n for name, n in found.items() if isinstance(n, int) and n < 1}
    if wrong:
        raise ValueError(
            f"{function}: sizes must be at least 1, found {wrong}.\n{remedy}"
        )
    return list(found.values())


def check_flag(function: str, name: str, x: Any) -> None:
    """Refuse what is neither True nor False.

    Raises:
        TypeError: Saying what was found.
    """
    if not isinstance(x, bool | np.bool_):
        raise TypeError(
            f"{function}: {name} must be True or False, found {kind_of(x)}.\n"
            "It is static: pass a Python bool."
        )


def reaches(lengths: tuple[Any, Any], others: tuple[int, int]) -> bool:
    """Whether no other length is known to be larger, or not known at all."""
    pairs = zip(lengths, others, strict=True)
    return all(isinstance(n, int) and isinstance(m, int) and n >= m for n, m in pairs)


# --- lists ----------------------------------------------------------------------------


def full_lists(num: Any, full_num: Any, full_indices: Any) -> tuple[Any, Any]:
    """The lists of full blocks; without them, lists of none."""
    if (full_num is None) != (full_indices is None):
        given = "full_kv_indices" if full_num is None else "full_kv_num_blocks"
        _refuse_lists(
            f"{given} was given alone",
            "Pass both full_kv_num_blocks and full_kv_indices, or neither.",
        )
    if full_num is None and hasattr(num, "shape"):
        return np.zeros(num.shape, np.int32), np.zeros((*num.shape, 1), np.int32)
    return full_num, full_indices


def check_lists(lists: BlockLists) -> None:
    """Arrays of int32, (B, H, rows) and (B, H, rows, columns)."""
    for name, x in zip(_LISTS, lists, strict=True):
        if not isinstance(x, jax.Array | np.ndarray) or x.dtype != jnp.int32:
            raise TypeError(
                f"{FROM_LISTS}: {name} must be an int32 array, found {kind_of(x)}.\n"
                "Make it one, for example with jnp.asarray(x, jnp.int32)."
            )
        dimensions = ("B", "H", "rows", "columns")[: 3 if "num" in name else 4]
        if x.ndim != len(dimensions) or 0 in x.shape:
            _refuse_lists(
                f"{name} must have {len(dimensions)} dimensions "
                f"({', '.join(dimensions)}), none of them empty, found {kind_of(x)}",
                f"Add the missing ones, as in {name}[None, None] for one mask of all.",
            )
    if len({x.shape[:3] for x in lists}) > 1:
        found = (f"{n} {kind_of(x)}" for n, x in zip(_LISTS, lists, strict=True))
        _refuse_lists(
            f"the arrays must agree in (B, H, rows), found {', '.join(found)}",
            "Give every row of query blocks a number and a list of columns.",
        )


def lengths_of_lists(
    lists: BlockLists, seq_lengths: Any, sizes: tuple[int, int]
) -> tuple[tuple[Any, Any], Any]:
    """Query and key length, and the columns of blocks they make."""
    rows, width = lists.indices.shape[2:]
    if seq_lengths is None:
        lengths = (rows * sizes[0], width * sizes[1])
    elif isinstance(seq_lengths, tuple | list) and len(seq_lengths) == 2:
        lengths = check_lengths(FROM_LISTS, *seq_lengths)
    else:
        _refuse_lists(
            f"seq_lengths must be a pair, found {seq_lengths!r}",
            "Pass (q_len, kv_len), or None for whole blocks.",
        )
    counts = block_counts(lengths, sizes)
    widest = max(width, lists.full_indices.shape[3])
    if rows != counts[0] or widest > counts[1]:
        _refuse_lists(
            f"the lists are for {rows} rows of at most {widest} blocks, but "
            f"seq_lengths {lengths} in blocks of {sizes} make {counts[0]} rows and "
            f"{counts[1]} columns",
            "Pass the seq_lengths and block_size that the lists were made for.",
        )
    return lengths, counts[1]


def check_contents(lists: BlockLists, columns: Any) -> None:
    """Of concrete lists: every block exists and is listed once."""
    if not known(lists):
        return
    host = BlockLists(*map(np.asarray, lists))
    counts = np.zeros((*host.num.shape, columns), np.int32)
    for n in (0, 2):
        num, indices = host[n], host[n + 1]
        wrong = (num < 0) | (num > indices.shape[3])
        _refuse_where(wrong, _LISTS[n], num, f"0 to {indices.shape[3]} can be listed")
        valid = listed(num, indices)
        wrong = valid & ((indices < 0) | (indices >= columns))
        _refuse_where(wrong, _LISTS[n + 1], indices, f"columns are 0 to {columns - 1}")
        *place, position = np.nonzero(valid)
        np.add.at(counts, (*place, indices[(*place, position)]), 1)
    _refuse_where(
        counts > 1, "(b, h, row, column)", counts, "a block is listed at most once"
    )


def _refuse_where(wrong: np.ndarray, name: str, found: np.ndarray, rule: str) -> None:
    if wrong.any():
        place = tuple(int(n) for n in np.argwhere(wrong)[0])
        _refuse_lists(
            f"{name} has {found[place]} at {place}, but {rule}",
            "Correct the lists; of each row the first kv_num_blocks entries count.",
        )


def _refuse_lists(found: str, remedy: str) -> NoReturn:
    raise ValueError(f"{FROM_LISTS}: {found}.\n{remedy}")


# --- indexing -------------------------------------------------------------------------


def picks(index: Any, shape: Sequence[int]) -> list[Any]:
    """For batch, heads and query blocks the numbers to take."""
    given = index if isinstance(index, tuple) else (index,)
    if len(given) > 3:
        raise IndexError(
            f"BlockMask: found {len(given)} indices, but a mask has three dimensions "
            "to select from, mask[b, h, q_block].\nKey blocks stay: for fewer keys use "
            "adjust(q_len, kv_len)."
        )
    padded = (*given, *(slice(None),) * (3 - len(given)))
    return [_pick(*x) for x in zip(_DIMENSIONS, padded, shape, strict=True)]


def _pick(name: str, index: Any, n: int) -> Any:
    if isinstance(index, Tracer):
        if index.ndim > 1 or not jnp.issubdtype(index.dtype, jnp.integer):
            _refuse_index(name, index)
        return jnp.where(index < 0, index + n, index).reshape(-1)
    picked = np.arange(n)[index] if isinstance(index, slice) else np.asarray(index)
    if picked.ndim > 1 or picked.dtype.kind not in "iu":
        _refuse_index(name, index)
    wrong = picked[(picked < -n) | (picked >= n)]
    if wrong.size:
        raise IndexError(
            f"BlockMask: {name} {int(wrong[0])} is out of range: the mask has {n}, "
            f"from {-n} to {n - 1}.\nA mask made with B=None or H=None is one for all."
        )
    if not picked.size:
        raise IndexError(
            f"BlockMask: {index!r} selects none of {n} in the dimension of the "
            f"{name}.\nSelect at least one."
        )
    return np.where(picked < 0, picked + n, picked).reshape(-1)


def _refuse_index(name: str, index: Any) -> NoReturn:
    raise IndexError(
        f"BlockMask: {name} must be an integer, a slice or a list or array of integers "
        f"of one dimension, found {kind_of(index)}.\nWrite : for all of a dimension."
    )


def taken_length(picked: Any, length: int, block: int) -> int:
    """Queries of the taken blocks; only the last of them may be ragged."""
    rows = -(-length // block)
    missing = rows * block - length
    if isinstance(missing, int) and not missing:
        return len(picked) * block
    if isinstance(picked, Tracer):
        raise ValueError(
            f"BlockMask: traced query blocks of {length} queries in blocks of {block}: "
            "the last block is shorter, and whether it stays last is not known.\n"
            "Index with Python integers, or use a block_size that divides the length."
        )
    if np.any(picked[:-1] == rows - 1):
        raise ValueError(
            f"BlockMask: query blocks {picked.tolist()} of {length} queries in blocks "
            f"of {block}: block {rows - 1} is shorter and must stay last.\n"
            "Select it last, once, or use a block_size that divides the length."
        )
    return len(picked) * block - missing * int(picked[-1] == rows - 1)
