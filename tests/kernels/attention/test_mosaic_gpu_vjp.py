"""Laws of the order in which rows of keys add to the gradient of queries."""

from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_plain import attention as plain_attention
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

import pliax as px
from pliax.kernels.attention import mosaic_gpu_limits, mosaic_gpu_vjp
from pliax.kernels.attention.mosaic_gpu_backward_step import Squares, Step
from pliax.kernels.attention.mosaic_gpu_gradients import (
    Gradient,
    Weights,
    some_are_far,
)
from pliax.kernels.attention.mosaic_gpu_tiles import zeros
from pliax.kernels.attention.mosaic_gpu_vjp import _turns, heads_together
from pliax.kernels.attention.refinement import refined


@given(
    seen=hnp.arrays(bool, st.tuples(st.just(2), st.integers(1, 4), st.integers(1, 4))),
    ragged=st.tuples(st.integers(0, 63), st.integers(0, 63)),
)
def test_turns_count_the_blocks_of_keys_that_were_seen_before(seen, ragged):
    _, R, C = seen.shape
    lengths = 64 * R - ragged[0], 64 * C - ragged[1]
    table = jnp.asarray(seen)
    mask = px.create_block_mask(
        lambda b, h, q, k: table[h, q // 64, k // 64], None, 2, *lengths, block_size=64
    )
    turns, is_seen = jax.jit(_turns)(mask)
    np.testing.assert_array_equal(turns[0], np.cumsum(seen, axis=-1) - seen)
    rows = np.repeat(seen.any(-1), 64, axis=-1).T
    np.testing.assert_array_equal(is_seen[0, :, :, 0], rows)


@given(
    heads=st.integers(1, 96),
    T=st.integers(1, 2**17),
    D=st.sampled_from([64, 128]),
    is_masked=st.booleans(),
)
def test_heads_that_start_together_divide_all_and_are_as_many_as_the_cache_holds(
    heads, T, D, is_masked
):
    visit = [jax.ShapeDtypeStruct((1, T, heads, D), jnp.bfloat16)] * 2
    found = heads_together(heads, visit, is_masked=is_masked)
    most = 32 if is_masked and D == 64 else 16
    assert heads % found == 0 and found <= most
    if D == 128:  # two bytes of a query and its cotangent, and four of dq
        assert found <= 2 or found * T * D * 8 <= 24 * 2**20
    assert D == 128 or heads % most or found == most


def documents(T, length=128):
    return px.create_block_mask(
        lambda b, h, q, k: (q // length == k // length) & (q >= k), None, None, T, T
    )


def uneven_documents(T):
    """One ends inside of a block."""
    return px.create_block_mask(in_uneven_documents(T), None, None, T, T)


def in_uneven_documents(T):
    ids = jnp.searchsorted(jnp.asarray([128, 256, 356]), jnp.arange(T), side="right")
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


def causal(T):
    return px.create_block_mask(lambda b, h, q, k: q >= k, None, None, T, T)


def gradients(arrays, mask, implementation, with_lse=True, **options):
    """Of a function of the output and of the log-sum-exp."""

    def loss(q, k, v):
        out, aux = px.flex_attention(
            q, k, v, block_mask=mask, implementation=implementation, enable_gqa=True,
            kernel_options=options or None, return_aux=px.AuxRequest(lse=True),
        )  # fmt: skip
        found = jnp.sum(out.astype(jnp.float32) ** 2)
        return found + jnp.sum(jnp.sin(aux.lse)) if with_lse else found

    return jax.grad(loss, (0, 1, 2))(*arrays)


@pytest.mark.parametrize("scale", [1.2e-38, -0.5, 2.0])
def test_gradients_are_exact_of_scales_with_and_without_a_reciprocal(scale):
    def loss(arrays, implementation):
        options = {"interpret": 1} if implementation == "mosaic_gpu" else None
        out = px.flex_attention(
            *arrays, scale=scale, implementation=implementation, kernel_options=options
        )
        return jnp.sum(out.astype(jnp.float32) ** 2)

    arrays = gaussians(128, 64, jnp.bfloat16)
    found = jax.grad(loss)(arrays, "mosaic_gpu")
    golden = jax.grad(loss)([x.astype(jnp.float32) for x in arrays], "reference")
    for x, y in zip(found, golden, strict=True):
        error = jnp.abs(x.astype(jnp.float32) - y).max()
        least = 1e-36  # of what is as small as the scale few bits are left
        assert error <= 2**-6 * jnp.abs(y).max() + least


SHIFTS = {
    "a number": lambda c: lambda s, b, h, q, k: s + c,
    "before the score": lambda c: lambda s, b, h, q, k: c + s,
    "taken away": lambda c: (
        lambda s, b, h, q, k: s - (0.1 * jnp.abs(q - k).astype(s.dtype) - c)
    ),
    "of one query": lambda c: lambda s, b, h, q, k: s + jnp.where(q == 3, c, 0.0),
    "of a key": lambda c: lambda s, b, h, q, k: s + (c - 0.1 * k.astype(s.dtype)),
}


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, -0.5])
@pytest.mark.parametrize("far", [-900.0, 1e9, -1e9])
@pytest.mark.parametrize("name", SHIFTS)
def test_mods_that_add_have_the_gradients_of_the_formula_however_far_they_move_scores(
    name, far, scale
):
    """The formula rounds a score of -1e9 to a multiple of 64."""
    arrays, mask = gaussians(128, 64, jnp.bfloat16, heads=2), causal(128)

    def loss(arrays, implementation):
        options = {"interpret": 1} if implementation == "mosaic_gpu" else None
        out = px.flex_attention(
            *arrays, score_mod=SHIFTS[name](far), block_mask=mask, enable_gqa=True,
            scale=scale, implementation=implementation, kernel_options=options,
        )  # fmt: skip
        return jnp.sum(jnp.sin(3 * out.astype(jnp.float32)))

    found = jax.grad(loss)(arrays, "mosaic_gpu")
    golden = jax.grad(loss)([x.astype(jnp.float32) for x in arrays], "reference")
    for x, y in zip(found, golden, strict=True):
        error = jnp.abs(x.astype(jnp.float32) - y).max()
        assert error <= 2**-6 * jnp.abs(y).max()


