"""Laws of the order in which the fused kernels visit blocks."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies as st

from pliax.kernels.attention.block_lists import COLUMN_BITS, TellingLists
from pliax.kernels.attention.configs import Config
from pliax.kernels.attention.mosaic_gpu_visits import Blocks


WHICH = {"full"}, {"full", "partial"}  # what a list that tells counts
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


@given(
    kinds=KINDS,
    per=st.sampled_from([1, 2, 3]),
    tell=st.booleans(),
    descends=st.booleans(),
)
def test_every_listed_tile_comes_once_and_full_ones_first(kinds, per, tell, descends):
    lists, met = as_lists(kinds), dict.fromkeys(range(len(kinds)))
    if tell:
        met = {n: 127 if x == "full" else n + 1 for n, x in enumerate(kinds)}
        order = sorted(met, key=lambda n: ["full", "partial", "empty"].index(kinds[n]))
        full, total = (jnp.full((1, 1, 1), sum(x in y for x in kinds)) for y in WHICH)
        entries = jnp.array([n | met[n] << COLUMN_BITS for n in order])
        lists = TellingLists(full, total, entries[None, None, None])
    sizes, config = (64, 64 * per), Config(columns=64)
    blocks = Blocks(sizes, 64 * per * len(kinds), config, tell, descends)
    visits = blocks.visits(lists, 0, 0, jnp.int32(0))
    wanted = [
        (64 * (n * per + i), met[n])
        for kind in ("full", "partial")
        for n, x in enumerate(kinds)
        for i in range(per)
        if x == kind
    ]
    if descends:
        full = per * kinds.count("full")
        wanted = [*wanted[:full][::-1], *wanted[full:]]
    found = [visits.place(jnp.asarray(i)) for i in range(int(visits.total))]
    assert [(int(x), y if y is None else int(y)) for x, y in found] == wanted
    assert int(visits.full) == per * kinds.count("full")
    assert int(visits.ahead(visits.total - 1, 2)) == wanted[-1][0] if wanted else True


@given(length=st.integers(1, 400))
def test_without_lists_a_tile_is_full_if_it_ends_before_the_end(length):
    backwards = Blocks(None, length, Config(columns=64)).backwards(None, 0, 0, 0)
    ends = [(n, min(64 * n + 64, length)) for n in range(-(-length // 64))]
    full = [(n, end == 64 * n + 64 if length % 64 else None) for n, end in ends]
    assert visited(backwards) == full[::-1]
    assert np.all(np.diff([n for n, _ in visited(backwards)]) == -1)
