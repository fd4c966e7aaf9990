"""Laws of a mod in two parts: together, on any tile, they are the mod."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import MASKS, MODS, B, H, gaussian
from hypothesis import given, strategies as st
from mod_programs import as_float

from pliax.core.jaxprs import close
from pliax.kernels.attention.head_packing import pack_mod
from pliax.kernels.attention.separation import (
    MASK_MOD,
    SCORE_MOD,
    Inseparable,
    compute_outside,
    separate,
)
from pliax.kernels.attention.tile_evaluation import (
    Space,
    compute_inside,
    guess_holds,
)


T, S = 37, 45
M, N = 8, 16
TILES = [(0, 0, "q"), (24, 16, "q"), (8, 24, "k")]
SIZES = {"b": B, "h": H, "q": T, "k": S}


def closed(mod, roles):
    score, index = (
        jax.ShapeDtypeStruct((), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    return close(mod, *(score if r == "s" else index for r in roles))


def on_a_tile(separated, arrays, place, scores, *, guesses=False):
    """The part inside, with arrays of NumPy's shapes in place of a kernel's."""
    b, h, q0, k0, rows = place
    shapes = {"q": (M, 1), "k": (1, N)}
    if rows == "k":
        shapes = {"q": (1, M), "k": (N, 1)}
    tile = (M, N) if rows == "q" else (N, M)
    other = "k" if rows == "q" else "q"
    sizes = {"scalar": (), "row": shapes[rows], "column": shapes[other], "tile": tile}
    given = {
        "s": scores if rows == "q" else scores.T,
        "b": jnp.int32(b),
        "h": jnp.int32(h),
    }
    for role, first, n in (("q", q0, M), ("k", k0, N)):
        given[role] = jnp.arange(first, first + n, dtype=jnp.int32).reshape(
            shapes[role]
        )

    def of_tile(number):
        item, x = separated.hoisted[number], arrays[number]
        for axis in item.axes:
            if axis in "bh":
                x = x[{"b": b, "h": h}[axis]]
            elif axis == "q":
                x = x[q0 : q0 + M].reshape(shapes["q"])
            elif item.keys > 1:
                x = x[k0 // item.keys]
            else:
                x = x[k0 : k0 + N].reshape(shapes["k"])
        is_scalar = not set(item.axes) & {"q", "k"} or item.keys > 1
        return x.reshape(()) if is_scalar and x.size == 1 else x

    def look_up(number, indices):
        x = arrays[number]
        for axis in separated.hoisted[number].axes:
            x = x[{"b": b, "h": h}[axis]]
        return x[tuple(indices)]

    space = Space(
        rows, {k: n - 1 for k, n in SIZES.items()}, given.__getitem__, of_tile, look_up,
        lambda x, _, to: jnp.broadcast_to(x, sizes[to]), guesses,
    )  # fmt: skip
    holds = guess_holds(separated, space) if guesses else None
    (found,) = compute_inside(separated, space)
    found = found if rows == "q" else found.T
    return (found, holds) if guesses else found


def assert_parts_are_the_mod(mod, roles, close_to, *, keys=0, tiles=TILES):
    function = closed(mod, roles)
    separated = separate(function, roles, keys=keys)
    arrays = compute_outside(separated, function.captured, SIZES)
    scores = gaussian(0, (M, N)) * 3
    for q0, k0, rows in tiles:
        for b, h in ((0, 0), (B - 1, H - 1)):
            found = on_a_tile(separated, arrays, (b, h, q0, k0, rows), scores)
            wanted = whole(function, roles, (b, h, q0, k0), scores)
            close_to(np.asarray(found), np.asarray(wanted))


def whole(function, roles, place, scores):
    """The mod itself, of each score of a tile."""
    b, h, q0, k0 = place
    given = {
        "s": scores, "b": jnp.full((M, N), b), "h": jnp.full((M, N), h),
        "q": jnp.broadcast_to(jnp.arange(q0, q0 + M)[:, None], (M, N)),
        "k": jnp.broadcast_to(jnp.arange(k0, k0 + N), (M, N)),
    }  # fmt: skip
    return jax.vmap(jax.vmap(function))(*(given[r] for r in roles))


def nearly(found, wanted):
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)


def far_by(offsets):
    """Of packed heads: the distance from queries that begin somewhere."""

    def distance(s, b, h, q, k):
        return s - 0.5 * jnp.abs(q + offsets[b] - k).astype(jnp.float32)

    mod = pack_mod(closed(distance, SCORE_MOD), 4)
    assert mod is not None
    return mod


# Around what float32 holds, and where a sum wraps around.
PLACES = [0, 2**22, 2**22 + 1, 2**24, 2**24 + 1, 2**30, 2**31 - 1]
OFFSETS = st.sampled_from(PLACES) | st.integers(0, 2**31 - 1)


@given(offsets=st.lists(OFFSETS, min_size=B, max_size=B), sign=st.sampled_from([1, -1]))
def test_distances_are_those_of_integers_wherever_queries_begin(offsets, sign):
    """Where a kernel may guess that it is not far, it says whether that is so."""
    mod = far_by(jnp.asarray(sign * np.asarray(offsets, np.int32)))
    assert_parts_are_the_mod(mod, SCORE_MOD, np.testing.assert_array_equal)
    separated, scores = separate(mod, SCORE_MOD), gaussian(0, (M, N)) * 3
    arrays = compute_outside(separated, mod.captured, SIZES)
    for b, offset in enumerate(offsets):
        place = b, 0, 8, 16
        given = separated, arrays, (*place, "q"), scores
        found, holds = on_a_tile(*given, guesses=True)
        assert bool(holds) == (offset <= 2**22)
        if holds:
            wanted = whole(mod, SCORE_MOD, place, scores)
            np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


def test_no_distance_is_converted_where_queries_are_guessed_to_begin_near():
    separated = separate(far_by(jnp.zeros(B, jnp.int32)), SCORE_MOD)

    def run(offsets, scores, guesses):
        arrays = compute_outside(separated, (offsets,), SIZES)
        return on_a_tile(separated, arrays, (0, 0, 8, 16, "q"), scores, guesses=guesses)

    def converts(guesses):
        given = jnp.zeros(B, jnp.int32), jnp.zeros((M, N))
        jaxpr = jax.make_jaxpr(partial(run, guesses=guesses))(*given)
        return f"f32[{M},{N}] = convert_element_type" in str(jaxpr)

    assert converts(False)
    assert not converts(True)


def test_what_is_computed_of_a_score_by_special_functions_is_costly():
    def is_costly(mod):
        return separate(closed(mod, SCORE_MOD), SCORE_MOD).is_costly

    assert is_costly(lambda s, b, h, q, k: 9.0 * jnp.tanh(s / 9.0))
    assert is_costly(lambda s, b, h, q, k: jnp.sqrt(jnp.abs(s)))
    assert not is_costly(lambda s, b, h, q, k: jnp.where(q > k, s * 2.0, -s))
    assert not is_costly(lambda s, b, h, q, k: s - jnp.exp(-h.astype(s.dtype)))


@given(
    n=st.integers(1, 4 * N) | st.sampled_from([N, 2 * N, 3 * N]), seed=st.integers(0, 9)
)
def test_what_the_keys_of_a_tile_share_is_loaded_once(n, seed):
    rng, blocks = np.random.default_rng(seed), -(-S // n) + 1
    pages = jnp.asarray(rng.integers(-1, 9, (B, blocks)), jnp.int32)
    bias = jnp.asarray(rng.standard_normal((H, blocks)), jnp.float32)

    def mod(s, b, h, q, k):
        block = jax.lax.div(k, n)
        page = pages[b, block]
        near = jnp.where(page >= 0, k + (page - block) * n, 0)
        return jnp.where(
            page > 0, s + bias[h, block] * (near - q).astype(s.dtype), -1.0
        )

    function = closed(mod, SCORE_MOD)
    tiles = [(0, 0, "q"), (24, 16, "q"), (8, 16, "k")]
    assert_parts_are_the_mod(mod, SCORE_MOD, nearly, keys=N, tiles=tiles)
    separated = separate(function, SCORE_MOD, keys=N)
    arrays = compute_outside(separated, function.captured, SIZES)
    expected = n if n % N == 0 else 1
    of_keys = [x for x in separated.hoisted if "k" in x.axes]
    assert of_keys
    assert {x.keys for x in of_keys} == {expected}
    sizes = {
        x.shape[item.axes.index("k")]
        for item, x in zip(separated.hoisted, arrays, strict=True)
        if "k" in item.axes
    }
    assert sizes == {-(-S // expected)}


def repeated(first, step):
    """A mod of as many operations one after another as Python allows calls."""

    def mod(s, b, h, q, k):
        x = first(s, q, k)
        for n in range(1000):
            x = step(x, n % 7)
        return s + as_float(x)

    return mod


def summed(first):
    """Of two chains that never meet but in their sums, at odd distances."""

    def mod(s, b, h, q, k):
        x = total = first(s, q, k)
        for n in range(500):
            x = jnp.abs(n % 7 - x)
            total = jnp.maximum(total, x)
        return s + as_float(total)

    return mod


NUMBERS = jnp.arange(T + M) % 7
LONG = {
    "floats": repeated(lambda s, q, k: s, lambda x, n: jnp.sin(x) + n),
    "sums": repeated(lambda s, q, k: q - k, lambda x, n: jnp.maximum(x, n - x)),
    "integers": repeated(lambda s, q, k: q * k, lambda x, n: (x * 3 + n) & 63),
    "conditions": repeated(lambda s, q, k: q > k, lambda x, n: x ^ (n > 4)),
    "of queries": repeated(lambda s, q, k: q, lambda x, n: jnp.abs(n - x)),
    "looked up": repeated(lambda s, q, k: NUMBERS[q], lambda x, n: NUMBERS[x + n]),
    "a sum of floats": summed(lambda s, q, k: s),
    "a sum of integers": summed(lambda s, q, k: q - k),
}


@pytest.mark.parametrize("mod", LONG.values(), ids=LONG.keys())
def test_a_mod_may_have_any_number_of_operations(mod):
    assert_parts_are_the_mod(mod, SCORE_MOD, nearly, tiles=TILES[:1])


# A kernel has arithmetic of float32, int32 and bool scalars: no loops, no branches, no
# vectors and no other integers for each score.
LOOPS = {"switch", "fori_loop", "scan", "loop"}
VECTORS = {"embedded", "logsumexp_rows", "reduced_rows"}
BYTES = {"casts", "uint8_table", "bits", "table_of_rank_4"}
REFUSED = LOOPS | VECTORS | BYTES


def hold(case, mod, roles, close_to):
    if case.name in REFUSED:
        with pytest.raises(Inseparable, match="for each score"):
            separate(closed(mod, roles), roles)
    else:
        assert_parts_are_the_mod(mod, roles, close_to)


@pytest.mark.slow
@pytest.mark.parametrize("case", [x for x in MODS if x.name != "none"], ids=str)
def test_the_parts_of_a_score_mod_are_the_mod(case):
    shapes = enumerate(case.floats(T, S))
    floats = (gaussian(n + 3, x, case.dtype or jnp.float32) for n, x in shapes)
    hold(case, case.make(*floats, *case.others(T, S)), SCORE_MOD, nearly)


@pytest.mark.parametrize(
    "case", [x for x in MASKS if x.make and not x.lengths], ids=str
)
def test_the_parts_of_a_mask_are_the_mask(case):
    mask = case.make(*case.arrays(T, S))
    hold(case, mask, MASK_MOD, np.testing.assert_array_equal)
