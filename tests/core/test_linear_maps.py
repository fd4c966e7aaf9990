"""Laws of linear maps: one value, a transpose of its own, under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import arrays_made, normal
from jax.test_util import check_grads

from pliax.core.linear_maps import linear_map


A, X, Y = normal(0, (3, 4)), normal(1, (4,)), normal(2, (3,))


def function(residuals, x):
    return {"y": jnp.sin(residuals["a"]) @ x}


def transpose(residuals, cotangents):
    return jnp.sin(residuals["a"]).T @ cotangents["y"]


def apply(a, x, transpose=transpose):
    return linear_map(function, transpose, {"a": a}, x)["y"]


def plain(a, x):
    return jnp.sin(a) @ x


def test_reverse_mode_calls_the_transpose_and_nothing_else():
    def doubled(residuals, cotangents):
        return 2 * transpose(residuals, cotangents)

    gradient = jax.grad(lambda x: Y @ apply(A, x, doubled))(X)
    np.testing.assert_allclose(gradient, 2 * jnp.sin(A).T @ Y, rtol=1e-6)
    _, tangent = jax.jvp(lambda x: apply(A, x, doubled), (X,), (X,))
    np.testing.assert_allclose(tangent, jnp.sin(A) @ X, rtol=1e-6)


TRANSFORMATIONS = {
    "jvp": lambda f: jax.jvp(f, (A, X), (A, X))[1],
    "jacfwd": lambda f: jax.jacfwd(f, 1)(A, X),
    "linearize": lambda f: jax.linearize(lambda x: f(A, x), X)[1](X),
    "grad": lambda f: jax.grad(lambda x: Y @ f(A, x))(X),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: Y @ f(A, x)))(X),
    "grad of vmap": lambda f: jax.grad(
        lambda x: jnp.sum(jax.vmap(f, (None, 0))(A, x) ** 2)
    )(jnp.stack([X, 2 * X])),
    "grad of vmap over residuals": lambda f: jax.grad(
        lambda x: jnp.sum(jax.vmap(f, (0, None))(jnp.stack([A, 2 * A]), x) ** 2)
    )(X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x: Y @ f(A, x)))(
        jnp.stack([X, 2 * X])
    ),
    "second order": lambda f: jax.hessian(lambda x: jnp.sum(f(A, x) ** 3))(X),
    "remat": lambda f: jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(f(A, x)))))(X),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_see_the_function(name):
    transform = TRANSFORMATIONS[name]
    np.testing.assert_allclose(transform(apply), transform(plain), rtol=2e-5)


def test_residuals_that_are_not_mapped_are_not_repeated():
    """Neither forward nor backward, so that shared keys stay shared under vmap."""

    def loss(x):
        return jnp.sum(jnp.square(jax.vmap(apply, (None, 0))(A, x)))

    many = jnp.stack([X] * 5)
    for f in (loss, jax.grad(loss)):
        assert (5, *A.shape) not in [shape for _, shape in arrays_made(f, many)]


def test_derivatives_are_right_to_second_order():
    check_grads(lambda x: apply(A, x) ** 2, (X,), order=2, rtol=1e-2)
