"""The softmax of a row of tiles in the Mosaic GPU kernels, one visit after another.

    scores, sums  ->  weights, sums

Weights are exp(s - c), and sums of them, and of their products with values, go with
the same c of each row. Where c is the maximum m, one that grows to m' makes sums
exp(m - m') times as large, in every visit.

A kernel may put off what can wait. Then c stays until a maximum exceeds it by `SLACK`
in the exponent of two, which is rare after the first visits of a row: weights are at
most 2^SLACK, and as exact as below 1, since their point floats; sums with values become
infinite so much earlier, where values are beyond 1e34. And threads that hold a row
compare their maxima, and add their sums of weights, in the end.

References:
    Dao, "FlashAttention-2", 2023, section 3.1.
    Zadouri et al., "FlashAttention-4", 2026 (rescaling only where it is needed).
"""

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pliax.core._jax import any_exceeds, settle

from .mosaic_gpu_tiles import TILE, zeros
from .row_statistics import LOG2E


SLACK = 8.0  # FlashAttention-4's; float16 has room for 2^15
_LOWEST = float(jnp.finfo(jnp.float32).min)  # which a score may be, as a mask of users'
_SIDE = 8  # columns that the threads of a row hold side by side, joined in the end
_MARGIN = 2.0**-21  # a few roundings


class Sums(NamedTuple):
    """What a warpgroup has found for its rows.

    Attributes:
        acc: Sums of weights times values.
        top: Maximum of scores; if that is put off, of every `_SIDE`-th column.
        level: What weights are relative to, c; None if it is the maximum. If the factor
            comes first it is in c.
        limit: What a score exceeds where c must grow; None likewise.
        total: Sums of weights, of the same columns.
    """

    acc: Any
    top: Any
    level: Any
    limit: Any
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
        settles: Whether `settle` asks for weights, in kernels that put off.
        interpret: Whether the kernel runs in JAX's interpreter.
    """

    rows: int
    factor: float
    is_linear: bool
    puts_off: bool
    settles: bool
    interpret: bool

    def start(self, channels: int) -> Sums:
        """Nothing found yet: the level is of the least score, which exceeds the limit.

        If the factor comes first it is of the least whose product is a number.
        """
        acc, top = zeros(self.rows, channels), zeros(self.rows, value=-jnp.inf)
        if not self.puts_off:
            return Sums(acc, top, None, None, zeros(self.rows))
        lowest = _LOWEST * min(1.0, self.factor) if self.is_linear else _LOWEST
        level, limit = zeros(self.rows, value=lowest), top
        top = zeros(self.rows, _SIDE, value=-jnp.inf)
        return Sums(acc, top, level, limit, zeros(self.rows, _SIDE))

    def __call__(self, scores: Any, sums: Sums) -> tuple[Any, Sums]:
        """The weights of scores, and the sums without the products with values."""
        if self.puts_off:
            top = jnp.maximum(sums.top, _side_by_side(scores, jnp.maximum))
            sums = self._grown(sums._replace(top=top))
            weights = self._weights(scores, sums.level)
            total = sums.total + _side_by_side(weights, operator.add)
            return weights, sums._replace(total=total)
        top = jnp.maximum(sums.top, scores.max(axis=1))
        level = _finite(top)
        weights = self._weights(scores, self._level(level))
        sums = _times(sums, jnp.exp2((sums.top - level) * self.factor))
        return weights, sums._replace(top=top, total=sums.total + weights.sum(axis=1))

    def settle(self, sums: Sums) -> None:
        """The weights are known before whoever computes them waits for others.

        Left to itself ptxas makes them when the wait is over, while tensor cores idle,
        in kernels with a score_mod; in others it does not, and to ask costs more than
        it gains. 16,384 tokens of 128 channels under a causal mask on one H200: ALiBi
        takes 0.84 of the time, a soft cap 0.97, a table 1.01; without a mod 1.08. Parts
        ask where the mod is costly: 16 queries and 131,072 keys of 8 sequences under a
        soft cap take 0.95, but under ALiBi 1.03, and in pages 1.06.
        """
        if self.settles and self.puts_off and not self.interpret:
            settle(sums.total, TILE)

    def part(self, sums: Sums) -> tuple[Any, Any, Any]:
        """Of some columns: sums of weights times values, maximum, sum of weights.

        Relative to the maximum, whatever was put off.
        """
        if not self.puts_off:
            return sums.acc, sums.top, sums.total
        top, total, grown = self._caught_up(sums)
        sums = _times(sums._replace(total=total), jnp.exp2(grown))
        return sums.acc, top, sums.total

    def whole(self, sums: Sums) -> tuple[Any, Any, Any]:
        """Of all columns: mean of values, maximum, and the logarithm of the sum.

        The sum is relative to the maximum; 0 stands for its logarithm if it is empty.
        """
        top, total, grown = sums.top, sums.total, 0.0
        if self.puts_off:
            top, total, grown = self._caught_up(sums)
        is_empty = total == 0
        some = jnp.where(is_empty, 1.0, total)
        mean = sums.acc * lax.broadcast_in_dim(1 / some, sums.acc.shape, [0])
        log_sum = (jnp.log2(some) + grown) * (1 / LOG2E)
        return mean, top, jnp.where(is_empty, 0.0, log_sum)

    def _caught_up(self, sums: Sums) -> tuple[Any, Any, Any]:
        """Maximum and sum of weights, and the exponent of what sums are too large by.

        Of two, and at most 0: sums times so much are relative to the maximum.
        """
        top, total = sums.top.max(axis=1), sums.total.sum(axis=1)
        grown = (sums.level - self._level(_finite(top))) * self._unit
        # A level that never grew is far below.
        return top, total, jnp.minimum(grown, 0.0)

    def _grown(self, sums: Sums) -> Sums:
        """Relative to the maximum, if that of some row is too far from what it was."""

        def grow(sums: Sums) -> Sums:
            level = jnp.maximum(sums.level, self._level(sums.top.max(axis=1)))
            sums = _times(sums, jnp.exp2((sums.level - level) * self._unit))
            return sums._replace(level=level, limit=self._limit(level))

        return lax.cond(self._is_far(sums), grow, lambda x: x, sums)

    def _is_far(self, sums: Sums) -> Any:
        limit = lax.broadcast_in_dim(sums.limit, sums.top.shape, [0])
        if self.interpret:
            return jnp.any(sums.top > limit)
        return any_exceeds(sums.top, limit, TILE)

    def _limit(self, level: Any) -> Any:
        """Weights of scores up to it are at most 2^SLACK, however all is rounded."""
        if self.is_linear:
            limit = (level + SLACK) * (1 / self.factor)
        else:
            limit = level + SLACK / self.factor
        return limit - abs(limit) * _MARGIN

    @property
    def _unit(self) -> float:
        """Of levels, in the exponent of two."""
        return 1.0 if self.is_linear else self.factor

    def _level(self, scores: Any) -> Any:
        """What weights of such scores are relative to."""
        return scores * self.factor if self.is_linear else scores

    def _weights(self, scores: Any, level: Any) -> Any:
        levels = lax.broadcast_in_dim(level, scores.shape, [0])
        if self.is_linear:
            return jnp.exp2(scores * self.factor - levels)
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


def _side_by_side(tile: Any, join: Any) -> Any:
    """Sums or maxima of every `_SIDE`-th column, which are in one thread."""
    parts = [tile[:, n : n + _SIDE] for n in range(0, tile.shape[1], _SIDE)]
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [join(x, y) for x, y in pairs] + parts[len(parts) // 2 * 2 :]
    return parts[0]
