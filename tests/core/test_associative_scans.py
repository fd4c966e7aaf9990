"""Associative scans over symbolic axes: JAX's at every size, values and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

import pliax as px


def recurrence(x):
    """Of h[t] = a[t] h[t - 1] + x[t]."""

    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    return lax.associative_scan(combine, (jax.nn.sigmoid(x), x))[1]


def of_captured(x):
    scale, offsets = x.mean(), jnp.arange(x.shape[1], dtype=x.dtype)[None]
    return lax.associative_scan(lambda a, b: a + b * scale + offsets, x)


def products(x):
    matrices = 0.3 * x[:, :, None] * jnp.ones((1, 1, x.shape[1]))
    return lax.associative_scan(lambda a, b: jnp.einsum("tij,tjk->tik", a, b), matrices)


def log_sum_exp(x):
    def combine(left, right):
        most = jnp.maximum(left["most"], right["most"])
        sums = [y["sum"] * jnp.exp(y["most"] - most) for y in (left, right)]
        return {"most": most, "sum": sums[0] + sums[1]}

    found = lax.associative_scan(combine, {"most": x, "sum": jnp.ones_like(x)}, axis=1)
    return found["most"] + jnp.log(found["sum"])


def normalised(x):
    def combine(a, b):
        return (a + b) / (1 + jnp.abs(a + b).sum(-1, keepdims=True))

    return lax.associative_scan(combine, x, reverse=True)


def harmonic(x):
    """Whose derivative at the zeros of padding is not finite."""
    return lax.associative_scan(lambda a, b: a * b / (jnp.abs(a) + jnp.abs(b)), x + 3)


PROGRAMS = {
    "sums": lambda x: lax.associative_scan(jnp.add, x, axis=-1),
    "recurrence": recurrence,
    "captured": of_captured,
    "products": products,
    "log_sum_exp": log_sum_exp,
    "normalised": normalised,
    "custom derivatives": lambda x: lax.associative_scan(jnp.logaddexp, x, axis=1),
    "harmonic": harmonic,
    "vmap": lambda x: jax.vmap(
        lambda r: lax.associative_scan(lambda a, b: a + b * r.sum(), r)
    )(x),
}
SIZES = st.tuples(st.integers(1, 9), st.integers(1, 5))


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def drawn(t, d):
    rng = np.random.default_rng((t, d))
    return rng.normal(size=(t, d)).astype(np.float32)


# What combines along a padded axis, or captures what depends on x, has no derivative in
# a bucket: 0 times infinity may be among what is summed.
EXACT_GRADIENTS = set(PROGRAMS) - {"captured", "products", "normalised", "vmap"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=3)  # each compiles six programs
@given(sizes=st.lists(SIZES, min_size=3, max_size=3))
def test_a_scan_is_that_of_jax_and_so_is_its_gradient(name, sizes):
    f = PROGRAMS[name]

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(f(x) ** 2))(x)

    is_padded = {f: True, gradient: name in EXACT_GRADIENTS}
    for g in (f, gradient):
        padding = "require" if is_padded[g] else "auto"
        ours = px.compile(lambda x, g=g: g(x), dims={"x": "t, d"}, padding=padding)
        for t, d in sizes:
            x = drawn(t, d)
            jax.tree.map(close, ours(x), jax.jit(g)(x))
        assert ours.stats.traces == 1 or not is_padded[g]


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: lax.associative_scan(
            lambda a, b: a + (b[:, None] / w[None]).sum(1), x
        ).sum(),
        lambda x, w: lax.associative_scan(lambda a, b: a + jnp.log(b) * w[0], x).sum(),
        lambda x, w: lax.associative_scan(
            lambda a, b: jax.nn.softmax(a + b, -1), x[:, None] - 200 * w[None]
        )[0].sum(),
    ],
    ids=["along a captured axis", "captured, a scalar", "along another axis"],
)
def test_no_gradient_has_nan_of_padding(f):
    dim = {0: px.Dim("t", max=8, buckets=[8])}
    both = jax.grad(f, (0, 1))
    ours = px.compile(both, dims={"x": dim, "w": dim})
    for t in (3, 5):
        x, w = np.arange(1, t + 1, dtype=np.float32), np.ones(t, np.float32)
        jax.tree.map(close, ours(x, w), jax.jit(both)(x, w))


def test_integers_are_combined_bit_for_bit():
    def f(x):
        return lax.associative_scan(lambda a, b: a ^ (b << 1), x)

    ours = px.compile(f, dims={"x": "t"}, padding="require")
    for t in (1, 2, 7, 16, 17):
        x = np.random.default_rng(t).integers(-(2**31), 2**31, t).astype(np.int32)
        np.testing.assert_array_equal(ours(x), jax.jit(f)(x))


def test_arrays_born_from_data_are_scanned():
    def f(x):
        chosen = px.ragged.boolean_mask(x, x > 0)
        return lax.associative_scan(jnp.add, chosen, reverse=True).sum()

    ours = px.compile(f, dims={"x": "t"})
    for x in ([1.0, -2.0, 3.0, 4.0], [-1.0, -1.0, -1.0, -1.0], [2.0], [-2.0]):
        chosen = [v for v in x if v > 0]
        wanted = sum(v * (i + 1) for i, v in enumerate(chosen))
        close(ours(np.array(x, np.float32)), wanted)


def test_what_is_no_combination_is_jaxs_error():
    def f(x):
        return lax.associative_scan(lambda a, b: (a + b)[:, :1], x)

    x = np.ones((5, 3), np.float32)
    with pytest.raises(TypeError) as of_jax:
        jax.jit(f)(x)
    with pytest.raises(TypeError) as ours:
        px.compile(f, dims={"x": "t, _"})(x)
    assert str(ours.value).splitlines()[0] == str(of_jax.value).splitlines()[0]


def test_elements_of_a_weak_type_are_as_weak_as_jaxs():
    def f(x):
        return lax.associative_scan(jnp.add, jnp.full(x.shape, 0.5))

    ours = px.compile(f, dims={"x": "t"})
    for t in (5, 1, 2):
        found, wanted = ours(drawn(t, 1)[:, 0]), jax.jit(f)(drawn(t, 1)[:, 0])
        assert jax.typeof(found) == jax.typeof(wanted)
        close(found, wanted)


def test_weak_elements_of_a_size_born_from_data_are_scanned():
    def f(x):
        chosen = px.ragged.boolean_mask(x, x > 0)
        return lax.associative_scan(jnp.add, jnp.where(chosen > 1, 1.0, 0.0)).sum()

    x = np.array([1.0, 2.0, -3.0, 4.0], np.float32)
    assert px.compile(f, dims={"x": "t"})(x) == 0 + 1 + 2


def test_a_scan_has_derivatives_inside_shard_map(mesh_4x2):
    def inner(x):
        return jax.grad(lambda x: (recurrence(x.T) ** 2).sum())(x)

    def f(x):
        return jax.shard_map(
            inner, mesh=mesh_4x2, in_specs=jax.P("x"), out_specs=jax.P("x")
        )(x)

    ours = px.compile(f, dims={"x": "_, t"}, padding="require")
    for t in (3, 5):
        close(ours(drawn(4, t)), jax.jit(f)(drawn(4, t)))
