"""Calls that no executable of ours serves, but `jax.jit` or Python.

That is inside another transformation (jit, grad, vmap), under `disable_jit`, and of
what the long way cannot compile stage by stage.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from pliax.core._jax import is_tracing
from pliax.core.guards import Assumptions
from pliax.core.unbacked import NeedsSizesError, born_in, tracing_context

from ._catalog import Catalog
from ._families import is_number
from ._inside import run_inside
from ._kinds import checked_leaves, unmarked
from ._sizes import group_of


def call_plainly(
    catalog: Catalog, plain: Callable[..., Any], args: tuple, kwargs: dict
) -> Any:
    """The results of such a call, which is counted.

    Args:
        catalog: the traces of the function.
        plain: the function as `jax.jit` has it.
        args: as the user gave them, perhaps marked.
        kwargs: likewise.
    """
    args, kwargs = unmarked(args, kwargs)
    leaves = checked_leaves(catalog.parameters, args, kwargs)
    group = group_of(catalog.declarations.check(leaves))
    with catalog.ledger.calling(catalog.ledger.uncached(group)):
        try:
            return _call_in_trace(catalog, plain, args, kwargs)
        except NeedsSizesError:
            if tracing_context.value is not None:  # an outer px.compile's affair
                raise
            owner = catalog.parameters.owner
            return run_inside(catalog.function, args, kwargs, owner)
        except Exception:  # JAX's tracers of integers are no indices, for example
            if not (is_tracing() and any(is_number(x.value) for x in leaves)):
                raise
        return catalog.function(*args, **kwargs)


def _call_in_trace(
    catalog: Catalog, plain: Callable[..., Any], args: tuple, kwargs: dict
) -> Any:
    """As JAX calls it; anew where results have sizes born in it, which differ."""
    outer = tracing_context.value
    if catalog.bears_sizes and isinstance(outer, Assumptions):
        f = functools.partial(catalog.function)  # which no earlier trace is found for
        plain = jax.jit(f, donate_argnums=catalog.options.donated)
    result = plain(*args, **kwargs)
    if isinstance(outer, Assumptions):
        born = born_in(result, outer) - born_in((args, kwargs), outer)
        catalog.bears_sizes |= bool(born)
    return result
