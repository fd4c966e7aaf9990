r"""Momentum, and what is orthogonalised of it: one pass over gradients and momenta.

.. math::
    M' = f G + k M, \qquad X = \mathrm{round}(f G + k M')

X goes into its place of one stack, and is added up squared. XLA makes each look-ahead
by itself and copies it: of 24 matrices of (896, 4864) 0.84 ms on an H100, where a first
form of this (a kernel for each array), and a pass that divided by the norms, took 0.74.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pliax.core.manual_axes import may_be_partitioned, varying_axes
from pliax.kernels._hopper import refused_counting, refused_device
from pliax.kernels.matrix_products import rounded


BLOCK = 2048  # elements of a thread block: 1,024 took longer, 4,096 as long
_LARGEST = 2**31 - 1  # places are counted in 32 bits

type Stacked = tuple[list[Array], Array, Array]


@dataclass(frozen=True)
class Static:
    """What is no array.

    Attributes:
        sides: Of each matrix.
        nesterov: Whether X looks ahead; else it is M'.
        interpret: Whether the kernel runs, in JAX's interpreter, on any device.
    """

    sides: tuple[int, int]
    nesterov: bool
    interpret: bool = False


def stacked(
    static: Static,
    factors: Float[Array, "2"],
    gradients: Sequence[Float[Array, "_ M N"]],
    momenta: Sequence[Float[Array, "_ M N"]],
) -> Stacked:
    """The next momenta, their look-ahead in one stack, and its sums of squares.

    An infinity makes the sum of its matrix NaN: one that is infinite has overflowed.

    Args:
        static: What is known of them.
        factors: f and k.
        gradients: Float32, stacks of matrices, of which `refused` refuses none.
        momenta: Like them.

    Returns:
        Momenta as they were, a stack [L, M, N] in bfloat16, and [L] in float32.
    """
    return _jitted(static, factors, list(gradients), list(momenta))


def refused(gradient: Any, momentum: Any, sides: tuple[Any, Any]) -> str | None:
    """Why one pass does not serve matrices of these sides; None if it does."""
    if reason := refused_device() or refused_counting():
        return reason
    if gradient.shape != momentum.shape:
        return f"the momentum has another shape: {momentum.shape}"
    given = gradient, momentum
    is_explicit = any(jax.typeof(x).sharding.mesh.explicit_axes for x in given)
    if may_be_partitioned() or varying_axes(given) or is_explicit:
        return "XLA cannot partition a kernel among several devices"
    if any(x.dtype != jnp.float32 for x in given):
        return "it takes float32 alone"
    if not all(isinstance(n, int) for n in (*gradient.shape, *sides)):
        return f"it needs known sizes, found {gradient.shape}"
    if not math.prod(gradient.shape) or math.prod(sides) % BLOCK:
        return f"matrices are not of whole blocks of {BLOCK}"
    return None


# --- who computes it ------------------------------------------------------------------


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _stacked(static: Static, *arrays: Any) -> Stacked:
    return _mapped(static)(*arrays)


@_stacked.defjvp
def _stacked_jvp(static: Static, primals: Any, tangents: Any) -> Any:
    return jax.jvp(partial(_by_xla, static), primals, tangents)


_jitted = jax.jit(_stacked, static_argnums=0)  # eager steps would compile each time


def _mapped(static: Static) -> Any:
    """The kernel, and XLA's operations where an axis is mapped."""
    mapped = jax.custom_batching.custom_vmap(partial(_run, static))

    @mapped.def_vmap
    def _(size: int, is_batched: Sequence[Any], *arrays: Any) -> Any:
        axes = jax.tree.map(lambda is_many: 0 if is_many else None, tuple(is_batched))
        out = jax.vmap(partial(_by_xla, static), axes, axis_size=size)(*arrays)
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def _run(static: Static, *arrays: Any) -> Stacked:
    from . import mosaic_gpu  # loads Pallas, which takes a second

    if sum(G.size for G in arrays[1]) > _LARGEST:
        return _by_xla(static, *arrays)
    by_kernel = partial(mosaic_gpu.stacked, static)
    if static.interpret:
        return by_kernel(*arrays)
    default = partial(_by_xla, static)
    return jax.lax.platform_dependent(*arrays, cuda=by_kernel, default=default)


def _by_xla(
    static: Static, factors: Array, gradients: list[Array], momenta: list[Array]
) -> Stacked:
    fresh, kept = factors
    pairs = list(zip(gradients, momenta, strict=True))
    buffers = [fresh * G + kept * M for G, M in pairs]
    ahead = buffers
    if static.nesterov:
        ahead = [fresh * G + kept * M for G, M in zip(gradients, buffers, strict=True)]
    X = jnp.concatenate([rounded(x, jnp.bfloat16) for x in ahead])
    return buffers, X, jnp.sum(squared(X), axis=(1, 2))


def squared(X: Array) -> Array:
    """In float32, NaN where X is infinite."""
    wide = X.astype(jnp.float32)
    return jnp.where(jnp.abs(wide) == jnp.inf, jnp.nan, wide * wide)
