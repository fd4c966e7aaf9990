"""Whether a program that JAX asked about this call's sizes works at others as well."""

from collections.abc import Callable
from typing import Any

import jax

from pliax.core.dims import LARGEST, Size, evaluate
from pliax.core.guards import Assumptions

from .specialization import holds


_MOST_TRIED = 256  # the next multiple of a size is hardly further away


def works_elsewhere(
    f: Callable[..., Any],
    make_args: Callable[[Assumptions], tuple[tuple, dict]],
    assumptions: Assumptions,
) -> bool:
    """Whether JAX traces a program at other sizes, though it asked if one is 1."""
    sizes = _others(assumptions)
    if sizes is None:
        return False
    leaves, tree = jax.tree.flatten(make_args(assumptions))
    known = [evaluate(x, sizes) if isinstance(x, Size) else x for x in leaves]
    places = [i for i, x in enumerate(known) if not isinstance(x, int)]

    def flat(*arrays: Any) -> Any:
        values = list(known)
        for i, array in zip(places, arrays, strict=True):
            values[i] = array
        args, kwargs = jax.tree.unflatten(tree, values)
        return f(*args, **kwargs)

    def plain(x: Any) -> Any:
        shape = tuple(evaluate(n, sizes) for n in getattr(x, "shape", ()))
        is_array = isinstance(x, jax.ShapeDtypeStruct)
        return jax.ShapeDtypeStruct(shape, x.dtype) if is_array else x

    try:
        jax.eval_shape(flat, *(plain(known[i]) for i in places))
    except Exception:  # whatever a user's function raises
        return False
    return True


def _others(assumptions: Assumptions) -> dict[str, int] | None:
    """Other sizes than those of a call, all different, that the conditions allow."""
    found = dict(assumptions.hints)
    for name in sorted(found):
        symbol = assumptions.symbols[name]
        choices = (
            {**found, name: found[name] + step} for step in range(1, _MOST_TRIED)
        )
        allowed = (
            sizes
            for sizes in choices
            if sizes[name] <= (symbol.high or LARGEST)
            and list(sizes.values()).count(sizes[name]) == 1
            and all(holds(c, sizes) for c in assumptions.constraints)
        )
        found = next(allowed, None)
        if found is None:
            return None
    return found
