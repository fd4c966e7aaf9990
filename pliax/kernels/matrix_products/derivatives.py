"""Derivatives of alpha A B + beta C + gamma I: more products, by the plain formula."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from pliax.core.manual_axes import vary, varying_axes
from pliax.kernels._backends import Backend

from . import xla
from .backends import Kind


@dataclass(frozen=True)
class Static:
    """What is no array: who computes what, and how."""

    backend: Backend
    kind: Kind
    precision: Any
    options: tuple[tuple[str, int], ...]

    def __call__(self, A: Any, B: Any, C: Any, factors: Any) -> Array:
        """The sum, of B or, of a Gram matrix, its transpose."""
        options: dict[str, Any] = dict(self.options)
        options |= {"kind": self.kind, "precision": self.precision}
        return self.backend.run(A, B, C, factors, **options)

    def product(self, A: Array, B: Array) -> Array:
        """Rounded, as a tangent is."""
        return _wide(xla.product(A, B, A.dtype, precision=self.precision))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gram(static: Static, X: Any, C: Any, factors: Any) -> Any:
    return static(X, X, C, factors)


@partial(_gram.defjvp, symbolic_zeros=True)
def _gram_jvp(static: Static, primals: Any, tangents: Any) -> Any:
    X, dX = primals[0], tangents[0]
    tangent = None
    if _moves(dX):
        # Reverse mode needs one product, too.
        half = static.product(*static.kind.factors(dX, X))
        tangent = half + half.mT
    out = _gram(static, *primals)
    rest = static.kind.factors(X, X), primals[1:], tangents[1:]
    return out, _tangent(out, tangent, static, *rest)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _added(static: Static, A: Any, B: Any, C: Any, factors: Any) -> Any:
    return static(A, B, C, factors)


@partial(_added.defjvp, symbolic_zeros=True)
def _added_jvp(static: Static, primals: Any, tangents: Any) -> Any:
    (A, B), (dA, dB) = primals[:2], tangents[:2]
    parts = [static.product(dA, B)] if _moves(dA) else []
    parts += [static.product(A, dB)] if _moves(dB) else []
    out = _added(static, *primals)
    rest = (A, B), primals[2:], tangents[2:]
    return out, _tangent(out, sum(parts) if parts else None, static, *rest)


def _tangent(
    out: Array, d_AB: Any, static: Static, operands: Any, rest: Any, d_rest: Any
) -> Array:
    """What product, addend and factors add to it, rounded once, as the result lies."""
    (C, (alpha, beta, _)), (dC, (d_alpha, d_beta, d_gamma)) = rest, d_rest
    A, B = operands
    total = lax.full_like(_wide(out), 0.0)
    total = vary(total, varying_axes(out))
    terms = (
        (alpha, lambda: d_AB, d_AB is not None),
        (d_alpha, lambda: static.product(A, B), _moves(d_alpha)),
        (beta, lambda: _wide(dC), _moves(dC)),
        (d_beta, lambda: _wide(C), C is not None and _moves(d_beta)),
        (d_gamma, lambda: xla.identity(total), _moves(d_gamma)),
    )
    for factor, matrix, is_there in terms:
        if is_there:
            total = total + factor[..., None, None] * matrix()
    return total.astype(out.dtype)


def _moves(tangent: Any) -> bool:
    return tangent is not None and not isinstance(tangent, SymbolicZero)


def _wide(x: Array) -> Array:
    return x.astype(xla.sums_dtype(x.dtype))


gram = jax.jit(_gram, static_argnums=0)
added = jax.jit(_added, static_argnums=0)
