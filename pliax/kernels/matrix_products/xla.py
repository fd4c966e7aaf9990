"""alpha A B + beta C + gamma I by XLA's products, which run everywhere."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def product(
    A: Float[Array, "*L M K"],
    B: Float[Array, "*L K N"],
    dtype: Any = None,
    *,
    precision: Any = None,
) -> Array:
    """Operands as they are, sums in float32 or wider, results so or rounded once.

    One form serves every platform: tensor cores want bfloat16 operands, and on a
    CPU this form took 0.6 of the time of float32 operands (d=512, 2 cores of a
    Zen 4 EPYC, jax 0.12.0.1 and 0.11.2 alike). Products of half-precision numbers are
    exact in float32, so `precision` is for wider ones.
    """
    if jnp.finfo(A.dtype).bits < 32:
        precision = lax.Precision.DEFAULT
    kind = dtype or sums_dtype(A.dtype)
    return jnp.matmul(A, B, precision=precision, preferred_element_type=kind)


def rounded_product(
    A: Float[Array, "*L M K"], B: Float[Array, "*L K N"], *, precision: Any = None
) -> Array:
    """The product alone, rounded once to the dtype of A.

    On a GPU the product rounds. On a CPU XLA may leave that out, and what follows
    would read sums in float32 (xla_allow_excess_precision).
    """

    def afterwards(A: Array, B: Array) -> Array:
        return rounded(product(A, B, precision=precision), A.dtype)

    at_once = partial(product, dtype=A.dtype, precision=precision)
    bits = jnp.finfo(A.dtype).bits
    if bits != 16:
        return at_once(A, B) if bits > 16 else afterwards(A, B)
    return lax.platform_dependent(A, B, cuda=at_once, default=afterwards)


def scaled_sum(
    AB: Array, C: Array | None, factors: Any, dtype: Any, *, has_shift: bool
) -> Array:
    """The sum alpha AB + beta C + gamma I, rounded once."""
    alpha, beta, gamma = (x[..., None, None].astype(AB.dtype) for x in factors)
    total = jnp.where(alpha == 0, 0.0, alpha * AB)
    if C is not None:
        total = total + beta * C.astype(AB.dtype)
    if has_shift:
        # Lies on a mesh as the sums do; 0 times an infinite gamma would be NaN.
        is_diagonal = lax.full_like(total, 0.0) + identity(AB) > 0
        total = jnp.where(is_diagonal, total + gamma, total)
    return rounded(total, dtype)


def identity(like: Float[Array, "*L M M"]) -> Float[Array, "*L M M"]:
    """A stack of identity matrices."""
    return jnp.broadcast_to(jnp.eye(like.shape[-1], dtype=like.dtype), like.shape)


def rounded(X: Array, dtype: Any) -> Array:
    """Round to a dtype for certain.

    XLA may drop a pair of converts (xla_allow_excess_precision), never a
    reduce_precision. Measured on a CPU, it costs nothing.
    """
    kind = jnp.finfo(dtype)
    if kind.bits < 32:
        X = X.astype(jnp.float32)
        X = lax.reduce_precision(X, kind.nexp, kind.nmant)
    return X.astype(dtype)


def sums_dtype(dtype: Any) -> Any:
    """What products of such numbers are added up in."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32
