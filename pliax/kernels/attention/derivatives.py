"""Derivatives of a kernel: its own backward pass, and the definition for what is left.

    reverse mode    the kernel's forward and backward passes
    forward mode    tangents from the definition
    second order    derivatives of both passes, from the definition

A kernel is a pair of functions that JAX never differentiates, so that they may loop
over as many blocks as the data say. What comes from the definition needs its memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pliax.core.linear_maps import linear_map
from pliax.core.manual_axes import sum_like, vary, varying_axes


@dataclass(frozen=True)
class Kernel:
    """One implementation, given by its two passes.

    Attributes:
        forward: `(arrays, score_mod, block_mask) -> (out, lse, maximum, log_sum)`. The
            last two add up to `lse`, and say more: beside a maximum of -1e9, the usual
            stand-in for -inf, float32 has no room for the logarithm of the sum.
        backward: `(arrays, score_mod, block_mask, (out, maximum, log_sum), (d_out,
            d_lse))` to the gradients of the arrays and of the floating arrays
            `score_mod` captured; their dtypes are the kernel's.
        definition: The same meaning as `forward`, which JAX differentiates.
        multiplies_hidden: Whether what a mask hides, and what sees nothing, is first
            multiplied by 0, and left out in a second try where NaN spoiled the first:
            with other roundings, so that padding is filled with 0 before.
        inference: `(arrays, score_mod, block_mask) -> (out, lse, maximum)`, the same
            numbers as of `forward`, for what is not differentiated. None for `forward`.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    definition: Callable[..., Any]
    multiplies_hidden: bool = False
    inference: Callable[..., Any] | None = None

    def infer(self, *args: Any) -> Any:
        """Output, log-sum-exp and maximum, where nothing is differentiated."""
        return self.inference(*args) if self.inference else self.forward(*args)[:3]


def by_platform(*, cuda: Kernel, default: Kernel) -> Kernel:
    """A kernel for NVIDIA GPUs, and one where a program is compiled for others."""

    def forward(*args: Any) -> Any:
        return jax.lax.platform_dependent(
            *args, cuda=cuda.forward, default=default.forward
        )

    def inference(*args: Any) -> Any:
        return jax.lax.platform_dependent(*args, cuda=cuda.infer, default=default.infer)

    def backward(arrays: Any, score_mod: Any, *rest: Any) -> Any:
        primals = arrays, floating_captures(score_mod)

        def of(kernel: Kernel) -> Callable[..., Any]:
            return lambda *args: _as_primals(kernel.backward(*args), primals)

        args = arrays, score_mod, *rest
        return jax.lax.platform_dependent(*args, cuda=of(cuda), default=of(default))

    multiplies = cuda.multiplies_hidden or default.multiplies_hidden
    return Kernel(forward, backward, cuda.definition, multiplies, inference)


def attend(
    kernel: Kernel, arrays: tuple[Array, ...], score_mod: Any, block_mask: Any
) -> tuple[Array, Array, Array]:
    """Output, log-sum-exp and maximum (no gradient), differentiable as said above."""
    out, lse, maximum = _attend(kernel, arrays, score_mod, block_mask)
    return out, lse, jax.lax.stop_gradient(maximum)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(kernel: Kernel, *args: Any) -> Any:
    return kernel.infer(*args)


@_attend.defjvp
def _attend_jvp(kernel: Kernel, primals: Any, tangents: Any) -> Any:
    """Where it is differentiated there is what the backward pass needs."""
    with_residuals = partial(_with_residuals, kernel)
    results, d_results = jax.jvp(with_residuals, primals, tangents)
    return results[:3], d_results[:3]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_residuals(kernel: Kernel, *args: Any) -> Any:
    return kernel.forward(*args)


