"""Sizes born from data: a trace knows their bounds, only the device their values.

    new_size : bound               ->  Size, named u0, u1, …
    count    : int32 scalar, Size  ->  () : the size has this value at run time

`count` is an equation of the trace, which the padding transform runs: it gives the size
its value in the bucket. Nothing reads a result of it, but shapes depend on it: no pass
of JAX's removes it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ._jax import primitive_that_stays
from .conditions import Condition, state_p
from .dims import LARGEST, Size
from .guards import Assumptions
from .provenance import NOWHERE
from .size_expressions import bounds, evaluate, variables
from .symbols import Symbol


# The assumptions of the symbolic trace that runs, or one of the states of `ragged.py`.
# It is part of the keys of JAX's caches: what an inner jit traced in one state is never
# taken for what it means in another.
tracing_context = jax.make_user_context(default_value=None)


class NeedsSizesError(Exception):
    """A size is born from data in a trace that has no symbolic sizes."""


def _refuse_vmap(size: Any, **_: Any) -> None:
    symbol = size.assumptions.known.symbols[str(size)]
    raise ValueError(
        f"{symbol.origin}: under jax.vmap every row has a size of its own, but an "
        "array has one shape.\nCall it on one row at a time with jax.lax.map, on the "
        "whole batch at once, or outside px.compile, where it returns a px.ragged."
        "Ragged for each row."
    )


count_p = primitive_that_stays("size_from_data", _refuse_vmap)
count_p.def_abstract_eval(lambda value, **_: [])


def new_size(assumptions: Assumptions, bound: Any, origin: str) -> Size:
    """A named size from 0 to a bound, which is a size or an integer."""
    taken, number = assumptions.known.symbols, 0
    while f"u{number}" in taken:
        number += 1
    name = f"u{number}"
    high = bounds(bound, assumptions.known.ranges)[1]
    assumptions.known.symbols[name] = Symbol(name, None, origin, low=0)
    assumptions.known.ranges[name] = 0, min(high, LARGEST)
    assumptions.known.unbacked[name] = bound
    (size,) = assumptions.known.parse(name)
    assumptions.learn(Condition("<=", (size, bound), assumptions), NOWHERE)
    return size


def count(
    value: Any, size: Size, excess: str = "", specialize_on: tuple[Any, ...] = ()
) -> None:
    """Gives a new size its value, an int32 scalar.

    Args:
        value: the number of valid elements.
        size: the size, as `new_size` made it.
        excess: the error where the value is not from 0 to its bound; nothing is
            checked where that cannot be.
        specialize_on: conditions on the value; what follows is compiled once more for
            each, with arrays as long as the largest value that meets it.
    """
    bound = size.assumptions.known.unbacked[str(size)]
    count_p.bind(
        value, size=size, bound=bound, excess=excess, specialize_on=specialize_on
    )


def births(eqn: Any) -> frozenset[str]:
    """The sizes that get their values in the programs which an equation holds."""
    inner = (e for program in _programs(eqn) for e in every_equation(program))
    return frozenset(str(e.params["size"]) for e in inner if e.primitive is count_p)


def counted(eqns: Any) -> frozenset[str]:
    """The sizes that get their values in some equations or in programs they hold."""
    own = (str(eqn.params["size"]) for eqn in eqns if eqn.primitive is count_p)
    return frozenset(own).union(*map(births, eqns))


def numbers_of_cases(jaxpr: Any) -> dict[str, int]:
    """The sizes born in a program that have cases of their own, and how many."""
    counts = [e.params for e in every_equation(jaxpr) if e.primitive is count_p]
    cases = {str(p["size"]): len(p["specialize_on"]) for p in counts}
    return {name: number for name, number in cases.items() if number}


def asserts(jaxpr: Any) -> bool:
    """Whether a program, or one that it holds, asserts something at run time."""
    return any(
        eqn.primitive is state_p or (eqn.primitive is count_p and eqn.params["excess"])
        for eqn in every_equation(jaxpr)
    )


def every_equation(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program and of those it holds."""
    for eqn in jaxpr.eqns:
        yield eqn
        for program in _programs(eqn):
            yield from every_equation(program)


def _programs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple) else (value,):
            program = getattr(inner, "jaxpr", inner)
            if hasattr(program, "eqns"):
                yield program


def born_in(tree: Any, assumptions: Assumptions) -> frozenset[str]:
    """The sizes born from data in the shapes of arrays."""
    shapes = (getattr(x, "shape", ()) for x in jax.tree.leaves(tree))
    names = frozenset().union(*(variables(n) for shape in shapes for n in shape))
    return names.intersection(assumptions.known.unbacked)


# --- lengths --------------------------------------------------------------------------


def with_unbacked(
    assumptions: Assumptions, ranges: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """The ranges of all named sizes, from those of the sizes that calls bring.

    Where a range of a size born from data is given, it is kept or narrowed.
    """
    found = dict(ranges)
    for name, bound in assumptions.known.unbacked.items():
        low, high = found.get(name, assumptions.known.ranges[name])
        high = max(min(high, bounds(bound, found)[1]), 0)
        found[name] = min(low, high), high  # where less is asserted, that will fail
    return found


def most(size: Any, assumptions: Assumptions, sizes: Mapping[str, int]) -> int:
    """The largest value of a size in a call; its value where that is known."""
    if variables(size) <= sizes.keys():
        return max(evaluate(size, sizes), 0)
    ranges = with_unbacked(assumptions, {n: (v, v) for n, v in sizes.items()})
    return max(int(bounds(size, ranges)[1]), 0)


def raise_failed(texts: Sequence[str], held: Any) -> None:
    """Raises the error of the first check that failed; waits for the device.

    Args:
        texts: the error of each.
        held: which of them held, as an array.
    """
    for text, holds in zip(texts, np.asarray(held), strict=True):
        if not holds:
            raise ValueError(text)
