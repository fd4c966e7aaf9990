"""What hides scores of a tile in the Mosaic GPU kernels, asked only where it may.

    values, conditions  ->  the values that meet all, and a number instead of the others

A mask is what several conditions have in common (`normalization.conditions`). The lists
of a sparse mask tell which of them all scores of a block meet (`refinement`).
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax


class Condition(NamedTuple):
    """What a score must meet to be seen.

    Attributes:
        ask: Computes which scores of the tile meet it.
        is_met: Whether all of them do, a scalar; None if that is not known before.
    """

    ask: Callable[[], Any]
    is_met: Any = None

    @classmethod
    def of(cls, scores: Any) -> "Condition":
        """One that these bools meet."""
        return cls(lambda: scores)


def hide(values: Any, hidden: float, conditions: Sequence[Condition]) -> Any:
    """The values that meet all conditions, and a number instead of the others.

    To ask costs two instructions a score: what is known to be met is not asked.
    """
    for ask, is_met in conditions:
        where_met = partial(_where_met, ask, hidden)
        if is_met is None:
            values = where_met(values)
        else:
            values = lax.cond(is_met, lambda x: x, where_met, values)
    return values


def _where_met(ask: Callable[[], Any], hidden: float, values: Any) -> Any:
    return jnp.where(ask(), values, hidden)


def all_meet(conditions: Sequence[Condition]) -> Any:
    """Which scores meet all of some conditions."""
    return functools.reduce(jnp.logical_and, [x.ask() for x in conditions])
