"""Laws of mods as texts in Triton's language: they compute what the mods do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_stand_in as stand_in
from attention_cases import LIBRARY_MASKS, LIBRARY_MODS, B, H, gaussian
from mod_programs import INDEX, MODS, SCORE

from pliax.core.jaxprs import close
from pliax.kernels.attention.normalization import with_slope
from pliax.kernels.attention.separation import (
    MASK_MOD,
    SCORE_MOD,
    compute_outside,
    separate,
)
from pliax.kernels.attention.triton_source import loadable, write


T, S = 24, 40
SIZES = {"b": B, "h": H, "q": T, "k": S}
LIES = pytest.mark.parametrize("on_its_side", [False, True])


def text_of(mod, roles=SCORE_MOD, *, hardware_tanh=False, sizes=SIZES):
    separated = separate(mod, roles)
    return write(separated, sizes, hardware_tanh=hardware_tanh).function("mod")


def on_tile(mod, roles, score, b, h, on_its_side, sizes=SIZES):
    """What a kernel computes of a whole head, as (queries, keys)."""
    separated = separate(mod, roles)
    arrays = loadable(compute_outside(separated, mod.captured, sizes))
    q, k = (stand_in.block(np.arange(sizes[a], dtype=np.int32)) for a in "qk")
    q, k = (q[None, :], k[:, None]) if on_its_side else (q[:, None], k[None, :])
    if score is not None:
        score = stand_in.block(np.asarray(score).T if on_its_side else score)
    here = (stand_in.block(np.int32(x)) for x in (b, h))
    args = tuple(map(stand_in.Pointer, arrays))
    text = text_of(mod, roles, sizes=sizes)
    found = stand_in.run(text, score, *here, q, k, args)
    shape = sizes["q"], sizes["k"]
    results = found if isinstance(found, tuple) else (found,)
    return [
        np.broadcast_to(np.asarray(x), shape[::-1]).T
        if on_its_side
        else np.broadcast_to(np.asarray(x), shape)
        for x in results
    ]


def by_jax(f, *args):
    """The same, each score by itself."""
    *score, b, h = args
    q, k = np.arange(T, dtype=np.int32), np.arange(S, dtype=np.int32)
    over = (*[0] * len(score), None, None, None, 0)
    rows = jax.vmap(f, over)
    over = (*[0] * len(score), None, None, 0, None)
    return jax.vmap(rows, over)(*score, jnp.int32(b), jnp.int32(h), q, k)


@pytest.mark.parametrize("name", MODS)
def test_a_text_computes_what_jax_does(name):
    special = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -1.0, 1.0, 1e-9, -1e-9, 30.0, -30.0]
    special += [np.inf, -np.inf, np.nan, 1e30]
    score = np.random.default_rng(0).normal(size=(T, S)).astype(np.float32) * 4
    score[0, : len(special)] = special
    mod = close(MODS[name], SCORE, *[INDEX] * 4)
    (found,) = on_tile(mod, SCORE_MOD, score, 1, 2, False)
    wanted = by_jax(MODS[name], jnp.asarray(score), 1, 2)
    assert found.dtype == np.float32
    relative = 3e-5 if "power" in name else 2e-6
    absolute = 1e-6 if "slope" in name else 1e-7  # 1 - tanh^2 cancels
    np.testing.assert_allclose(found, wanted, rtol=relative, atol=absolute)


# More shifts than a word has bits, quotients by 0 and what two's complement has no
# opposite of: XLA says what they are, the hardware does not.
CORNERS = {
    "div": jax.lax.div, "rem": jax.lax.rem,
    "<<": jax.lax.shift_left, ">>": jax.lax.shift_right_arithmetic,
    "logical": jax.lax.shift_right_logical,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32])
@pytest.mark.parametrize("name", CORNERS)
def test_a_text_computes_corners_as_xla_does(name, dtype):
    words = jnp.asarray([0, 1, 2, 5, 31, 32, 33, 100, 2**31, 2**32 - 1], jnp.uint32)
    x, y = words.astype(dtype), words[::-1].astype(dtype)

    def as_score(s, b, h, q, k):
        word = CORNERS[name](x[q % 10], y[k % 10]).astype(jnp.uint32)
        high, low = word >> jnp.uint32(16), word & jnp.uint32(0xFFFF)
        return high.astype(jnp.float32) * 65536 + low.astype(jnp.float32) + s

    score = np.zeros((T, S), np.float32)
    closed = close(as_score, SCORE, *[INDEX] * 4)
    (found,) = on_tile(closed, SCORE_MOD, score, 0, 0, False)
    wanted = jax.jit(lambda s: by_jax(as_score, s, 0, 0))(score)
    np.testing.assert_array_equal(found, wanted)


@LIES
@pytest.mark.parametrize("case", LIBRARY_MODS, ids=str)
def test_a_text_of_a_score_mod_computes_it_and_its_slope(case, on_its_side):
    floats = (gaussian(n + 3, x) for n, x in enumerate(case.floats(T, S)))
    f = case.make(*floats, *case.others(T, S))
    mod, score = close(f, SCORE, *[INDEX] * 4), gaussian(0, (T, S))
    found, slope = on_tile(with_slope(mod), SCORE_MOD, score, 1, 2, on_its_side)
    np.testing.assert_allclose(found, by_jax(f, score, 1, 2), rtol=3e-6, atol=3e-6)
    wanted = by_jax(jax.grad(f), score, 1, 2)
    np.testing.assert_allclose(slope, wanted, rtol=3e-6, atol=3e-6)


@LIES
@pytest.mark.parametrize("case", LIBRARY_MASKS, ids=str)
def test_a_text_of_a_mask_mod_computes_it(case, on_its_side):
    if case.make is None:
        pytest.skip("hides nothing")
    f = case.make(*case.arrays(T, S))
    mod = close(f, *[INDEX] * 4)
    (found,) = on_tile(mod, MASK_MOD, None, 1, 2, on_its_side)
    assert found.dtype == np.bool_
    np.testing.assert_array_equal(found, by_jax(f, 1, 2))


def test_places_beyond_the_end_of_an_array_are_the_nearest():
    table = gaussian(0, (7, 5))

    def f(s, b, h, q, k):
        return s + table[q - k, k - 12]

    (found,) = on_tile(
        close(f, SCORE, *[INDEX] * 4),
        SCORE_MOD,
        np.zeros((T, S), np.float32),
        0,
        0,
        False,
    )
    np.testing.assert_array_equal(found, by_jax(f, jnp.zeros((T, S)), 0, 0))


def test_a_table_of_truths_is_one_of_bytes():
    table = gaussian(0, (B, T, S)) > 0
    mod = close(lambda b, h, q, k: table[b, q, k] | (q == k), *[INDEX] * 4)
    (found,) = on_tile(mod, MASK_MOD, None, 1, 0, False)
    np.testing.assert_array_equal(
        found, np.asarray(table[1]) | np.eye(T, S, dtype=bool)
    )


def test_equal_programs_have_equal_texts_and_others_others():
    def scaled(by):
        return close(lambda s, b, h, q, k: s * by, SCORE, *[INDEX] * 4)

    def looked_up(table):
        return close(lambda s, b, h, q, k: s + table[q - k + S], SCORE, *[INDEX] * 4)

    assert text_of(scaled(2.0)) == text_of(scaled(2.0)) != text_of(scaled(3.0))
    one, other = gaussian(0, (T + S,)), gaussian(1, (T + S,))
    assert text_of(looked_up(one)) == text_of(looked_up(other))


def test_the_instruction_for_tanh_is_taken_where_it_is_exact_enough():
    mod = close(lambda s, b, h, q, k: 30 * jnp.tanh(s / 30), SCORE, *[INDEX] * 4)
    assert "libdevice.tanh" in text_of(mod)
    assert "fast_tanh" in text_of(mod, hardware_tanh=True)