@_with_residuals.defjvp
def _with_residuals_jvp(kernel: Kernel, primals: Any, tangents: Any) -> Any:
    results = _with_residuals(kernel, *primals)
    out, _, *statistics = results
    d_results = linear_map(
        partial(_tangents, kernel),
        partial(_cotangents, kernel),
        (*primals, (out, *statistics)),
        (tangents[0], _floating_tangents(primals[1], tangents[1])),
        like=results[:2],
    )
    return results, (*d_results, *map(jnp.zeros_like, statistics))


def _tangents(kernel: Kernel, residuals: Any, tangents: Any) -> Any:
    """Tangents of output and log-sum-exp."""
    arrays, score_mod, block_mask, _ = residuals
    attend = partial(_define, kernel, score_mod, block_mask)
    return jax.jvp(attend, (arrays, floating_captures(score_mod)), tangents)[1]


def _cotangents(kernel: Kernel, residuals: Any, cotangents: Any) -> Any:
    """Gradients, in the dtypes of what they belong to and shared where that is."""
    arrays, score_mod, *_ = residuals
    gradients = _backward(kernel, *residuals, cotangents)
    return _as_primals(gradients, (arrays, floating_captures(score_mod)))


def _as_primals(gradients: Any, primals: Any) -> Any:
    return jax.tree.map(lambda d, x: sum_like(d, x).astype(x.dtype), gradients, primals)


def _define(
    kernel: Kernel, score_mod: Any, block_mask: Any, arrays: Any, floating: Any
) -> tuple[Array, Array]:
    mod = with_floating_captures(score_mod, floating)
    return kernel.definition(arrays, mod, block_mask)[:2]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(kernel: Kernel, *residuals: Any) -> Any:
    arrays, score_mod, *rest = residuals
    return kernel.backward(arrays, widened(score_mod), *rest)


@_backward.defjvp
def _backward_jvp(kernel: Kernel, primals: Any, tangents: Any) -> Any:
    """The results depend on the arrays, whose tangents say it all."""
    arrays, score_mod, block_mask, _, cotangents = primals
    axes = varying_axes(primals)
    d_arrays, d_score_mod, _, _, d_cotangents = tangents
    gradients = _backward(kernel, *primals)

    def defined(arrays: Any, floating: Any, cotangents: Any) -> Any:
        attend = partial(_define, kernel, score_mod, block_mask)
        # As the kernel's: gradients of each device, before they are summed.
        d = jax.vjp(attend, *vary((arrays, floating), axes))[1](cotangents)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), d, gradients)

    _, d_gradients = jax.jvp(
        defined,
        (arrays, floating_captures(score_mod), cotangents),
        (d_arrays, _floating_tangents(score_mod, d_score_mod), d_cotangents),
    )
    return gradients, d_gradients


# --- what score_mod captured ----------------------------------------------------------


def floating_captures(score_mod: Any) -> tuple[Array, ...]:
    """The captured arrays that have gradients."""
    captured = () if score_mod is None else score_mod.captured
    return tuple(x for x in captured if _is_floating(x))


def widened(score_mod: Any) -> Any:
    """The same mod with captured arrays of at least float32: so are gradients summed.

    Otherwise the transpose of an index would add up, say, bfloat16 numbers.
    """
    floating = floating_captures(score_mod)
    wide = [x.astype(jnp.float32) if x.dtype.itemsize < 4 else x for x in floating]
    return with_floating_captures(score_mod, wide)


def with_floating_captures(score_mod: Any, floating: Sequence[Array]) -> Any:
    """The same mod with other contents of these arrays."""
    if score_mod is None:
        return None
    rest = iter(floating)
    captured = tuple(next(rest) if _is_floating(x) else x for x in score_mod.captured)
    return replace(score_mod, captured=captured)


def _floating_tangents(score_mod: Any, tangent: Any) -> tuple[Array, ...]:
    if score_mod is None:
        return ()
    pairs = zip(score_mod.captured, tangent.captured, strict=True)
    return tuple(t for x, t in pairs if _is_floating(x))


def _is_floating(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
