"""Whether a program works at other sizes than those of a call, equal by chance there.

JAX may ask whether two sizes of a call are equal, or one is 1, where nothing depends on
it. A program that does depend on it is an error at sizes that are all different.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.core import ShapedArray

from pliax.core.conditions import names_of
from pliax.core.dims import LARGEST, Size
from pliax.core.guards import Assumptions
from pliax.core.marks import holds
from pliax.core.size_expressions import evaluate

from ._families import is_integer
from ._leaves import on_leaves


# The next multiple of a size is hardly further away; a neighbour of 1 is special too.
_STEPS = (*range(3, 256), 1, 2)


def error_at(
    sizes: Mapping[str, int],
    f: Callable[..., Any],
    make_args: Callable[[Assumptions], tuple[tuple, dict]],
    assumptions: Assumptions,
) -> Exception | None:
    """What JAX raises where the named sizes of a program have these values."""
    leaves, tree = jax.tree.flatten(args_at(sizes, make_args, assumptions))
    places = [i for i, x in enumerate(leaves) if not is_integer(x)]
    flat = on_leaves(f, leaves, tree, places)
    try:
        jax.eval_shape(flat, *(leaves[i] for i in places))
    except Exception as error:  # whatever a user's function raises
        return error
    return None


def args_at(
    sizes: Mapping[str, int],
    make_args: Callable[[Assumptions], tuple[tuple, dict]],
    assumptions: Assumptions,
) -> tuple[tuple, dict]:
    """The abstract arguments of a program whose named sizes have these values."""

    def one(x: Any) -> Any:
        if isinstance(x, ShapedArray | jax.ShapeDtypeStruct):
            return x.update(shape=tuple(evaluate(n, sizes) for n in x.shape))
        return evaluate(x, sizes) if isinstance(x, Size) else x

    return jax.tree.map(one, make_args(assumptions))


def other_sizes(assumptions: Assumptions) -> dict[str, int] | None:
    """Other sizes than those of a call, all different, that the conditions allow.

    Each is further away by another number, where that can be: else b would still be
    a - 1 where it is by chance.
    """
    hints = assumptions.known.hints
    found = dict(hints)
    facts = (c for c in assumptions.known.facts if names_of(c) <= hints.keys())
    known = [*assumptions.known.constraints, *map(str, facts)]
    for name in sorted(hints):
        symbol = assumptions.known.symbols[name]
        taken = {found[n] - hints[n] for n in hints if n < name}
        steps = sorted(_STEPS, key=taken.__contains__)
        choices = ({**found, name: hints[name] + step} for step in steps)
        allowed = (
            sizes
            for sizes in choices
            if sizes[name] <= (symbol.high or LARGEST)
            and list(sizes.values()).count(sizes[name]) == 1
            and all(holds(c, sizes) for c in known)
        )
        found = next(allowed, None)
        if found is None:
            return None
    return found
