"""How the steps of Newton-Schulz are evaluated: one after another, or by Gram matrices.

    standard   A = X X^T,  B = b A + c A A,  X <- a X + B X             (`standard`)
    gram       the same polynomials of X X^T, multiplied together, then with X  (`gram`)

Each is a function of normalised matrices and of the iteration, which says the steps.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pliax.kernels.matrix_products import (
    add_matmul,
    gram_is_fused,
    matmul,
    symmetric_matmul,
)


Method = Callable[[Array, Any], Array]  # of matrices and the iteration
# Of float32 and float64, whatever jax_default_matmul_precision is.
PRECISION = lax.Precision.HIGHEST


def standard(
    X: Float[Array, "*L M N"],
    iteration: Any,
    scale: Float[Array, "*L"] | None = None,
) -> Float[Array, "*L M N"]:
    """Three products and three roundings a step, the first of X times `scale`."""

    def step(i: Any, X: Array, scale: Any = 1.0) -> Array:
        a, b, c = iteration.step(i)
        A = _smaller_gram(X, scale * scale)
        B = _polynomial(A, b, c)
        return add_matmul(
            *_sides(B, X), X, alpha=scale, beta=a * scale, precision=PRECISION
        )

    first = 0
    if scale is not None:
        X, first = step(0, X, scale), 1
        step = functools.partial(step, scale=jnp.ones_like(scale))  # the same kernels
    unroll = isinstance(iteration.steps, int) and jax.default_backend() != "cpu"
    return lax.fori_loop(first, iteration.steps, step, X, unroll=unroll)


# Steps between two products with X. Rounding leaves eigenvalues of X X^T below zero by
# as much, where each step multiplies them by a^2: two steps at first, when they are
# as small as they may be, and three later are what bfloat16 bears.
_FIRST, _LATER = 2, 3


def gram(X: Float[Array, "*L M N"], iteration: Any) -> Float[Array, "*L M N"]:
    r"""The same polynomials of ``X X^T``, multiplied together before they meet X.

    All are symmetric and commute, so that their products are symmetric, too: with
    ``P = a I + b R + c R R`` a step takes the Gram matrix ``R`` to ``P R P``, and ``Q``
    to ``P Q``, where ``X_k = Q X``. Of P Q both sides of the diagonal are made: as
    P and Q commute up to rounding alone, one side errs by a third more.
    """
    M, N = sorted(X.shape[-2:])
    if 2 * N <= 3 * M:
        return standard(X, iteration)
    start, stop = 0, min(_FIRST, iteration.steps)
    while start < iteration.steps:
        X = _several_steps(X, range(start, stop), iteration)
        start, stop = stop, min(stop + _LATER, iteration.steps)
    return X


def _several_steps(X: Array, steps: range, iteration: Any) -> Array:
    product = functools.partial(add_matmul, commute=True, precision=PRECISION)
    R, Q = _smaller_gram(X), None
    for i in steps:
        a, b, c = iteration.step(i)
        P = product(R, R, R, alpha=c, beta=b, gamma=a)
        Q = P if Q is None else matmul(P, Q, P.dtype, precision=PRECISION)
        if i != steps[-1]:
            R = product(P, product(R, P))
    return X if Q is None else matmul(*_sides(Q, X), X.dtype, precision=PRECISION)


def _smaller_gram(X: Float[Array, "*L M N"], alpha: Any = 1.0) -> Array:
    """X X^T or X^T X, times alpha."""
    M, N = X.shape[-2:]
    if M == N and gram_is_fused(X):
        # By the kernel of `_polynomial`: one of its own takes 1 s more to trace and 0.7
        # to compile, where an addend that nobody needs takes 2 of 42 us (24 matrices of
        # (896, 896), one H200).
        return symmetric_matmul(X, X, alpha=alpha, beta=0.0, precision=PRECISION)
    return symmetric_matmul(X, alpha=alpha, transpose=M > N, precision=PRECISION)


def _polynomial(A: Float[Array, "*L M M"], b: Any, c: Any) -> Array:
    """The sum b A + c A A, of a symmetric A."""
    if gram_is_fused(A):  # A A is A A^T, of which square matrices have the kernel
        return symmetric_matmul(A, A, alpha=c, beta=b, precision=PRECISION)
    return add_matmul(A, A, A, alpha=c, beta=b, commute=True, precision=PRECISION)


def _sides(P: Array, X: Float[Array, "*L M N"]) -> tuple[Array, Array]:
    """The factors of the product of X and a polynomial of its smaller Gram matrix."""
    return (X, P) if X.shape[-2] > X.shape[-1] else (P, X)


METHODS: dict[Any, Method] = {"standard": standard, "gram": gram}
