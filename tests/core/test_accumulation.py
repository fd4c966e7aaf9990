"""Laws of accumulation: the sum that was and the gradient, made without a third array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import arrays_made, normal

from pliax.core.accumulation import accumulate


ROWS, COLUMNS, N = 40, 30, 7
PLACES = tuple(jnp.arange(N) * step % size for step, size in ((3, ROWS), (5, COLUMNS)))


def scored(x, captured):
    """Looks up, repeats and reduces; `unused` has no gradient."""

    def one(x, i, j):
        return x * captured["table"][i, j] + captured["table"][j, i % 4] * captured["w"]

    return jax.vmap(one)(x, *PLACES)


def captured():
    return {
        "table": normal(1, (ROWS, COLUMNS)),
        "w": jnp.float32(0.5),
        "unused": normal(2, (3,)),
    }


def both(x, cotangent, sums):
    """What accumulates in place, and by addition."""
    vjp = jax.vjp(scored, x, captured())[1]
    d_x, d_captured = vjp(cotangent)
    expected = d_x, jax.tree.map(jnp.add, sums, d_captured)
    return accumulate(vjp, cotangent, sums), expected


def assert_same(found, expected):
    """To the rounding of sums taken in another order."""
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_accumulation_is_addition(wrap):
    sums = jax.tree.map(jnp.cos, captured())
    found, expected = wrap(both)(normal(3, (N,)), normal(4, (N,)), sums)
    assert_same(found, expected)


def test_accumulation_in_a_loop_under_vmap_is_addition():
    def loop(x, cotangent):
        def step(_, sums):
            return tuple(y[1] for y in both(x, cotangent, sums[0]))

        start = jax.tree.map(jnp.zeros_like, captured())
        return jax.lax.fori_loop(0, 3, step, (start, start))

    found, expected = jax.jit(jax.vmap(loop))(normal(5, (2, N)), normal(6, (2, N)))
    assert_same(found, expected)


def test_no_array_as_large_as_the_sums_is_made_but_the_sums():
    def run(x, cotangent, sums):
        return accumulate(jax.vjp(scored, x, captured())[1], cotangent, sums)

    operands = normal(3, (N,)), normal(4, (N,)), captured()
    found = arrays_made(run, *operands)
    made = [name for name, shape in found if shape == (ROWS, COLUMNS)]
    # The table itself is drawn inside, and looked up twice.
    assert made.count("scatter-add") == 2
    assert not {"add", "add_any", "broadcast_in_dim"} & set(made)