@pytest.mark.parametrize(("mod", "is_ahead"), [
    *((SHIFTS[name](1.0), True) for name in SHIFTS),
    (lambda s, b, h, q, k: 2 * s + 1, False),
    (lambda s, b, h, q, k: 1 - s, False),
    (lambda s, b, h, q, k: s + 0.1 * s, False),
    (lambda s, b, h, q, k: s + jnp.sign(s), False),  # whose slope is 1, too
    (lambda s, b, h, q, k: (s + 1e9) - 1e9, False),  # which rounds twice
    (lambda s, b, h, q, k: jnp.arange(256.0)[q - k + 128] + s, False),  # looked up
    (lambda s, b, h, q, k: jnp.where(q > k, s + 1, s), False),
])  # fmt: skip
@pytest.mark.parametrize(("D", "scale"), [(64, None), (64, -0.5), (128, None)])
def test_what_is_added_is_known_ahead_if_it_is_one_number_whatever_the_score(
    mod, is_ahead, D, scale, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        Weights, "powers", lambda self, *_: asked.append(1) or zeros(*self.tile.shape)
    )
    attend = partial(
        px.flex_attention, score_mod=mod, block_mask=causal(128), scale=scale,
        implementation="mosaic_gpu", kernel_options={"interpret": 1},
    )  # fmt: skip
    arrays = gaussians(128, D, jnp.bfloat16)
    jax.make_jaxpr(lambda q, k, v, d: jax.vjp(attend, q, k, v)[1](d))(
        *arrays, arrays[0]
    )
    assert bool(asked) == (is_ahead and D == 64)


def alibi(s, b, h, q, k):
    return s + jnp.exp2(-1.0 - h.astype(s.dtype)) * (k - q).astype(s.dtype)


def table(s, b, h, q, k):
    return s + jnp.linspace(-1, 1, 1024)[q - k + 512].astype(s.dtype)


