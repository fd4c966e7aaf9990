"""Momentum, and a stack of what it orthogonalises, in one pass over memory.

    [gradients], [momenta]  ->  [next momenta], stack, squares

A kernel of Hopper GPUs does it (`pliax.kernels.look_ahead`). Where it serves leaves,
they stay `Fresh` until they are stacked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pliax.kernels import look_ahead

from .matrix_axes import Matrices
from .momentum import Momentum
from .newton_schulz import NewtonSchulz
from .stacks import Sizes, cut, devices, grouped, portions


@dataclass(frozen=True)
class Fresh:
    """A stack, or a leaf that is one, which is still to be made.

    Attributes:
        gradient: float32.
        momentum: of the same shape, before it moves.
        rule: how it does.
    """

    gradient: Array
    momentum: Array
    rule: Momentum

    @property
    def shape(self) -> Any:
        """Of what is made."""
        return self.gradient.shape

    def __len__(self) -> int:
        return len(self.gradient)

    def reshaped(self, shape: Sizes) -> "Fresh":
        """As a stack of matrices."""
        G, M = self.gradient.reshape(shape), self.momentum.reshape(shape)
        return Fresh(G, M, self.rule)


def is_served(G: Array, M: Array, recipe: Matrices, how: NewtonSchulz) -> bool:
    """Whether momentum, rounding and stacking of a leaf are one pass."""
    if not recipe.is_stack or how.dtype != jnp.bfloat16:
        return False
    return look_ahead.refused(G, M, recipe.stack_shape[1:]) is None


def stacked(
    stacks: Sequence[Fresh], after: Any = None
) -> tuple[list[Array], Float[Array, "L M N"], Float[Array, "L"]]:
    """Their next momenta, one stack of all, rounded, and its sums of squares.

    Args:
        stacks: of matrices of the same sides, by the same rule.
        after: what is made before, whose memory this may take.
    """
    first = stacks[0]
    factors = jnp.stack(first.rule.factors(jnp.float32))
    factors, _ = lax.optimization_barrier((factors, after))
    return look_ahead.stacked(
        look_ahead.Static(first.shape[1:], bool(first.rule.nesterov)),
        factors,
        [x.gradient for x in stacks],
        [x.momentum for x in stacks],
    )


def orthogonalised(
    leaves: Sequence[Fresh], recipes: Sequence[Matrices], how: NewtonSchulz
) -> tuple[list[Array], list[Array]]:
    """Each leaf on its device orthogonalised, in the working dtype; the momenta."""
    shapes = [recipe.stack_shape for recipe in recipes]
    results: list[Any] = [None] * len(leaves)
    buffers = list(results)
    together = [
        (shape[1:], devices(leaf.gradient), devices(leaf.momentum))
        for shape, leaf in zip(shapes, leaves, strict=True)
    ]
    for numbers in grouped(together):
        done = None
        for portion in portions(numbers, [shapes[i] for i in numbers]):
            taken = [leaves[i].reshaped(shapes[i]) for i in portion]
            kept, X, sums = stacked(taken, after=done)
            done = how.of_squares(X, sums)
            parts = cut(done, [shapes[i][0] for i in portion])
            for i, part, buffer in zip(portion, parts, kept, strict=True):
                results[i] = recipes[i].put_together([part])
                buffers[i] = buffer.reshape(leaves[i].shape)
    return results, buffers
