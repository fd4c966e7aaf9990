"""Laws of the score_mod library: published formulas, gradients, one mask of dropout."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_error_rule, compilations, in_float64, normal
from hypothesis import given, strategies as st

import pliax as px
from pliax.core._jax import threefry2x32_p
from pliax.kernels.attention import masks, mods
from pliax.kernels.attention.arguments import close_score_mod


B, T, H, D = 2, 21, 4, 8
QKV = tuple(normal(i, (B, T, H, D)) for i in range(3))
BLOCKS = {"reference": None, "xla": {"block_q": 8, "block_kv": 16}}
REQUEST = px.AuxRequest(lse=True)


def flex(q, k, v, implementation: Any = "xla", **arguments):
    return px.flex_attention(
        q, k, v, implementation=implementation,
        kernel_options=BLOCKS[implementation], **arguments,
    )  # fmt: skip


def products(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k) * D**-0.5


def attended(scores, v):
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)


# --- formulas -------------------------------------------------------------------------


Q, K = np.meshgrid(np.arange(T), np.arange(T), indexing="ij")


def per_head(x):
    return jnp.broadcast_to(x, (H,))[None, :, None, None]


def distance(dtype):
    return jnp.asarray(np.abs(Q - K)[None, None], dtype)


def t5_bucket(relative, bidirectional, num_buckets, max_distance):
    """The published bucketing of `key - query`, in float32 as published."""
    n, offset = -relative, 0
    if bidirectional:
        num_buckets //= 2
        offset = (n < 0) * num_buckets
        n = np.abs(n)
    else:
        n = np.maximum(n, 0)
    exact = num_buckets // 2
    ratio = np.log(np.maximum(n, 1).astype(np.float32) / np.float32(exact))
    large = ratio / np.float32(math.log(max_distance / exact)) * (num_buckets - exact)
    large = np.minimum(exact + large.astype(np.int32), num_buckets - 1)
    return offset + np.where(n < exact, n, large)


def t5_formula(s, table):
    bias = table[t5_bucket(K - Q, True, 8, 12)]
    return s + jnp.moveaxis(bias, 2, 0)[None]


def relative_formula(s, table):
    return s + table[:, np.minimum(np.maximum(Q - K, -3), 3) + 3][None]


def causal_table_formula(s, table):
    return s + table[np.clip(Q - K, 0, 4)][None, None]


def offset_formula(s, rate):
    away = np.abs(Q[None] + np.array([3, 9])[:, None, None] - K[None])
    return s - per_head(rate) * jnp.asarray(away[:, None], s.dtype)


def composed_formula(s, slopes):
    return 2.0 * jnp.tanh((s - per_head(slopes) * distance(s.dtype)) / 2.0)


@dataclass(frozen=True)
class Case:
    """A mod of learned numbers, and the same for all scores (B, H, T, S) at once."""

    make: Callable[..., Any]
    formula: Callable[..., Any]
    shape: tuple[int, ...] = ()


CASES = {
    "alibi": Case(
        mods.alibi, lambda s, m: s - per_head(m) * distance(s.dtype), (H,)
    ),
    "soft_cap": Case(mods.soft_cap, lambda s, c: c * jnp.tanh(s / c)),
    "soft_cap by head": Case(
        mods.soft_cap, lambda s, c: per_head(c) * jnp.tanh(s / per_head(c)), (H,)
    ),
    "relative_bias": Case(mods.relative_bias, relative_formula, (H, 7)),
    "causal table": Case(
        lambda table: mods.relative_bias(table, max_distance=4),
        causal_table_formula,
        (5,),
    ),
    "t5_bias": Case(
        lambda table: mods.t5_bias(table, max_distance=12), t5_formula, (8, H)
    ),
    "distance_decay": Case(
        mods.distance_decay, lambda s, r: s - per_head(r) * distance(s.dtype), (H,)
    ),
    "offset": Case(
        lambda r: mods.with_offset(mods.distance_decay(r), np.array([3, 9], np.int32)),
        offset_formula,
        (H,),
    ),
    "compose": Case(
        lambda m: mods.compose(mods.alibi(m), mods.soft_cap(2)), composed_formula, (H,)
    ),
}  # fmt: skip


def gradients(attend, count):
    """Output of attention, and gradients of a loss of it, for `count` arguments."""

    def loss(*arrays):
        out = attend(*arrays)
        return jnp.sum(jnp.sin(out)), out

    return jax.grad(loss, argnums=tuple(range(count)), has_aux=True)


@jax.jit
def evaluated(mod, scores):
    """A score_mod on scores (B, H, T, S)."""
    for axes in ((0, None, None, None, 0), (0, None, None, 0, None),
                 (0, None, 0, None, None), (0, 0, None, None, None)):  # fmt: skip
        mod = jax.vmap(mod, axes)
    return mod(scores, *(jnp.arange(n, dtype=jnp.int32) for n in scores.shape))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_mod_is_its_formula(name):
    case = CASES[name]
    learned = jnp.abs(normal(7, case.shape)) + 0.25
    scores = 3 * normal(8, (B, H, T, T))
    found = evaluated(close_score_mod(case.make(learned), jnp.float32), scores)
    golden = in_float64(case.formula, scores, learned)
    assert_error_rule(found, case.formula(scores, learned), golden)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", BLOCKS)
@pytest.mark.parametrize("name", ["compose", "offset", "relative_bias", "t5_bias"])
def test_attention_learns_what_the_formula_learns(name, implementation):
    case = CASES[name]

    def formula(q, k, v, learned):
        return attended(case.formula(products(q, k), learned), v)

    def ours(q, k, v, learned):
        return flex(q, k, v, implementation, score_mod=case.make(learned))

    operands = (*QKV, jnp.abs(normal(7, case.shape)) + 0.25)
    plain, golden = gradients(formula, 4), in_float64(gradients(formula, 4), *operands)
    assert_error_rule(gradients(ours, 4)(*operands), plain(*operands), golden)


def test_fixed_numbers_are_learned_ones_that_do_not_learn():
    scores = normal(8, (B, H, T, T))
    for name, mod, number in (
        ("alibi", mods.alibi(H), mods.alibi_slopes(H)),
        ("soft_cap", mods.soft_cap(3), 3.0),
        ("distance_decay", mods.distance_decay(0.5), 0.5),
    ):
        found = evaluated(close_score_mod(mod, jnp.float32), scores)
        expected = CASES[name].formula(scores, jnp.asarray(number, jnp.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@given(st.integers(1, 200))
def test_alibi_slopes_are_those_of_the_paper_for_every_number_of_heads(heads):
    def slopes(n):
        if math.log2(n).is_integer():
            start = 2 ** -(2 ** -(math.log2(n) - 3))
            return [start ** (i + 1) for i in range(n)]
        lower = 2 ** math.floor(math.log2(n))
        return slopes(lower) + slopes(2 * lower)[::2][: n - lower]

    np.testing.assert_allclose(mods.alibi_slopes(heads), slopes(heads), rtol=1e-12)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("sizes", [(32, 128), (8, 20), (16, 1000)])
def test_t5_buckets_are_those_of_t5(bidirectional, sizes):
    relative = np.arange(-1100, 1101)
    table = jnp.arange(sizes[0], dtype=jnp.float32)[:, None]
    mod = mods.t5_bias(
        table, bidirectional=bidirectional, num_buckets=sizes[0], max_distance=sizes[1]
    )
    zero = jnp.int32(0)
    each = jax.vmap(lambda k: mod(jnp.float32(0), zero, zero, jnp.int32(1200), k))
    found = each(jnp.asarray(relative + 1200, jnp.int32))
    np.testing.assert_array_equal(found, t5_bucket(relative, bidirectional, *sizes))


@pytest.mark.parametrize("name", ["alibi", "t5_bias", "soft_cap"])
def test_mods_compute_in_the_dtype_of_the_score(name):
    case = CASES[name]
    for stored, dtype in [("bfloat16", "float32"), ("float32", "float32")]:
        mod: Any = close_score_mod(case.make(jnp.ones(case.shape, stored)), dtype)
        assert mod.out_aval.dtype == dtype
    with jax.enable_x64(True):
        mod = close_score_mod(case.make(jnp.ones(case.shape, jnp.float32)), "float64")
        assert mod.out_aval.dtype == jnp.float64


@pytest.mark.parametrize("name", [*CASES, "dropout"])
def test_other_contents_are_the_same_program(name):
    if name == "dropout":
        made = [mods.dropout(px.Generator(seed), 0.5) for seed in (0, 1)]
    else:
        made = [CASES[name].make(jnp.full(CASES[name].shape, x)) for x in (1.0, 2.0)]
    one, other = (close_score_mod(mod, jnp.float32) for mod in made)
    assert one is not None and other is not None
    assert one.program == other.program
    leaves = zip(one.captured, other.captured, strict=True)
    assert any((np.asarray(x) != np.asarray(y)).any() for x, y in leaves)


# --- dropout --------------------------------------------------------------------------


RATE = 0.3


def kept(generator, rate, shape=(B, H, T, T)):
    """Which scores the documented words keep, by JAX's own Threefry."""
    words = jax.random.key_data(generator.key()[1])
    b, h, q, k = (jnp.asarray(x, jnp.uint32) for x in np.indices(shape))
    first, second = (jnp.full(shape, word) for word in words)
    row = threefry2x32_p.bind(first, second, b, h)
    word = np.asarray(threefry2x32_p.bind(*row, q, k)[0])
    return word >= rate * 2.0**32


