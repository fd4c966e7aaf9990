"""Laws of the order of thread blocks: numbers alone, no kernel runs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies as st

from pliax.kernels.attention.mosaic_gpu_grid import Grid


FEW = st.integers(1, 7)
GRIDS = st.builds(Grid, FEW, FEW, FEW, st.booleans())


def places(grid):
    """(sequence, head, tile) of each thread block, in the order in which they start."""
    place = lambda _: jnp.stack(grid.place())  # noqa: E731
    for name, size in reversed(grid.sizes.items()):
        place = jax.vmap(place, in_axes=None, axis_name=name, axis_size=size)
    found = np.asarray(jax.jit(place)(0))
    return found.reshape(math.prod(grid.sizes.values()), 3)


@given(GRIDS)
def test_every_tile_belongs_to_one_thread_block(grid):
    found = {tuple(place) for place in places(grid).tolist()}
    every = np.ndindex(grid.batch, grid.heads, grid.tiles)
    assert found == set(every)


@given(GRIDS)
def test_thread_blocks_start_by_head_or_by_tile_and_sequences_change_fastest(grid):
    b, h, tile = places(grid).T
    slow = (tile, h, b) if grid.gathers_heads else (h, tile, b)
    assert np.array_equal(np.lexsort(slow[::-1]), np.arange(len(b)))