def soft_cap(s, b, h, q, k):
    return 2 * jnp.tanh(s / 2)


def sees_nothing_in_places(T):
    """Neither queries 128 to 255 see a key, nor is one of the last 128 keys seen."""
    return px.create_block_mask(
        lambda b, h, q, k: (q // 128 != 1) & (k < T - 128) & (q >= k // 2),
        None, None, T, T,
    )  # fmt: skip


def fine_causal(T):
    return px.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, T, T, block_size=64
    )


LATER, AT_ONCE, ITSELF = {True, "later"}, {True}, set()


@pytest.mark.parametrize(("mod", "mask", "D", "when"), [
    (None, None, 64, LATER), (None, None, 128, LATER), (None, None, 256, ITSELF),
    (None, causal, 64, AT_ONCE), (None, causal, 128, AT_ONCE),
    (alibi, None, 64, LATER), (alibi, causal, 64, LATER), (alibi, causal, 128, LATER),
    (alibi, fine_causal, 64, ITSELF),  # no warpgroup to hand over to
    (table, causal, 64, LATER), (soft_cap, causal, 64, AT_ONCE),
    (soft_cap, None, 128, AT_ONCE),
    (alibi, sees_nothing_in_places, 64, AT_ONCE),  # what nobody sees needs care
])  # fmt: skip
def test_a_visit_hands_over_for_the_one_before_where_registers_have_room(
    mod, mask, D, when, monkeypatch
):
    """It asks whether there is one; the last visit hands over for itself."""
    asked, ways = set(), []

    def hand_over(self, *_, is_there=True):
        asked.add(True if is_there is True else "later")

    monkeypatch.setattr(Squares, "hand_over", hand_over)
    for name in ("beside", "from_statistics"):
        way = partial(
            lambda of, name, *x: ways.append(name) or of(*x), getattr(Step, name), name
        )
        monkeypatch.setattr(Step, name, partialmethod(way))
    attend = partial(
        px.flex_attention, score_mod=mod, block_mask=mask and mask(384),
        implementation="mosaic_gpu", kernel_options={"interpret": 1},
    )  # fmt: skip
    arrays = gaussians(384, D, jnp.bfloat16)
    jax.make_jaxpr(lambda q, k, v, d: jax.vjp(attend, q, k, v)[1](d))(
        *arrays, arrays[0]
    )
    assert asked == when
    is_linear = mod is None and D < 256  # those have a kernel for each side
    way = "beside" if when is LATER else "from_statistics"
    assert set(ways) == ({way} if is_linear else set())


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_the_visit_before_is_one_of_the_thread_block_and_none_before_the_first(
    count, monkeypatch
):
    found = []
    monkeypatch.setattr(
        Squares, "hand_over", lambda self, n, is_there: found.append((n, is_there))
    )
    block = SimpleNamespace(gradient=SimpleNamespace(is_pipelined=True))
    step: Any = SimpleNamespace(block=block, squares=Squares(block, 0))
    Step.meanwhile(step, None, jnp.int32(count), ())
    ((before, is_there),) = found
    assert (before, is_there) == (max(count - 1, 0), count > 0)