def test_dropout_words_are_threefry_of_the_indices():
    mod = close_score_mod(mods.dropout(px.Generator(3), RATE), jnp.float32)
    scores = np.asarray(evaluated(mod, jnp.full((B, H, T, T), 1.5)))
    expected = kept(px.Generator(3), RATE)
    np.testing.assert_array_equal(scores == -np.inf, ~expected)
    np.testing.assert_allclose(scores[expected], 1.5 - math.log1p(-RATE), rtol=1e-6)


def test_dropout_drops_at_its_rate_and_independently():
    n = 96
    a = kept(px.Generator(1), RATE, (2, 4, n, n))
    assert abs((~a).mean() - RATE) < 5 * math.sqrt(RATE * (1 - RATE) / a.size)
    other_seed = kept(px.Generator(2), RATE, (2, 4, n, n))
    _, child = px.Generator(1).fold_in(0)
    agree = RATE**2 + (1 - RATE) ** 2
    sigma = math.sqrt(agree * (1 - agree) / a.size)
    for b in (
        other_seed,
        kept(child, RATE, (2, 4, n, n)),
        *(np.roll(a, 1, axis) for axis in range(4)),
        np.swapaxes(a, 2, 3)[..., ::-1],
    ):
        assert abs((a == b).mean() - agree) < 12 * sigma


