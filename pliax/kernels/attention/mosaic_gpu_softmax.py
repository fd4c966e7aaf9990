"""The softmax of a row of tiles in the Mosaic GPU kernels, one visit after another.

    scores, sums  ->  weights, sums

Weights are exp(s - c), and sums of them, and of their products with values, go with
the same c of each row. Where c is the maximum m, one that grows to m' makes sums
exp(m - m') times as large, in every visit.

A kernel may put off what can wait. Then c stays until a maximum exceeds it by `SLACK`
in the exponent of two, which is rare after the first visits of a row: weights are at
most 2^SLACK, and as exact as below 1, since their point floats; sums with values become
infinite so much earlier, where values are beyond 1e34. And threads that hold a row add
their sums of weights in the end.

References:
    Dao, "FlashAttention-2", 2023, section 3.1.
    Zadouri et al., "FlashAttention-4", 2026 (rescaling only where it is needed).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pliax.core._jax import any_exceeds

from .mosaic_gpu_tiles import ROW, zeros


SLACK = 8.0  # FlashAttention-4's; float16 has room for 2^15
_LOWEST = float(jnp.finfo(jnp.float32).min)  # which a score may be, as a mask of users'
_SIDE = 8  # columns that a row of threads holds side by side, added in the end


class Sums(NamedTuple):
    """What a warpgroup has found for its rows.

    Attributes:
        acc: Sums of weights times values.
        top: Maximum of scores.
        level: What weights are relative to, c; None if it is the maximum.
        total: Sums of weights; if that is put off, of every `_SIDE`-th column.
    """

    acc: Any
    top: Any
    level: Any
    total: Any


@dataclass(frozen=True)
class Softmax:
    """The softmax of tiles with as many rows.

    Attributes:
        rows: How many.
        factor: Of scores in the exponent of two.
        is_linear: Whether the factor may be applied before the subtraction: else a row
            may be at -1e9, where float32 has no room for a product.
        puts_off: Whether it puts off what can wait.
        interpret: Whether the kernel runs in JAX's interpreter.
    """

    rows: int
    factor: float
    is_linear: bool
    puts_off: bool
    interpret: bool

    def start(self, channels: int) -> Sums:
        """Nothing found yet: the level is the least that a score can be.

        If the factor comes first that is the least whose product is a number.
        """
        acc, top = zeros(self.rows, channels), zeros(self.rows, value=-jnp.inf)
        if not self.puts_off:
            return Sums(acc, top, None, zeros(self.rows))
        lowest = _LOWEST / max(1.0, self.factor) if self.is_linear else _LOWEST
        level = zeros(self.rows, value=lowest)
        return Sums(acc, top, level, zeros(self.rows, _SIDE))

    def __call__(self, scores: Any, sums: Sums) -> tuple[Any, Sums]:
        """The weights of scores, and the sums without the products with values."""
        top = jnp.maximum(sums.top, scores.max(axis=1))
        if self.puts_off:
            sums = self._grown(sums._replace(top=top))
            weights = self._weights(scores, sums.level)
            return weights, sums._replace(total=sums.total + _side_by_side(weights))
        level = _finite(top)
        weights = self._weights(scores, level)
        sums = _times(sums, jnp.exp2((sums.top - level) * self.factor))
        return weights, sums._replace(top=top, total=sums.total + weights.sum(axis=1))

    def end(self, sums: Sums) -> tuple[Any, Any, Any]:
        """Sums of weights times values, maximum and sum of weights, relative to it."""
        if not self.puts_off:
            return sums.acc, sums.top, sums.total
        grown = (sums.level - _finite(sums.top)) * self.factor
        acc, top, _, total = _times(sums, jnp.exp2(jnp.minimum(grown, 0.0)))
        return acc, top, total.sum(axis=1)

    def _grown(self, sums: Sums) -> Sums:
        """Relative to the maximum, if that of some row is too far from what it was."""

        def grow(sums: Sums) -> Sums:
            level = jnp.maximum(sums.level, sums.top)
            sums = _times(sums, jnp.exp2((sums.level - level) * self.factor))
            return sums._replace(level=level)

        return lax.cond(self._is_far(sums.top - sums.level), grow, lambda x: x, sums)

    def _is_far(self, distance: Any) -> Any:
        bound = SLACK / self.factor
        if self.interpret:
            return jnp.any(distance > bound)
        return any_exceeds(distance, bound, ROW)

    def _weights(self, scores: Any, level: Any) -> Any:
        if self.is_linear:
            levels = lax.broadcast_in_dim(level * self.factor, scores.shape, [0])
            return jnp.exp2(scores * self.factor - levels)
        levels = lax.broadcast_in_dim(level, scores.shape, [0])
        return jnp.exp2((scores - levels) * self.factor)


def _finite(top: Any) -> Any:
    """0 for a row that has seen nothing."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def _times(sums: Sums, change: Any) -> Sums:
    acc, total = (
        x * (change if x.ndim == 1 else lax.broadcast_in_dim(change, x.shape, [0]))
        for x in (sums.acc, sums.total)
    )
    return sums._replace(acc=acc, total=total)


def _side_by_side(weights: Any) -> Any:
    """Sums of every `_SIDE`-th column, which are in one thread."""
    parts = [weights[:, n : n + _SIDE] for n in range(0, weights.shape[1], _SIDE)]
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [x + y for x, y in pairs] + parts[len(parts) // 2 * 2 :]
    return parts[0]
