"""Elements that data repeats."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.callers import asker
from pliax.core.conditions import statically_known_true
from pliax.core.dims import Size
from pliax.core.provenance import user_place
from pliax.core.ragged import cut

from ._axes import axis_of, check_whole


_MOST = 2**30  # what a sum of int32 may reach before it wraps


def repeat(
    x: Any, repeats: Any, axis: Any = 0, *, bound: Any, specialize_on: Any = ()
) -> Any:
    """Each element as often as data says, as `jnp.repeat`.

    Differentiable in `x`. That there is room for all repeats is known on the device
    only: a function of `px.compile` or `px.pad` that calls this waits for the device at
    the end of a call and raises there, as for :func:`px.check`; a
    :class:`px.ragged.Ragged` raises in `to_numpy`. One and the same array of repeats
    gives one size.

    Args:
        x: an array.
        repeats: how often each element along the axis is repeated: integers, one for
            each, or one for all.
        axis: along which axis.
        bound: the largest sum of the repeats, for which room is made; an integer or a
            size. It has no default, because nothing else bounds what data says.
        specialize_on: as in :func:`px.ragged.boolean_mask`.

    Returns:
        An array as `x` with a size of at most `bound` along the axis; see
        :func:`px.ragged.boolean_mask`.

    Raises:
        TypeError: if the repeats are not integers.
        ValueError: if their shape is not that of the axis; if one is negative or they
            add up to more than the bound, where and when that is known.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pliax as px
        >>> x, repeats = jnp.array([1, 2, 3]), jnp.array([2, 0, 1])
        >>> px.ragged.repeat(x, repeats, bound=4).to_numpy()
        array([1, 1, 3], dtype=int32)
    """
    counted, who = repeats, "px.ragged.repeat"
    x, repeats = jnp.asarray(x), jnp.asarray(repeats)
    axis = axis_of(who, x, axis)
    _check_bound(bound)
    check_whole(who, "the array", x, [axis])
    check_whole(who, "the repeats", repeats, range(repeats.ndim))
    repeats = _checked(x, repeats, axis)
    of = ("repeated", counted, x.shape[axis])
    ends = jnp.cumsum(repeats)
    places = lax.iota(jnp.int32, bound)
    begun = jnp.zeros_like(places).at[ends - repeats].add(1, mode="drop")
    index = jnp.cumsum(begun) - 1
    if statically_known_true(x.shape[axis] == 0):  # of which JAX reads nothing
        x = jnp.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)
    result = jnp.take(x, index, axis=axis, mode="clip")
    text = (
        f"px.ragged.repeat: the repeats add up to more than bound={bound}, or one is "
        f"negative.\n  at {user_place(asker())}\nPass a larger bound."
    )
    kept = {"excess": text, "of": of, "specialize_on": specialize_on}
    return cut(who, [result], _total(repeats), axis=axis, **kept)[0]


def _check_bound(bound: Any) -> None:
    is_size = isinstance(bound, int | np.integer | Size)
    if not is_size or (not isinstance(bound, Size) and bound < 0):
        raise ValueError(
            f"px.ragged.repeat: bound is {bound!r}.\n"
            "Pass an integer of at least 0, or a size of an array."
        )


def _checked(x: Any, repeats: Any, axis: int) -> Any:
    """The repeats of each element, as int32."""
    if not jnp.issubdtype(repeats.dtype, jnp.integer):
        raise TypeError(
            f"px.ragged.repeat: the repeats hold {repeats.dtype}, not integers.\n"
            "Convert them, repeats.astype(int) for example."
        )
    if repeats.ndim > 1 or (repeats.ndim == 1 and repeats.shape[0] != x.shape[axis]):
        raise ValueError(
            f"px.ragged.repeat: repeats of shape {repeats.shape} for axis {axis} of an "
            f"array of shape {x.shape}.\nPass one integer for each element, or one."
        )
    return jnp.broadcast_to(repeats.astype(jnp.int32), (x.shape[axis],))


def _total(repeats: Any) -> Any:
    """The sum of the repeats; -1 where one is negative or the sum is too large."""
    about = jnp.sum(repeats.astype(jnp.float32))
    is_wrong = jnp.any(repeats < 0) | (about > _MOST)
    return jnp.where(is_wrong, -1, jnp.sum(repeats, dtype=jnp.int32))