def dropped_after_the_softmax(keep):
    def attend(q, k, v):
        weights = jax.nn.softmax(products(q, k), axis=-1)
        weights = jnp.where(keep, weights / (1 - RATE), 0.0)
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    return attend


@pytest.mark.parametrize("implementation", BLOCKS)
def test_rescaled_by_both_lse_it_is_dropout_after_the_softmax(implementation):
    generator = px.Generator(3)

    def ours(q, k, v):
        drop = mods.dropout(generator, RATE)
        _, full = flex(q, k, v, implementation, return_aux=REQUEST)
        out, aux = flex(q, k, v, implementation, score_mod=drop, return_aux=REQUEST)
        return out * jnp.exp(aux.lse - full.lse)[..., None]

    plain = dropped_after_the_softmax(kept(generator, RATE))
    golden = in_float64(gradients(plain, 3), *QKV)
    assert_error_rule(gradients(ours, 3)(*QKV), gradients(plain, 3)(*QKV), golden)


def test_forward_and_backward_drop_the_same_scores_whatever_the_blocks():
    """With the identity as values the output shows the weights; so does d value."""
    q, k, _ = QKV
    eye = jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, H, T))
    expected = kept(px.Generator(5), 0.9)
    assert not expected.any(-1).all(), (
        "a row that drops all its keys belongs to the law"
    )

    def attend(v, **options):
        drop = mods.dropout(px.Generator(5), 0.9)
        return px.flex_attention(q, k, v, score_mod=drop, kernel_options=options)

    out, pull = jax.vjp(lambda v: attend(v, block_q=8, block_kv=16), eye)
    others = attend(eye, block_q=16, block_kv=8)
    for weights in (out, others):
        np.testing.assert_array_equal(np.moveaxis(weights, 2, 1) > 0, expected)
    (d_value,) = pull(eye)  # by key and head the column of d out, here of the identity
    np.testing.assert_array_equal(np.einsum("bshq->bhqs", d_value) > 0, expected)


