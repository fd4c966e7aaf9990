"""Laws of how scores change with what a mod captured: two parts, which are the whole."""

import contextlib
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import MODS
from helpers import normal
from hypothesis import given, settings, strategies as st

from pliax.core.evaluation import evaluate
from pliax.core.jaxprs import close
from pliax.kernels.attention import linearization, ordered_scatters
from pliax.kernels.attention.derivatives import (
    floating_captures,
    with_floating_captures,
)
from pliax.kernels.attention.linearization import DIFFERENCE, PAIR, linearize
from pliax.kernels.attention.separation import Inseparable


B, H, T, S = SIZES = 2, 3, 7, 9
SCALARS = [jax.ShapeDtypeStruct((), x) for x in (jnp.float32, *[jnp.int32] * 4)]
OFFSETS = jnp.arange(B, dtype=jnp.int32)
WIDTH = 3  # of a picture, whose places are queries and keys
FLOATS = {
    "number": jnp.float32(0.3),
    "heads": normal(0, (H,)),
    "rows": normal(1, (B, T)),
    "columns": normal(2, (H, S)),
    "table": normal(3, (H, T + S + B)),
    "buckets": normal(4, (5, H)),
    "pairs": normal(7, (H, T, S)),
    "windows": normal(8, (5, 5, H)),
}
# What is looked up, as users write it.
TERMS = {
    "number": lambda x, b, h, q, k: x["number"],
    "slopes": lambda x, b, h, q, k: x["heads"][h] * (q - k).astype(jnp.float32),
    "of all": lambda x, b, h, q, k: (2 * jnp.exp(x["heads"]))[h],
    "rows": lambda x, b, h, q, k: x["rows"][b, q],
    "columns": lambda x, b, h, q, k: jnp.exp(x["columns"][h][k]),
    "distances": lambda x, b, h, q, k: x["table"][h, q - k + S],
    "added later": lambda x, b, h, q, k: x["table"][h][q + S - 1 - k],
    "of a cache": lambda x, b, h, q, k: x["table"][h, q + OFFSETS[b] - k + S],
    "buckets": lambda x, b, h, q, k: x["buckets"][jnp.clip(abs(q - k) // 2, 0, 4), h],
    "pairs": lambda x, b, h, q, k: x["pairs"][h, q, k],
    "of one head": lambda x, b, h, q, k: x["pairs"][1, q, k],
    "turned": lambda x, b, h, q, k: (2 * x["pairs"])[0].T[k][q],
    "of sequences": lambda x, b, h, q, k: x["pairs"][b + 1, q, k - 1],
    "blocks": lambda x, b, h, q, k: x["rows"][q // 4, k // 3],
    "pictures": lambda x, b, h, q, k: x["windows"][
        q // WIDTH - k // WIDTH + 2, q % WIDTH - k % WIDTH + 2, h
    ],
    "both ways": lambda x, b, h, q, k: x["buckets"][jnp.where(k > q, 1, 3), 0],
}
JOINED = {
    "add": lambda s, x, q, k: s + x,
    "multiply": lambda s, x, q, k: s * x,
    "cap": lambda s, x, q, k: jnp.tanh(s * x) + x,
    "softplus": lambda s, x, q, k: s - jax.nn.softplus(x) * s,
    "where": lambda s, x, q, k: jnp.where(q >= k, s + x, s),
}


def every(function, scores):
    """Of all scores, which are (B, H, T, S)."""
    indices = jnp.meshgrid(*(jnp.arange(n) for n in SIZES), indexing="ij")
    for _ in SIZES:
        function = jax.vmap(function)
    return function(scores, *(x.astype(jnp.int32) for x in indices))


def summed(x, leaf):
    """Over what a leaf has no axis of."""
    if leaf.kind == PAIR:
        sums, names = x, (*"bhqk",)
    elif leaf.kind == DIFFERENCE:
        diagonals = [jnp.trace(x, 1 - S + n, 3, 2) for n in range(T + S - 1)]
        sums, names = jnp.stack(diagonals, axis=2), ("b", "h", DIFFERENCE)
    else:
        sums = jnp.sum(x, axis=3 if leaf.kind == "q" else 2)
        names = "b", "h", leaf.kind
    return jnp.sum(sums, [n for n, name in enumerate(names) if name not in leaf.axes])


def in_two_parts(mod, scores, d_scores, **options):
    """Gradients of what a mod captured, by slopes and leaves."""
    linear = linearize(mod)
    both = linear.with_slopes(linear.leaves)

    def slopes(*scalars):
        found = evaluate(both.program.jaxpr, both.captured, scalars)
        return tuple(map(jnp.asarray, found))

    pairs = zip(linear.leaves, every(slopes, scores)[1:], strict=True)
    sums = [summed(d_scores * slope, leaf) for leaf, slope in pairs]
    return linear.gradients(sums, dict(zip("bhqk", SIZES, strict=True)), **options)


@settings(max_examples=25)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(sorted(TERMS)), st.sampled_from(sorted(JOINED))),
        min_size=1,
        max_size=3,
    )
)
def test_slopes_and_leaves_have_the_gradients_of_the_whole(parts):
    def score_mod(s, b, h, q, k):
        terms = [(JOINED[how], TERMS[name](FLOATS, b, h, q, k)) for name, how in parts]
        return reduce(lambda s, x: x[0](s, x[1], q, k), terms, s)

    mod = close(score_mod, *SCALARS)
    scores, d_scores = normal(5, SIZES), normal(6, SIZES)
    whole = lambda *x: every(with_floating_captures(mod, x), scores)  # noqa: E731
    pull = jax.jit(jax.vmap(jax.vjp(whole, *floating_captures(mod))[1]))
    of_each = pull(jnp.diag(d_scores.ravel()).reshape(-1, *SIZES))
    for x, terms in zip(in_two_parts(mod, scores, d_scores), of_each, strict=True):
        size = np.abs(terms).sum(axis=0)  # roundings are in proportion to it
        error = np.abs(x - np.asarray(terms, np.float64).sum(axis=0))
        assert (error <= 1e-5 * (size + size.max()) + 1e-6).all()