@pytest.mark.slow
@pytest.mark.parametrize(("mod", "mask", "T", "D", "heads"), [
    (None, None, 300, 64, 2), (None, None, 300, 128, 2), (None, None, 64, 64, 1),
    (alibi, causal, 300, 64, 2), (alibi, causal, 256, 128, 1), (alibi, None, 320, 64, 2),
    (table, causal, 300, 64, 2),
    (lambda s, b, h, q, k: s - 1e9, causal, 256, 64, 2),
])  # fmt: skip
def test_gradients_are_the_same_bits_whichever_visit_hands_them_over(
    mod, mask, T, D, heads, monkeypatch
):
    """Also where queries of several heads visit the keys that they share."""

    @jax.jit
    def found(arrays, mask):
        def loss(q, k, v):
            out = px.flex_attention(
                q, k, v, score_mod=mod, block_mask=mask, enable_gqa=True,
                implementation="mosaic_gpu", kernel_options={"interpret": 1},
            )  # fmt: skip
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(loss, (0, 1, 2))(*arrays)

    arrays, mask = gaussians(T, D, jnp.bfloat16, heads), mask and mask(T)
    pipelined = found(arrays, mask)
    monkeypatch.setattr(Gradient, "is_pipelined", False)
    jax.clear_caches()
    for x, y in zip(pipelined, found(arrays, mask), strict=True):
        np.testing.assert_array_equal(x.astype(jnp.float32), y.astype(jnp.float32))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("mod", "mask", "D"), [
    (None, None, 64), (None, None, 128), (alibi, None, 64), (alibi, causal, 128),
    (table, causal, 64), (None, causal, 64),
])  # fmt: skip
def test_backward_kernels_lower_for_a_gpu(heads, mod, mask, D, monkeypatch):
    monkeypatch.setattr(mosaic_gpu_limits, "refused_device", lambda: None)
    attend = partial(
        px.flex_attention, score_mod=mod, block_mask=mask and mask(300),
        implementation="mosaic_gpu", enable_gqa=True,
    )  # fmt: skip
    q, k, v = gaussians(300, D, jnp.bfloat16, heads)
    run = jax.jit(lambda q, k, v, d: jax.vjp(attend, q, k, v)[1](d))
    lowered = run.trace(q, k, v, q).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize(("maximum", "is_far"), [
    (0.0, False), (1000.0, False), (-1000.0, False), (1100.0, True), (-1100.0, True),
    (-1e9, True), (np.inf, False), (np.nan, False),  # inf: sees nothing, or beyond the end
])  # fmt: skip
def test_one_maximum_far_from_zero_is_enough(maximum, is_far):
    maxima = jnp.zeros((2, 3, 128)).at[1, 2, 77].set(maximum)
    assert some_are_far((maxima,)).tolist() == [int(is_far)]


@pytest.mark.parametrize("mask", [None, causal(256)], ids=["no mask", "causal"])
def test_more_heads_start_together_under_a_mask(mask, monkeypatch):
    heard = []

    def together(heads, visit, *, is_masked):
        heard.append(is_masked)
        return heads_together(heads, visit, is_masked=is_masked)

    monkeypatch.setattr(mosaic_gpu_vjp, "heads_together", together)
    arrays = gaussians(256, 64, jnp.bfloat16)
    jax.make_jaxpr(lambda *x: gradients(x, mask, "mosaic_gpu", interpret=1))(*arrays)
    assert heard == [mask is not None]


def gaussians(T, D, dtype, heads=1):
    """Queries of so many heads, which share one of keys and values."""
    keys = jax.random.split(jax.random.key(0), 3)
    pairs = zip(keys, (heads, 1, 1), strict=True)
    return [jax.random.normal(k, (1, T, n, D), dtype) for k, n in pairs]


@pytest.mark.slow
@pytest.mark.parametrize(("D", "mask", "kernels"), [
    (128, documents, 3), (128, causal, 2), (64, documents, 3), (64, causal, 2),
])  # fmt: skip
def test_sparse_masks_have_a_kernel_for_each_side(D, mask, kernels, monkeypatch):
    monkeypatch.setattr(mosaic_gpu_limits, "refused_device", lambda: None)
    arrays, mask = gaussians(384, D, jnp.bfloat16), mask(384)
    run = jax.jit(lambda *arrays: gradients(arrays, mask, "mosaic_gpu"))
    lowered = run.trace(*arrays).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == kernels


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("stages", [3, 6])
def test_stages_that_do_not_fit_become_fewer(D, stages, monkeypatch):
    """Mosaic counts shared memory when it lowers, and reserves some for sums."""
    monkeypatch.setattr(mosaic_gpu_limits, "refused_device", lambda: None)
    arrays, mask = gaussians(384, D, jnp.bfloat16), documents(384)
    run = partial(gradients, mask=mask, implementation="mosaic_gpu", bwd_stages=stages)
    jax.jit(lambda *x: run(x)).trace(*arrays).lower(lowering_platforms=("cuda",))


