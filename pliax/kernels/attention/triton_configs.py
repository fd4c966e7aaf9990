"""Sizes of the Triton kernels' tiles: a table, what is asked for, and what fits.

Found on one H200 in bfloat16, with 16 heads, 4,096 keys and 64 or 128 channels, of six
to eight sizes each, for ALiBi, soft-capped and dense rows. Small tiles of one warpgroup
were ahead: several share a multiprocessor, and one computes its softmax while another
has the tensor cores. Forward, TFLOP/s of tiles of 64 and of 128 rows: 275 and 246
(ALiBi, 64 channels), 372 and 342 (128). Those of 256 channels and of float32 fit and
were not tuned.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Sizes(NamedTuple):
    """How a kernel is cut.

    Attributes:
        rows: Of a program's tile.
        columns: Of a tile, those of one visit.
        warps: That share a tile.
        stages: Visits whose operands are in shared memory at once.
    """

    rows: int
    columns: int
    warps: int
    stages: int


LEAST = 16  # rows, columns or channels of a product on the tensor cores
CHANNELS = 256
WARPS = 32  # of a thread block, 1,024 threads
# By kernel and channels, for numbers of 16 bits and of 32.
TABLE = {
    ("forward", 64, 2): Sizes(64, 64, 4, 3),
    ("forward", 128, 2): Sizes(64, 64, 4, 3),
    ("forward", 256, 2): Sizes(64, 32, 4, 3),
    ("backward_q", 64, 2): Sizes(64, 64, 4, 3),
    ("backward_q", 128, 2): Sizes(128, 64, 8, 3),
    ("backward_q", 256, 2): Sizes(64, 32, 4, 2),
    ("backward_kv", 64, 2): Sizes(64, 64, 4, 3),
    ("backward_kv", 128, 2): Sizes(64, 64, 4, 2),
    ("backward_kv", 256, 2): Sizes(64, 32, 8, 2),
    ("forward", 64, 4): Sizes(64, 32, 4, 2),
    ("forward", 128, 4): Sizes(32, 32, 4, 2),
    ("forward", 256, 4): Sizes(32, 16, 4, 1),
    ("backward_q", 64, 4): Sizes(32, 32, 4, 1),
    ("backward_q", 128, 4): Sizes(32, 16, 4, 1),
    ("backward_q", 256, 4): Sizes(16, 16, 4, 1),
    ("backward_kv", 64, 4): Sizes(32, 32, 4, 1),
    ("backward_kv", 128, 4): Sizes(32, 16, 4, 1),
    ("backward_kv", 256, 4): Sizes(16, 16, 4, 1),
}
# Where a mask's blocks have 64 rows, or 64 is the power of two in them. Those that
# sparse ones are cut into were measured: microseconds for 12 documents in 4,096 and in
# 16,384 tokens, with `TABLE` and so, on one H200: forward 86 and 79, 334 and 331 (64
# channels); 145 and 136, 565 and 575; for dq and dk, dv 557 and 418, 2,273 and 1,656
# (eight warps are many for 64 rows).
SMALL = {
    ("forward", 64, 2): Sizes(64, 64, 4, 2),
    ("forward", 128, 2): Sizes(64, 32, 4, 3),
    ("backward_q", 128, 2): Sizes(64, 64, 4, 2),
}
# KiB of shared memory of a thread block, by compute capability.
_MEMORY = {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227}
_OTHERS, _OF_AMD = 99, 64  # KiB
_EXCHANGED = 4  # bytes a score: weights and gradients of scores, where they turn


def padded(channels: int) -> int:
    """Channels of a tile, which are a power of two."""
    return max(LEAST, 1 << (channels - 1).bit_length())


def sizes_of(
    kernel: str,
    channels: tuple[int, int],
    dtype: Any,
    blocks: tuple[int, int] | None,
    asked: Mapping[str, int],
) -> Sizes:
    """How a kernel is cut.

    Args:
        kernel: "forward", "backward_q" or "backward_kv".
        channels: Of keys and values.
        dtype: Theirs.
        blocks: A mask's block, as the kernel's rows and columns; None without a mask.
        asked: Sizes that the user asks for.
    """
    wide, itemsize = max(map(padded, channels)), jnp.dtype(dtype).itemsize
    tiles = None if blocks is None else [n & -n for n in blocks]  # powers of two
    table = TABLE | SMALL if tiles is not None and tiles[0] == 64 else TABLE
    sizes = table[kernel, max(64, wide), itemsize]
    prefix = "" if kernel == "forward" else "bwd_"
    names = ("block_kv", "block_q") if kernel == "backward_kv" else (
        "block_q", "block_kv"
    )  # fmt: skip
    sizes = sizes._replace(
        rows=asked.get(prefix + names[0], sizes.rows),
        columns=asked.get(prefix + names[1], sizes.columns),
        stages=asked.get(prefix + "stages", sizes.stages),
        warps=asked.get(prefix + "warps", sizes.warps),
    )
    if tiles is not None:
        rows, columns = tiles
        sizes = sizes._replace(
            rows=min(sizes.rows, rows), columns=min(sizes.columns, columns)
        )
    exchanged = 0 if kernel == "forward" else _EXCHANGED
    return _fitting(sizes, sum(map(padded, channels)) * itemsize, exchanged)


def _fitting(sizes: Sizes, width: int, exchanged: int) -> Sizes:
    """With fewer stages, and then fewer columns, where shared memory is short.

    Args:
        sizes: What is wanted.
        width: Bytes of a row of the operands.
        exchanged: Bytes a score, of what warps hand to one another.
    """

    def needed(sizes: Sizes) -> int:
        rows = sizes.rows + sizes.stages * sizes.columns
        return rows * width + sizes.rows * sizes.columns * exchanged

    while needed(sizes) > memory() * 1024:
        if sizes.stages > 1:
            sizes = sizes._replace(stages=sizes.stages - 1)
        elif sizes.columns > LEAST:
            sizes = sizes._replace(columns=sizes.columns // 2)
        elif sizes.rows > LEAST:
            sizes = sizes._replace(rows=sizes.rows // 2)
        else:
            break
    return sizes


def memory() -> int:
    """KiB of shared memory that a thread block can have."""
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    return _MEMORY.get(capability, _OF_AMD if capability.startswith("gfx") else _OTHERS)