def test_what_does_not_change_scores_has_no_leaf_and_no_gradient():
    heads = FLOATS["heads"]
    mod = close(lambda s, b, h, q, k: s + 0 * jnp.floor(heads[h]), *SCALARS)
    found = in_two_parts(mod, normal(5, SIZES), normal(6, SIZES))
    np.testing.assert_array_equal(found[0], jnp.zeros(H))


LEARNED = ("learned_alibi", "learned_decay", "relative_bias", "causal_bias")
LEARNED += ("t5_encoder", "t5_decoder", "learned_cap", "composed", "moved")


@pytest.mark.parametrize("name", LEARNED)
def test_all_mods_of_the_library_that_learn_are_of_two_parts(name):
    (mod,) = (x for x in MODS if x.name == name)
    floats = [normal(n, x) for n, x in enumerate(mod.floats(T, S))]
    made = mod.make(*floats, *mod.others(T, S))
    closed = jax.tree.map(jnp.asarray, close(made, *SCALARS))
    assert linearize(closed).leaves


@pytest.mark.parametrize("name", TERMS)
def test_lookups_of_neighbours_by_neighbours_are_slices(name):
    """Others are scattered, and added in one order: a GPU scatters additions in none."""
    mod = close(lambda s, b, h, q, k: s + TERMS[name](FLOATS, b, h, q, k), *SCALARS)
    given = normal(5, SIZES), normal(6, SIZES)
    in_any_order, in_order = (
        str(jax.make_jaxpr(partial(in_two_parts, mod, deterministic=x))(*given))
        for x in (False, True)
    )
    slices = {"number", "pairs", "of one head", "turned", "distances", "added later"}
    assert ("scatter-add" in in_any_order) == (name not in slices)
    assert "scatter-add" not in in_order


