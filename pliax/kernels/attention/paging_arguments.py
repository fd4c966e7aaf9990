"""What a paged cache was given, checked; contents where they are known."""

from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from .arguments import brief, check_has_mask_mod, integer
from .block_mask import BlockMask


def positive_sizes(**sizes: Any) -> tuple[int, ...]:
    """Integers of at least 1."""
    where, remedy = "PagedCache.create", "Pass for example page_size=128."
    found = {name: integer(where, name, n, remedy) for name, n in sizes.items()}
    wrong = {name: n for name, n in found.items() if n < 1}
    if wrong:
        raise ValueError(f"{where}: sizes must be at least 1, found {wrong}.\n{remedy}")
    return tuple(found.values())


def index_array(where: str, name: str, x: Any, ranks: tuple[int, ...]) -> Array:
    """An int32 array of one of the ranks."""
    x = jnp.asarray(x)
    found = brief(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(
            f"{where}: {name} must be integers, found {found}.\n"
            "Pass a Python integer or an int32 array."
        )
    if x.ndim not in ranks:
        wanted = " or ".join(str(n) for n in ranks)
        raise ValueError(
            f"{where}: {name} must have {wanted} dimensions, found {found}.\n"
            "Pass sequences (n,) with positions (n, t), or one sequence with (t,)."
        )
    return x.astype(jnp.int32)


def check_tokens(name: str, x: Any, store: Any, sequence: Any, positions: Any) -> None:
    """Refuse tokens of another shape or dtype than their places in the store."""
    wanted = (*positions.shape, *store.shape[2:])
    if positions.shape[:-1] != sequence.shape or x.shape != wanted:
        raise ValueError(
            f"assign: {name} {list(x.shape)} do not fit sequence "
            f"{list(sequence.shape)}, positions {list(positions.shape)} and a cache of "
            f"(heads, dimension) {store.shape[2:]}.\n"
            "Pass (n,), (n, t) and (n, t, heads, dimension), n and t the same."
        )
    if x.dtype != store.dtype:
        raise TypeError(
            f"assign: {name} are {x.dtype}, the cache holds {store.dtype}.\n"
            f"Cast them, as in {name}.astype(cache.keys.dtype)."
        )


def check_mask(cache: Any, mask: Any, n: int) -> None:
    """Refuse a mask that does not mean these sequences or these pages."""
    where = "convert_block_mask"
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"{where}: block_mask must be a BlockMask, found {type(mask).__name__}.\n"
            "Make one with px.create_block_mask(mask_mod, B, H, q_len, kv_len)."
        )
    q_size, kv_size = mask.block_size
    if kv_size != cache.page_size:
        raise ValueError(
            f"{where}: the mask has blocks of {kv_size} keys, a page holds "
            f"{cache.page_size}.\n"
            f"Make the mask with block_size=({q_size}, {cache.page_size})."
        )
    check_has_mask_mod(where, mask)
    if mask.shape[0] not in (1, n):
        raise ValueError(
            f"{where}: the mask was made for {mask.shape[0]} sequences, asked for {n}."
            f"\nMake it with B={n}, or B=None if it is the same for all."
        )
    if mask.shape[0] < n and mask.mask_mod.reads(0):
        raise ValueError(
            f"{where}: the mask_mod reads b, but the mask was made with B=None for "
            f"{n} sequences.\nPass B={n} to create_block_mask."
        )


def known_true(failed: Any) -> bool:
    """Whether something failed, where that can be known: not under `jit`."""
    return not isinstance(failed, Tracer) and bool(failed)


def refuse_unknown(where: str, cache: Any, sequence: Any) -> None:
    """Raise if there is no such sequence."""
    batch = len(cache.lengths)
    wrong = [int(s) for s in np.asarray(sequence) if not 0 <= s < batch]
    if wrong:
        raise ValueError(
            f"{where}: asked for sequence {wrong[0]}, the cache holds {batch}.\n"
            f"Pass indices from 0 to {batch - 1}, or create it with a larger batch."
        )


def refuse_reserve(cache: Any, sequence: Any, length: Any) -> NoReturn:
    """Say by counts why pages were not reserved."""
    refuse_unknown("reserve", cache, sequence)
    slots, size = cache.page_table.shape[1], cache.page_size
    wanted = np.zeros(len(cache.lengths), int)
    np.maximum.at(wanted, np.asarray(sequence), -(-np.asarray(length) // size))
    needed = np.maximum(wanted - np.asarray(cache.capacity) // size, 0)
    if (largest := wanted.max()) > slots:
        raise ValueError(
            f"reserve: asked for {largest} pages of {size} tokens for sequence "
            f"{wanted.argmax()}, one sequence may have {slots}.\n"
            f"Create the cache with max_pages={largest} or more."
        )
    free = np.asarray(cache.free)
    raise ValueError(
        f"reserve: asked for {needed.sum()} pages of {size} tokens for sequences "
        f"{np.flatnonzero(needed).tolist()}, {free.sum()} free of {free.size}.\n"
        "Erase sequences that have ended, or create the cache with more pages."
    )


def refuse_assign(cache: Any, sequence: Any, positions: Any) -> NoReturn:
    """Name the first token that has no page."""
    active = np.max(positions, axis=1, initial=-1) >= 0  # the others are padding
    sequence, positions = np.asarray(sequence)[active], np.asarray(positions)[active]
    refuse_unknown("assign", cache, sequence)
    capacity = np.asarray(cache.capacity)[sequence]
    i, j = np.argwhere(positions >= capacity[:, None])[0]
    s, position = int(sequence[i]), int(positions[i, j])
    raise ValueError(
        f"assign: position {position} of sequence {s} has no page, {capacity[i]} "
        f"positions are reserved.\n"
        f"Call cache = reserve(cache, {s}, {position + 1}) before."
    )
