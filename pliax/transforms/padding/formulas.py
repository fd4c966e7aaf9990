"""Equations replaced by what computes them, and run by the rules of its parts.

The formula is traced once more, with the symbolic sizes of the equation. The guards of
the program are closed by then: no question about sizes is decided by this call's.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pliax.core.dims import Size
from pliax.core.guards import UnknownSizeError
from pliax.core.provenance import equation_place

from .interpreter import run
from .layouts import Bucket, Padded
from .rules import PaddingRefused, refuse, sizes_of


def by_formula(
    bucket: Bucket, eqn: Any, formula: Callable[..., Any], *operands: Padded
) -> Sequence[Padded]:
    """The results of a function of the equation's operands.

    Raises:
        PaddingRefused: at the equation, where a part of the formula is refused.
    """
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    sizes = [n for x in (*eqn.invars, *eqn.outvars) for n in sizes_of(x)]
    try:
        with eqn.ctx.manager, _undecided(sizes):
            program = jax.make_jaxpr(formula)(*avals)
    except UnknownSizeError as error:
        raise refuse(eqn, "how it is computed depends on the sizes") from error
    try:
        return run(bucket, program.jaxpr, program.consts, operands)
    except PaddingRefused as error:  # no line of the formula is the user's
        place = equation_place(eqn)
        raise PaddingRefused(error.primitive, error.reason, place) from error


@contextlib.contextmanager
def _undecided(sizes: Sequence[Any]) -> Iterator[None]:
    """While nobody knows the value of a size, nor whether two are equal."""
    size = next((n for n in sizes if isinstance(n, Size)), None)
    if size is None:
        yield
        return
    assumptions = size.assumptions
    symbols, unify = assumptions.symbols, assumptions.unify
    unknown = {n: dataclasses.replace(s, hint=None) for n, s in symbols.items()}
    assumptions.symbols, assumptions.unify = unknown, False
    try:
        yield
    finally:
        assumptions.symbols, assumptions.unify = symbols, unify