def test_dropout_does_not_depend_on_the_sharding(mesh_4x2):
    P = jax.sharding.PartitionSpec

    @jax.jit
    def attend(q, k, v, generator):
        return flex(q, k, v, score_mod=mods.dropout(generator, RATE))

    q, k, v = (jnp.repeat(x, 2, axis=0) for x in QKV)
    placed = [
        jax.device_put(x, jax.NamedSharding(mesh_4x2, P("x", None, "y")))
        for x in (q, k, v)
    ]
    expected = attend(q, k, v, px.Generator(1))
    np.testing.assert_allclose(attend(*placed, px.Generator(1)), expected, atol=1e-6)


def test_new_seeds_and_slopes_compile_nothing_and_map_as_a_loop():
    def attend(generator, slopes):
        mod = mods.compose(mods.alibi(slopes), mods.dropout(generator, RATE))
        return flex(*QKV, score_mod=mod)

    _, generators = px.Generator(0).split(2)
    slopes = normal(4, (2, H))
    outs = [attend(generators[0], slopes[0])]
    second = generators[1], slopes[1]
    with compilations() as compiled:
        outs.append(attend(*second))
    assert not compiled
    assert np.abs(outs[0] - outs[1]).max() > 1e-2
    mapped = jax.vmap(attend)(generators, slopes)
    np.testing.assert_allclose(mapped, jnp.stack(outs), atol=1e-6)


def test_a_rate_of_zero_changes_nothing():
    mod = mods.dropout(px.Generator(0), 0)
    np.testing.assert_array_equal(flex(*QKV, score_mod=mod), flex(*QKV))


# --- sinks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("implementation", "shape"), [("reference", (H,)), ("xla", (H, 3))]
)
def test_sinks_are_columns_of_value_zero(implementation, shape):
    def dense(q, k, v, logits):
        columns = jnp.reshape(logits, (H, -1))
        n = columns.shape[1]
        columns = jnp.broadcast_to(columns[None, :, None], (B, H, T, n))
        scores = jnp.concatenate([products(q, k), columns], axis=-1)
        return attended(scores, jnp.pad(v, ((0, 0), (0, n), (0, 0), (0, 0))))

    def ours(q, k, v, logits):
        out, aux = flex(q, k, v, implementation, return_aux=REQUEST)
        return mods.sinks(out, aux.lse, logits)

    operands = (*QKV, normal(9, shape))
    plain, golden = gradients(dense, 4), in_float64(gradients(dense, 4), *operands)
    assert_error_rule(gradients(ours, 4)(*operands), plain(*operands), golden)


def test_sinks_leave_queries_that_see_nothing_at_zero():
    mask = px.create_block_mask(
        masks.padding(jnp.asarray([0, T])), B, None, T, T, block_size=16
    )

    def loss(q, k, v, logits):
        out, aux = px.flex_attention(q, k, v, block_mask=mask, return_aux=REQUEST)
        out = mods.sinks(out, aux.lse, logits)
        return jnp.sum(jnp.sin(out)), out

    for logits in (jnp.zeros(H), jnp.full(H, -jnp.inf)):
        found = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(*QKV, logits)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
        assert not found[1][0].any() and found[1][1].all()
    np.testing.assert_allclose(found[1][1], flex(*QKV)[1], atol=2e-6)


