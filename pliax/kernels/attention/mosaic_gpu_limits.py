"""What the Mosaic GPU kernels do not do, and why."""

from typing import Any

import jax.numpy as jnp

from pliax.core.padded_calls import Size
from pliax.kernels._hopper import refused_counting, refused_device, refused_interpreter

from .head_packing import has_rows, pack_mask, pack_mod, refused_mask
from .merging import FEW
from .mod_limits import refused_mods


_CHANNELS = 256  # whose sums fit into the registers of a warpgroup
_BLOCK = 64  # rows of one instruction of the tensor cores


def refusal(
    arrays: Any, score_mod: Any, block_mask: Any, *, interpret: bool
) -> str | None:
    """Why the kernels cannot run a call; None where they can."""
    return (
        (refused_interpreter() if interpret else refused_device())
        or _refused_arrays(*arrays)
        or _refused_mask(arrays[0].shape[1], block_mask)
        or refused_mods(arrays[0].shape, score_mod, block_mask)
    )


def refused_packing(arrays: Any, score_mod: Any, block_mask: Any) -> str | None:
    """Why the query heads of a key head cannot share a tile; None where they can."""
    (B, T, H, D), K = arrays[0].shape, arrays[1].shape[2]
    group = H // K
    if group == 1:
        return None
    mods = pack_mod(score_mod, group), pack_mask(block_mask, group)
    return refused_mask(block_mask, group) or refused_mods((B, T * group, K, D), *mods)


def has_backward(block_mask: Any) -> bool:
    """Whether the backward kernels take the blocks of a mask."""
    return block_mask is None or not any(n % _BLOCK for n in block_mask.block_size)


def _refused_arrays(query: Any, key: Any, value: Any) -> str | None:
    dtypes = [x.dtype for x in (query, key, value)]
    sizes = [n for x in (query, key, value) for n in x.shape]
    if not all(isinstance(n, int | Size) for n in sizes):
        return f"it needs known sizes, found {query.shape}, {key.shape}, {value.shape}"
    if dtypes[0] not in (jnp.bfloat16, jnp.float16) or len(set(dtypes)) > 1:
        found = ", ".join(str(x) for x in dtypes)
        return (
            f"query, key and value must all be bfloat16 or all float16, found {found}"
        )
    if (reason := refused_counting()) is not None:
        return reason
    channels = max(key.shape[3], value.shape[3])
    if channels > _CHANNELS:
        return f"it takes up to {_CHANNELS} channels, found {channels}"
    return None


def _refused_mask(queries: Any, block_mask: Any) -> str | None:
    if has_backward(block_mask):
        return None
    is_few = isinstance(queries, int) and queries < FEW
    if is_few and not has_rows(block_mask) and block_mask.block_size[1] % _BLOCK == 0:
        return None
    return (
        f"it takes masks whose blocks are multiples of {_BLOCK} x {_BLOCK}, found "
        f"block_size={block_mask.block_size}; one row of blocks of fewer than {FEW} "
        "queries may be of any height"
    )
