"""Laws of the order in which the fused kernels visit blocks."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies as st

from pliax.kernels.attention.configs import Config
from pliax.kernels.attention.mosaic_gpu_visits import Blocks


KINDS = st.lists(st.sampled_from(["empty", "partial", "full"]), min_size=1, max_size=9)


def as_lists(kinds):
    """The lists of one row of blocks: partial and full ones, ascending."""
    found = []
    for kind in ("partial", "full"):
        indices = [n for n, x in enumerate(kinds) if x == kind]
        padded = indices + [0] * (len(kinds) - len(indices))
        found += [
            jnp.full((1, 1, 1), len(indices)),
            jnp.array(padded)[None, None, None],
        ]
    return found


def visited(backwards):
    left, found = backwards.start(), []
    for i in range(int(backwards.total)):
        tile, is_full, left = backwards.next(jnp.asarray(i), left)
        found.append((int(tile), None if is_full is None else bool(is_full)))
    return found


@given(kinds=KINDS, per=st.sampled_from([1, 2, 3]))
def test_backwards_every_listed_tile_comes_once_and_the_last_first(kinds, per):
    blocks = Blocks((64, 64 * per), 64 * per * len(kinds), Config(columns=64))
    found = visited(blocks.backwards(as_lists(kinds), 0, 0, jnp.int32(0)))
    tiles = [(n * per + i, x) for n, x in enumerate(kinds) for i in range(per)]
    wanted = [(n, x == "full") for n, x in tiles if x != "empty"]
    assert found == wanted[::-1]


@given(length=st.integers(1, 400))
def test_without_lists_a_tile_is_full_if_it_ends_before_the_end(length):
    backwards = Blocks(None, length, Config(columns=64)).backwards(None, 0, 0, 0)
    ends = [(n, min(64 * n + 64, length)) for n in range(-(-length // 64))]
    full = [(n, end == 64 * n + 64 if length % 64 else None) for n, end in ends]
    assert visited(backwards) == full[::-1]
    assert np.all(np.diff([n for n, _ in visited(backwards)]) == -1)
