"""flex_attention against its formula, written without any of our code.

The mods here treat every argument differently: exchanged indices, a forgotten scale or
a batch index of the wrong sequence change the results.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_error_rule, in_float64, normal

import pliax as px


@dataclass(frozen=True)
class Formula:
    """One call: shapes, mods as factories of the floats they capture, and options."""

    name: str
    B: int = 2
    T: int = 19
    S: int = 26
    H: int = 4
    K: int = 2
    scale: float | None = None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    floats: tuple[tuple[int, ...], ...] = ()
    mask_batch: int | None = None
    mask_heads: int | None = None
    block_size: Any = (7, 11)
    separate: bool = True

    def __repr__(self) -> str:
        return self.name


def relative(floats):
    """Reads the difference of both positions with its sign."""
    (table,) = floats
    return lambda s, b, h, i, j: s + table[i - 2 * j + 60]


def of_batch_and_head(floats):
    (bias,) = floats
    return lambda s, b, h, i, j: s * (1 + b + 2 * h).astype(s.dtype) / 4 + bias[b, h]


def of_query_alone(floats):
    (slopes, shift) = floats

    def score_mod(s, b, h, i, j):
        return s * slopes[h] + shift[b, i] * (j % 5).astype(s.dtype)

    return score_mod


def causal_with_start(b, h, i, j):
    return (i >= j) | (j < 2 + b)


def per_batch_and_head(b, h, i, j):
    return (abs(i - j + 3 * b) <= 4 + 2 * h) | (j == 0)


FORMULAS = [
    Formula("dense", scale=0.3, score_mod=relative, floats=((90,),)),
    Formula("zero_scale", scale=0.0, score_mod=of_batch_and_head, floats=((2, 4),)),
    Formula(
        "batch_mask", T=26, S=19, scale=-1.0, score_mod=of_query_alone,
        floats=((4,), (2, 26)), mask_mod=causal_with_start, mask_batch=2,
    ),
    Formula(
        "both", score_mod=of_batch_and_head, floats=((2, 4),), scale=0.3,
        mask_mod=per_batch_and_head, mask_batch=2, mask_heads=4, separate=False,
    ),
    Formula(
        "large_blocks", K=1, mask_mod=lambda b, h, i, j: (i + h) % 3 >= j % 3,
        mask_heads=4, block_size=(32, 48), score_mod=of_query_alone,
        floats=((4,), (2, 19)),
    ),
]  # fmt: skip


def formula(case, arrays, floats):
    """softmax(mod(scale q k)) v, with every index as a broadcast grid."""
    q, k, v = arrays
    k, v = (jnp.repeat(x, case.H // case.K, axis=2) for x in (k, v))
    scale = case.scale if case.scale is not None else q.shape[-1] ** -0.5
    s = jnp.einsum("bthd,bshd->bhts", q, k) * scale
    grids = [
        jnp.arange(n, dtype=jnp.int32).reshape(
            [-1 if a == axis else 1 for a in range(4)]
        )
        for axis, n in enumerate(s.shape)
    ]
    if case.score_mod is not None:
        s = case.score_mod(floats)(s, *grids)
    if case.mask_mod is not None:
        s = jnp.where(case.mask_mod(*grids), s, -jnp.inf)
    lse = jax.scipy.special.logsumexp(s, axis=-1)
    out = jnp.einsum("bhts,bshd->bthd", jnp.exp(s - lse[..., None]), v)
    return out, jnp.moveaxis(lse, 1, 2), jnp.moveaxis(jnp.max(s, -1), 1, 2)


def ours(case, arrays, floats, *, implementation):
    mask = None
    if case.mask_mod is not None:
        mask = px.create_block_mask(
            case.mask_mod, case.mask_batch, case.mask_heads, case.T, case.S,
            block_size=case.block_size, separate_full_blocks=case.separate,
        )  # fmt: skip
    options = {"block_q": case.block_size[0], "block_kv": case.block_size[1]}
    out, aux = px.flex_attention(
        *arrays,
        score_mod=case.score_mod and case.score_mod(floats),
        block_mask=mask,
        scale=case.scale,
        enable_gqa=True,
        return_aux=px.AuxRequest(lse=True, max_scores=True),
        implementation=implementation,
        kernel_options=options if implementation == "xla" and mask is None else None,
    )
    return out, aux.lse, aux.max_scores


def with_gradients(function):
    """Its results, and the gradients of a weighted sum of output and log-sum-exp."""

    def loss(arrays, floats):
        out, lse, maximum = function(arrays, floats)
        weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        return jnp.sum(out * weights) + jnp.sum(jnp.sin(lse)), (out, lse, maximum)

    gradients = jax.grad(loss, argnums=(0, 1), has_aux=True)
    return jax.jit(gradients)


def operands(case):
    shapes = (case.T, case.H, 8), (case.S, case.K, 8), (case.S, case.K, 6)
    arrays = tuple(normal(n, (case.B, *shape)) for n, shape in enumerate(shapes))
    return arrays, tuple(normal(9 + n, shape) for n, shape in enumerate(case.floats))


@pytest.mark.slow
@pytest.mark.parametrize("case", FORMULAS, ids=repr)
def test_values_and_gradients_are_those_of_the_formula(case):
    run = with_gradients(lambda *args: formula(case, *args))
    plain, golden = run(*operands(case)), in_float64(run, *operands(case))
    for name in ("reference", "xla"):
        run = with_gradients(
            lambda *args, name=name: ours(case, *args, implementation=name)
        )
        assert_error_rule(run(*operands(case)), plain, golden)
