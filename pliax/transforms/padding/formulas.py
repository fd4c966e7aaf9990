"""Equations replaced by what computes them, and run by the rules of its parts.

The formula is traced once more, with the symbolic sizes of the equation. Its
assumptions are closed by then: no question is decided by the sizes of one call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pliax.core.other_traces import UnknownSizeError
from pliax.core.provenance import equation_place

from .interpreter import run
from .layouts import Bucket, Padded
from .rules import PaddingRefused, refuse


def by_formula(
    bucket: Bucket, eqn: Any, formula: Callable[..., Any], *operands: Padded
) -> Sequence[Padded]:
    """The results of a function of the equation's operands.

    Raises:
        PaddingRefused: at the equation, where a part of the formula is refused.
    """
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    try:
        with eqn.ctx.manager:
            program = jax.make_jaxpr(formula)(*avals)
    except UnknownSizeError as error:
        raise refuse(eqn, "how it is computed depends on the sizes") from error
    try:
        return run(bucket, program.jaxpr, program.consts, operands)
    except PaddingRefused as error:  # no line of the formula is the user's
        place = equation_place(eqn)
        raise PaddingRefused(error.primitive, error.reason, place) from error
