"""Few queries in the fused kernels: heads packed into tiles, keys split into parts.

    query heads  ->  rows of their key head      (`head_packing`, where it can be)
    key blocks   ->  parts, a thread block each  (`mosaic_gpu.parts`)
    sums         ->  one result                  (`mosaic_gpu_merging`)

So all multiprocessors read the keys, and each key is read once. Lengths are data: parts
are cut from the lists of the mask, of equal length whatever a cache has filled.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array

from . import mosaic_gpu
from .block_mask import BlockMask
from .head_packing import pack, pack_mask, pack_mod
from .merging import FEW
from .mosaic_gpu_limits import refused_packing
from .mosaic_gpu_merging import Parts, merge


def forward(
    arrays: Any,
    score_mod: Any,
    block_mask: BlockMask | None,
    *,
    splits: int | None = None,
    asked: Mapping[str, int] = mosaic_gpu.NOTHING,
    **static: Any,
) -> tuple[Array, Array, Array, Array]:
    """As `mosaic_gpu.forward`, by parts for few queries or where `splits` are given."""
    query, key, value = arrays
    if _is_whole(query, splits, asked):
        return mosaic_gpu.forward(arrays, score_mod, block_mask, asked=asked, **static)
    is_refused = refused_packing((query, key), score_mod, block_mask) is not None
    group = 1 if is_refused else query.shape[2] // key.shape[2]
    given = pack(query, group), key, value
    mods = pack_mod(score_mod, group), pack_mask(block_mask, group)
    parts = Parts(*mosaic_gpu.parts(given, *mods, splits=splits, **static))
    interpret = static.get("interpret", False)
    out, lse, maximum, log_sum = merge(
        parts, query.shape[1], group, query.dtype, interpret=interpret
    )
    return out[..., : value.shape[3]], lse, maximum, log_sum


def inference(
    arrays: Any,
    score_mod: Any,
    block_mask: BlockMask | None,
    *,
    splits: int | None = None,
    asked: Mapping[str, int] = mosaic_gpu.NOTHING,
    **static: Any,
) -> tuple[Array, Array, Array]:
    """As `mosaic_gpu.inference`, by parts where `forward` is."""
    given, options = (arrays, score_mod, block_mask), {"asked": asked, **static}
    if _is_whole(arrays[0], splits, asked):
        return mosaic_gpu.inference(*given, **options)
    return forward(*given, splits=splits, **options)[:3]


def _is_whole(query: Array, splits: int | None, asked: Mapping[str, int]) -> bool:
    """Whether a thread block visits all keys that its queries see."""
    return splits is None and (query.shape[1] >= FEW or bool(asked))