@pytest.mark.parametrize("name", ["of sequences", "pairs", "pictures"])
def test_very_many_lookups_are_left_to_another_way(name, monkeypatch):
    """But those that are a slice, or compared."""
    monkeypatch.setattr(linearization, "_SCATTERED", 0)
    monkeypatch.setattr(ordered_scatters, "_COMPARED_ANYWAY", 0)
    mod = close(lambda s, b, h, q, k: s + TERMS[name](FLOATS, b, h, q, k), *SCALARS)
    is_left = name == "of sequences"
    refusal = pytest.raises(Inseparable, match="too many")
    with refusal if is_left else contextlib.nullcontext():
        linearize(mod).check(dict(zip("bhqk", SIZES, strict=True)))


@pytest.mark.parametrize("by", ["pair", "difference"])
def test_sums_are_not_rounded_to_half_precision(by):
    """Of elements that a mod casts before it looks them up, and several lookups share.

    As many as 4,096 are 1 each, and 256 + 1 is 256 in bfloat16.
    """

    def score_mod(s, b, h, q, k):
        place = abs(q - k) // 4 if by == "difference" else (q + k) // 4
        return s + FLOATS["table"].astype(jnp.bfloat16)[h, place].astype(jnp.float32)

    linear = linearize(close(score_mod, *SCALARS))
    with pytest.raises(Inseparable, match="half precision"):
        linear.check(dict(zip("bhqk", (1, H, 4096, 4096), strict=True)))


def test_inside_shard_map_each_device_has_gradients_of_its_own():
    """Slopes that are made of what varies are not summed over devices."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def gradients(rows, scores, d_scores):
        mod = close(
            lambda s, b, h, q, k: jnp.tanh(s * rows[b, q]) * rows[b, k], *SCALARS
        )
        return in_two_parts(mod, scores, d_scores)

    of_all = normal(1, (2 * B, S)), *(normal(n, (2 * B, *SIZES[1:])) for n in (5, 6))
    spec = jax.sharding.PartitionSpec("data")
    shards = jax.shard_map(gradients, mesh=mesh, in_specs=spec, out_specs=(spec,))
    (found,) = jax.jit(shards)(*of_all)
    halves = ([x[n : n + B] for x in of_all] for n in (0, B))
    wanted = jnp.concatenate([gradients(*x)[0] for x in halves])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@jax.custom_vjp
def halved(x):
    return x / 2


halved.defvjp(lambda x: (x / 2, None), lambda _, g: (g / 2,))


def scaled(factor):
    """A function whose derivative captures an array."""

    @jax.custom_jvp
    def cap(x):
        return jnp.tanh(x)

    cap.defjvp(lambda x, t: (cap(*x), t[0] * factor))
    return cap


@pytest.mark.parametrize(
    ("mod", "reason"),
    [
        (lambda x: lambda s, b, h, q, k: s + x[h, h, s.astype(int)], "score"),
        (lambda x: lambda s, b, h, q, k: s + x[q, k, s.astype(int)], "score"),
        (lambda x: lambda s, b, h, q, k: s + x[h, q] @ x[h, k], "no kernel"),
        (lambda x: lambda s, b, h, q, k: s + jnp.prod(x[h, q]), "passes through"),
        (lambda x: lambda s, b, h, q, k: s + halved(x[h, q, 0]), "reverse mode alone"),
        (
            lambda x: lambda s, b, h, q, k: scaled(x[0, 0, 0])(s + x[h, 0, 0]),
            "derivative rule that captured",
        ),
    ],
    ids=[
        *("a score", "a pair and a score", "vectors", "product", "rule"),
        "a rule that captures",
    ],
)
def test_what_has_no_two_parts_says_why(mod, reason):
    with pytest.raises(Inseparable, match=reason):
        linearize(close(mod(normal(0, (9, 9, 9))), *SCALARS))
