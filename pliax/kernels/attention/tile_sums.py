"""What a kernel leaves of each tile of scores, put together.

    by_difference : sums along diagonals of tiles  ->  along those of all scores
    by_pair       : tiles                          ->  all scores

Nothing was written where no tile is visited: what is found there is left out.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from .block_mask import BlockMask
from .configs import UNIT
from .linearization import DIFFERENCE, Leaf


def by_difference(
    sizes: Mapping[str, int],
    found: Float[Array, "B H R C P E"],
    is_visited: Bool[Array, "#B #H R C"] | None,
) -> Float[Array, "B H N"]:
    """The sums along diagonals of tiles, put together: from key S - 1 to query T - 1.

    Args:
        sizes: Of queries, "q", and keys, "k".
        found: The e-th of the tile in row r and column c is that of the difference
            64 r - N (c + 1) + e + 1, of tiles of 64 rows and N columns; P are added.
        is_visited: Which tiles are; None for all.
    """
    T, S, N = sizes["q"], sizes["k"], found.shape[5] - UNIT
    if is_visited is not None:
        found = jnp.where(is_visited[..., None, None], found, 0)
    found = jnp.flip(jnp.sum(found, axis=4), axis=3)
    B, H, R, C, _ = found.shape
    first, rest = found[..., :N], found[..., N:]
    rest = jnp.pad(rest, [(0, 0)] * 4 + [(0, N - UNIT)])
    before, behind = [(0, 0)] * 3 + [(N, 0)], [(0, 0)] * 3 + [(0, N)]
    lines = jnp.pad(first.reshape(B, H, R, -1), behind)
    lines += jnp.pad(rest.reshape(B, H, R, -1), before)
    # A row begins 64 behind the one before: so it does in rows that are 64 shorter.
    length = N * (C + 1) + UNIT * (R - 1)
    lines = jnp.pad(lines, [(0, 0)] * 3 + [(0, length + UNIT - lines.shape[3])])
    lines = lines.reshape(B, H, -1)[..., : R * length].reshape(B, H, R, length)
    start = N * C - S
    return jnp.sum(lines, axis=2)[..., start : start + T + S - 1]


def by_pair(
    sizes: Mapping[str, int],
    found: Float[Array, "B H R M C N"],
    is_visited: Bool[Array, "#B #H R C"] | None,
) -> Float[Array, "B H T S"]:
    """R rows of C tiles of M rows and N columns, put together; 0 where none is visited.

    The arguments are those of `by_difference`.
    """
    B, H, R, M, C, N = found.shape
    if is_visited is not None:
        found = jnp.where(is_visited[:, :, :, None, :, None], found, 0)
    return found.reshape(B, H, R * M, C * N)[:, :, : sizes["q"], : sizes["k"]]


def visited(mask: BlockMask, tiles: tuple[int, int], columns: int) -> Array:
    """Which tiles are visited, of so many rows and columns of tiles."""
    found = mask.to_dense() != 0
    for axis, (n, size) in enumerate(zip(tiles, (UNIT, columns), strict=True), 2):
        found = jnp.repeat(found, mask.block_size[axis - 2] // size, axis=axis)
        missing = max(0, n - found.shape[axis])
        widths = [(0, missing if a == axis else 0) for a in range(found.ndim)]
        found = lax.slice_in_dim(jnp.pad(found, widths), 0, n, axis=axis)
    return found


def over_axes(leaf: Leaf, sums: Float[Array, "B H *N"]) -> Array:
    """Over the sequences, heads and queries that share a leaf."""
    is_of_head = not {"q", "k", DIFFERENCE} & set(leaf.axes)
    are_shared = "b" not in leaf.axes, "h" not in leaf.axes, is_of_head
    return jnp.sum(sums, [n for n, is_shared in enumerate(are_shared) if is_shared])
