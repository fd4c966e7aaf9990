"""The kinds of arguments a call has: what is marked, what is an integer, what type."""

import contextlib
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from pliax.core.conditions import Condition
from pliax.core.dims import Size
from pliax.core.guards import Assumptions
from pliax.core.marks import Marked
from pliax.core.provenance import NOWHERE
from pliax.core.unbacked import NeedsSizesError

from ._arguments import Leaf, Parameters
from ._families import Position, Reading, is_integer
from ._keys import leaf_key
from ._leaves import on_leaves


def kind(leaf: Any) -> Hashable:
    """Everything an executable depends on in an argument but its sizes."""
    if is_integer(leaf):
        return int
    aval, placement = leaf_key(leaf)
    if not hasattr(aval, "weak_type"):
        return aval, placement  # a reference, for example
    spec = aval.sharding.mesh, aval.sharding.spec  # of an Explicit mesh
    return len(aval.shape), aval.dtype, aval.weak_type, spec, placement


def unmarked(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments without px.dynamic and its like around them."""

    def bare(x: Any) -> Any:
        return x.value if _is_marked(x) else x

    return jax.tree.map(bare, (args, kwargs), is_leaf=_is_marked)


def hold_descriptions(structure: Any, leaves: Sequence[Any]) -> bool:
    """Whether containers can be built around what only describes arrays.

    JAX does so where it compiles stage by stage. A class whose constructor converts
    what it is given holds arrays alone.
    """
    try:
        found = [jax.stages.ArgInfo(jax.typeof(x), False) for x in leaves]
    except (TypeError, OverflowError):  # no arrays, which is told in other words
        return True
    try:
        jax.tree.unflatten(structure, found)
    except Exception:  # whatever a user's class raises
        return False
    return True


def marks(
    positions: Sequence[Position], args: tuple, kwargs: dict
) -> dict[Position, str]:
    """The kind of mark on each size that has one."""
    marked = jax.tree.leaves((args, kwargs), is_leaf=_is_marked)
    return {
        p: marked[p.leaf].kind
        for p in positions
        if _is_marked(marked[p.leaf]) and p.axis in marked[p.leaf].axes
    }


def marks_of(names: Sequence[str], args: tuple, kwargs: dict) -> dict[str, str]:
    """The mark of each argument that has one, in words."""
    marked = jax.tree.leaves((args, kwargs), is_leaf=_is_marked)
    pairs = zip(names, marked, strict=True)
    return {name: str(x) for name, x in pairs if _is_marked(x)}


def checked_leaves(parameters: Parameters, args: tuple, kwargs: dict) -> list[Leaf]:
    """Every argument of a call, which has no marks; what is no array is refused."""
    leaves = parameters.leaves(args, kwargs)
    for leaf in leaves:
        try:
            jax.typeof(leaf.value)
        except (TypeError, OverflowError) as error:
            text = _not_an_array(parameters, leaf, error)
            raise type(error)(text) from None
    return leaves


def _not_an_array(parameters: Parameters, leaf: Leaf, error: Exception) -> str:
    root, name = leaf.steps[0], type(leaf.value).__name__
    if isinstance(error, OverflowError):
        return f"{parameters.owner}: argument `{leaf.name}`: {error}."
    if isinstance(leaf.value, np.ndarray) and not leaf.value.dtype.isnative:
        return (
            f"{parameters.owner}: argument `{leaf.name}` has dtype {leaf.value.dtype}, "
            f"whose bytes are in another order than this machine's ({error}).\nPass "
            f"{leaf.name}.astype({leaf.name}.dtype.newbyteorder('='))."
        )
    return (
        f"{parameters.owner}: argument `{leaf.name}` has type {name}, which is not an "
        f"array, a NumPy array of numbers or a Python number ({error}).\nPass "
        f'static_argnames="{root}" if `{root}` is hashable and part of the function, '
        f"or register {name} as a pytree (jax.tree_util.register_dataclass)."
    )


def abstract(reading: Reading, leaf: int, value: Any, assumptions: Assumptions) -> Any:
    """An argument of the trace: a size, a number, or an array of symbolic shape."""
    shape = reading.shape(leaf)
    if is_integer(value):
        (wanted,) = shape
        return wanted if isinstance(wanted, int) else assumptions.known.parse(wanted)[0]
    if isinstance(value, bool | float | complex):
        return value
    aval: Any = jax.typeof(value)
    if any(isinstance(n, str) for n in shape):
        shape = assumptions.known.parse(", ".join(map(str, shape)))
        return aval.update(shape=shape, sharding=_learned_sharding(aval, shape))
    return aval


def _learned_sharding(aval: Any, shape: Sequence[Any]) -> Any:
    """Where an Explicit mesh has an array, whose sizes are known to divide there."""
    sharding = aval.sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    for size, axes in zip(shape, sharding.spec, strict=False):
        if axes and isinstance(size, Size):
            names = axes if isinstance(axes, tuple) else (axes,)
            count = math.prod(sharding.mesh.shape[name] for name in names)
            rest = size % count
            if isinstance(rest, Size):
                divides = Condition("==", (rest, 0), size.assumptions)
                size.assumptions.learn(divides, NOWHERE)
    return sharding


def raise_as_jax(function: Callable[..., Any], args: tuple, kwargs: dict) -> None:
    """Raises what a function raises with these very arguments, if it does."""
    leaves, tree = jax.tree.flatten(unmarked(args, kwargs))
    places = [i for i, x in enumerate(leaves) if not is_integer(x)]
    call = on_leaves(function, leaves, tree, places)
    with contextlib.suppress(NeedsSizesError):  # which JAX cannot trace
        jax.eval_shape(call, *(leaves[i] for i in places))


def _is_marked(x: Any) -> bool:
    return type(x) is Marked