def test_sinks_keep_the_dtype_of_the_output():
    out = normal(0, (1, 3, H, 5), jnp.bfloat16)
    found = mods.sinks(out, jnp.zeros((1, 3, H)), jnp.zeros(H, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, out / jnp.bfloat16(2))


# --- errors ---------------------------------------------------------------------------


GEN = px.Generator
LSE = jnp.zeros((B, T, H))
ERRORS = {
    "no mods": (TypeError, "compose: expected at least one score_mod, found none",
                lambda: mods.compose()),
    "a mask_mod": (TypeError, "compose: score_mod: expected 5 positional .*got 4",
                   lambda: mods.compose(masks.causal)),
    "offset": (TypeError, "with_offset: score_mod must be a function .*found int 3",
               lambda: mods.with_offset(3, 1)),
    "offset array": (TypeError, r"offset must be an integer array \(\) or \(B\), found f32",
                     lambda: mods.with_offset(mods.alibi(2), jnp.zeros(2))),
    "heads": (ValueError, "alibi: slopes must be at least 1, found 0", lambda: mods.alibi(0)),
    "heads float": (TypeError, "slopes must be an integer, found float 2.0",
                    lambda: mods.alibi(2.0)),
    "integer slopes": (TypeError, r"floating array \(H\), found i32\[4\].\nCast",
                       lambda: mods.alibi(jnp.arange(4))),
    "cap": (ValueError, "cap must be finite and above 0, found 0", lambda: mods.soft_cap(0)),
    "cap nan": (ValueError, "found nan", lambda: mods.soft_cap(float("nan"))),
    "cap text": (TypeError, "must be a real number, found str '50'.\nPass a finite",
                 lambda: mods.soft_cap("50")),
    "cap rank": (ValueError, r"array \(\) or \(H\), found f32\[2,2\]",
                 lambda: mods.soft_cap(jnp.ones((2, 2)))),
    "even table": (ValueError, "odd length 2 max_distance .*found 4.\nPass max_distance",
                   lambda: mods.relative_bias(jnp.ones(4))),
    "far table": (ValueError, "below the table's length 4, found 4.\n.*max_distance=3",
                  lambda: mods.relative_bias(jnp.ones(4), max_distance=4)),
    "listed table": (TypeError, r"array \(R\) or \(H, R\), found list",
                     lambda: mods.relative_bias([0.0])),
    "buckets": (ValueError, r"with 32 buckets, found f32\[16,4\]",
                lambda: mods.t5_bias(jnp.ones((16, 4)), num_buckets=32)),
    "odd buckets": (ValueError, "even if bidirectional, found 5",
                    lambda: mods.t5_bias(jnp.ones((5, 4)))),
    "near t5": (ValueError, "max_distance must be at least 9, found 8",
                lambda: mods.t5_bias(jnp.ones((32, 4)), max_distance=8)),
    "decay": (ValueError, "rate must be finite and at least 0, found -1.0",
              lambda: mods.distance_decay(-1.0)),
    "dropout one": (ValueError, r"rate must be in \[0, 1\), found 1.0",
                    lambda: mods.dropout(GEN(0), 1)),
    "dropout negative": (ValueError, "at least 0, found -0.1",
                         lambda: mods.dropout(GEN(0), -0.1)),
    "dropout key": (TypeError, "must be a px.Generator, found .*\nPass px.Generator",
                    lambda: mods.dropout(jax.random.key(0), 0.1)),
    "dropout batch": (ValueError, "batch of generators",
                      lambda: mods.dropout(GEN(0).split(2)[1], 0.1)),
    "sinks heads": (ValueError, r"must agree, found f32\[2,21,4,8\], .* and f32\[3\].\nPass",
                    lambda: mods.sinks(QKV[0], LSE, jnp.zeros(3))),
    "sinks none": (TypeError, r"lse must be a floating array \(B, T, H\), found NoneType",
                   lambda: mods.sinks(QKV[0], None, jnp.zeros(H))),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments_say_what_was_found(name):
    kind, text, call = ERRORS[name]
    with pytest.raises(kind, match=text):
        call()