@pytest.mark.slow
@pytest.mark.parametrize(("D", "T"), [(64, 512), (64, 452), (128, 512)])
def test_a_kernel_for_each_side_is_as_exact_as_the_fused_one(D, T):
    """The log-sum-exp has a cotangent, too, which is a part of delta."""
    arrays, mask = gaussians(T, D, jnp.bfloat16, heads=2), uneven_documents(T)
    assert refined(mask, 1, 2).halves
    found = gradients(arrays, mask, "mosaic_gpu", interpret=1)
    fused = jax.jit(lambda mask: gradients(arrays, mask, "mosaic_gpu", interpret=1))(
        mask
    )
    golden = gradients([x.astype(jnp.float32) for x in arrays], mask, "reference")
    for x, y, z in zip(found, golden, fused, strict=True):
        error, own = (jnp.abs(a.astype(jnp.float32) - y).mean() for a in (x, z))
        assert error <= 1.1 * own


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("unseen", [jnp.inf, -jnp.inf])
# The interpreter multiplies with NumPy, which warns of 0 times infinity.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_infinite_keys_and_values_that_nobody_sees_leave_no_trace(D, unseen):
    query, key, value = gaussians(128, D, jnp.bfloat16)

    def found(x):
        pair = (array.at[:, 9].set(x) for array in (key, value))
        return gradients((query, *pair), mask, "mosaic_gpu", interpret=1)

    mask = px.create_block_mask(
        lambda b, h, q, k: (q >= k) & (k != 9), None, None, 128, 128
    )
    for x, y in zip(found(unseen), found(0.0), strict=True):
        np.testing.assert_array_equal(x.astype(jnp.float32), y.astype(jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 128])
def test_sparse_masks_leave_no_trace_of_what_nobody_sees_or_sees_nothing(D):
    """Key 9 is seen by nobody, query 130 sees nothing: they may hold NaN."""

    def visible(b, h, q, k):
        return (q // 128 == k // 128) & (q >= k) & (k != 9) & (q != 130)

    mask = px.create_block_mask(visible, None, None, 512, 512)
    assert refined(mask, 1, 2).halves
    q, k, v = gaussians(512, D, jnp.bfloat16, heads=2)
    given = q.at[:, 130].set(jnp.nan), k.at[:, 9].set(jnp.nan), v.at[:, 9].set(jnp.nan)
    wanted = q.at[:, 130].set(0), k.at[:, 9].set(0), v.at[:, 9].set(0)
    # Not through the reference, which multiplies what is hidden; without log-sum-exps,
    # one of which is -inf.
    found, wanted = (
        gradients(x, mask, "mosaic_gpu", with_lse=False, interpret=1)
        for x in (given, wanted)
    )
    for x, y in zip(found, wanted, strict=True):
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        assert np.isfinite(x).all()
        # Added one by one, not as a product: to the rounding of half precision.
        np.testing.assert_allclose(x, y, rtol=0.02, atol=8e-3 * np.abs(y).max())


@pytest.mark.slow
@pytest.mark.parametrize(("D", "T", "asked"), [
    (192, 64, {}), (64, 430, {"bwd_block_q": 64}), (128, 430, {"bwd_block_q": 64}),
])  # fmt: skip
def test_rows_of_a_block_that_no_tile_of_queries_has_add_nothing(D, T, asked):
    """The kernel for dk and dv visits whole blocks of queries, that for dq has less."""
    arrays, mask = gaussians(T, D, jnp.bfloat16), uneven_documents(T)

    def of_formula(dtype):
        def loss(*arrays):
            out, lse, _ = plain_attention(*arrays, visible=in_uneven_documents(T))
            lse = lse.astype(jnp.float32)
            return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(jnp.sin(lse))

        return jax.grad(loss, (0, 1, 2))(*(x.astype(dtype) for x in arrays))

    found = gradients(arrays, mask, "mosaic_gpu", interpret=1, **asked)
    plain, golden = of_formula(jnp.bfloat16), of_formula(jnp.float32)
    for x, y, z in zip(found, golden, plain, strict=True):
        error, own = (jnp.abs(a.astype(jnp.float32) - y).mean() for a in (x, z))
        assert error <= 1.1 * own
