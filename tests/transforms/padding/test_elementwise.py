"""Elementwise operations, of which padding may make neither a value nor a loop longer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from transforms.padding.checking import check

import pliax as px


ITERATED = {
    "igamma": (lax.igamma, 2),
    "igammac": (lax.igammac, 2),
    "gradient of igamma": (jax.grad(lambda a, x: lax.igamma(a, x).sum()), 2),
    "betainc": (lax.betainc, 3),
    "gradient of a gamma draw": (lax.random_gamma_grad, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize(("f", "count"), ITERATED.values(), ids=ITERATED)
def test_loops_over_elements_end_with_the_last_valid_one(f, count):
    """With poison of its own sort an iterated function takes hours, or never ends."""
    rng = np.random.default_rng(0)
    args = [rng.uniform(0.1, 0.9, (2, 20)).astype(np.float32) for _ in range(count)]
    bucket = {"b": 5, "t": 20}
    check(f, ("b, t",) * count, args, {"b": 2, "t": 20}, bucket, tolerance=1e-6)


FOLDED = {
    "wraps": (lambda x: jnp.minimum(jnp.sort(x) + 1, 0), np.int32),
    "wraps twice": (lambda x: jnp.minimum(jnp.sort(x).astype(jnp.int8), 0), np.uint8),
    "wraps at 256": (
        lambda x: (jnp.full(x.shape, 200, jnp.uint8) + 100).astype(int) - 300,
        np.uint8,
    ),
    "is rounded": (lambda x: jnp.full(x.shape, 1e8, x.dtype) + 1 - 1e8 - 1, np.float32),
    "is too large": (lambda x: 0 * (jnp.full(x.shape, 3e38, x.dtype) * 2), np.float32),
    "is complex": (lambda x: jnp.array(jnp.sort(x)), np.complex64),
}


@pytest.mark.parametrize(("f", "dtype"), FOLDED.values(), ids=FOLDED)
def test_padding_holds_what_it_is_believed_to_hold(f, dtype):
    """A sum trusts that padding is 0 where that follows from how it was computed."""
    compiled = px.compile(lambda x: f(x).sum(), dims={"x": "t"}, padding="require")
    for t in (5, 6, 8):
        x = np.arange(t).astype(dtype)
        np.testing.assert_array_equal(compiled(x), jax.jit(f)(x).sum())


def test_a_quotient_by_what_may_be_zero_is_bounded_by_its_dividend():
    def steps(x):
        return jnp.arange(0, 2 * x.shape[0], x.shape[0] - 2)

    compiled = px.compile(steps, dims={"x": "t"}, padding="require")
    for t in (5, 6, 7, 3, 11, 1):
        x = np.arange(t, dtype=np.int32)
        np.testing.assert_array_equal(compiled(x), steps(x))
