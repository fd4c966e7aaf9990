"""Jaxprs of JAX's own symbolic dimensions are padded as the functions they came from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pliax as px


def recurrent(w, x):
    def step(carry, row):
        carry = jnp.tanh(carry @ w + row)
        return carry, carry.sum()

    start = jnp.zeros((x.shape[0], 4))
    carry, sums = jax.lax.scan(step, start, jnp.swapaxes(x, 0, 1))
    return jnp.mean(carry**2) + jnp.sum(sums) * x.shape[1]


def branching(w, x):
    inner = jax.jit(lambda x: jnp.sort(x, axis=1).reshape(-1, 4)[::-1])
    return jax.lax.cond(x.sum() > 0, inner, lambda x: -inner(x), x) @ w


def attention(w, x):
    scores = jnp.einsum("btd,bsd->bts", x @ w, x)
    weights = jax.nn.softmax(jax.nn.relu(scores), axis=-1)
    return jnp.concatenate([weights @ x, x], axis=1)


PROGRAMS = {
    "attention": attention,
    "branches": branching,
    "gradient of attention": jax.grad(lambda w, x: attention(w, x).sum(), (0, 1)),
    "gradient of a scan": jax.grad(recurrent, (0, 1)),
    "vmap": jax.vmap(lambda w, x: w[:1] + jnp.cumsum(x, axis=0), (None, 0)),
}


def symbolic(f):
    b, t = jax.export.symbolic_shape("b, t")
    w = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    return jax.make_jaxpr(f)(w, jax.ShapeDtypeStruct((b, t, 4), jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_symbolic_jaxpr_is_padded_as_its_function(name):
    f = PROGRAMS[name]
    of_jaxpr = px.pad(symbolic(f))
    of_function = px.pad(f, dims={"x": "b, t, 4"})
    rng = np.random.default_rng(0)
    w = rng.normal(size=(4, 4)).astype(np.float32)
    bucket = np.full((4, 8, 4), np.nan, np.float32)
    sizes = {"b": 3, "t": 5}
    bucket[:3, :5] = rng.normal(size=(3, 5, 4))
    found, wanted = (
        of_jaxpr(w, bucket, sizes=sizes),
        of_function(w, bucket, sizes=sizes),
    )
    shapes = of_jaxpr.out_shapes(w, bucket, sizes=sizes)
    for x, y, shape in zip(found, jax.tree.leaves(wanted), shapes, strict=True):
        valid = tuple(map(slice, shape))
        np.testing.assert_array_equal(x[valid], y[valid])


def test_a_jaxpr_of_numbers_is_refused():
    closed = jax.make_jaxpr(jnp.sin)(jnp.ones(3))
    with pytest.raises(TypeError, match="its shapes are numbers"):
        px.pad(closed)


def test_a_jaxpr_has_names_of_its_own():
    with pytest.raises(TypeError, match="but dims was given"):
        px.pad(symbolic(attention), dims={"x": "b, t, 4"})


def test_a_function_needs_dims():
    with pytest.raises(TypeError, match="dims is missing"):
        px.pad(jnp.sin)
