"""Elements that data selects: those of a mask, those that are not 0, distinct ones.

All are found on the device by one count and one scatter: the n-th element selected is
read from where the running count reaches n.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pliax.core.ragged import cut

from ._axes import axis_of, check_whole


def boolean_mask(x: Any, mask: Any, axis: Any = 0, *, specialize_on: Any = ()) -> Any:
    """The elements where a mask is true, `x[mask]`, in the order of the array.

    Differentiable in `x`. In a function of `px.compile` or `px.pad` the result is an
    array, and functions of JAX take it as any other; its size is a symbol (u0, u1, …)
    that the device counts: one symbol for all that one and the same mask selects.
    Elsewhere it is a :class:`px.ragged.Ragged`.

    Args:
        x: an array.
        mask: booleans, of the shape of one or more neighbouring axes of `x`.
        axis: the first of these axes.
        specialize_on: conditions on the number of elements, ``[lambda n: n <= 64]``. In
            a function of `px.compile` or `px.pad`, what follows is in the executable
            once more for each condition, with arrays no longer than the largest number
            that meets it, and the device takes the first that holds; the first call
            with a mask decides. Elsewhere it means nothing. None by default, because
            each makes the executable larger.

    Returns:
        An array in which one axis stands for those that the mask covers; at most as
        long as the mask has elements.

    Raises:
        TypeError: if the mask does not hold booleans, or `specialize_on` no functions.
        ValueError: if its shape is not that of the axes.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pliax as px
        >>> f = px.compile(lambda x: px.ragged.boolean_mask(x, x > 0).mean())
        >>> float(f(jnp.array([3.0, -1.0, 2.0])))
        2.5
    """
    of = (_SELECTED, mask)
    x, mask = jnp.asarray(x), jnp.asarray(mask)
    axis = _check_mask(x, mask, axis)
    covered = range(axis, axis + mask.ndim)
    check_whole("px.ragged.boolean_mask", "the mask", mask, range(mask.ndim))
    check_whole("px.ragged.boolean_mask", "the array", x, covered)
    before, after = x.shape[:axis], x.shape[axis + mask.ndim :]
    flat = x.reshape((*before, _number(mask), *after))
    order, size = _selected(mask.reshape(-1))
    packed = _taken(flat, order, axis)
    kept = {"of": of, "specialize_on": specialize_on}
    return cut("px.ragged.boolean_mask", [packed], size, axis=axis, **kept)[0]


_SELECTED = "selected"


def nonzero(x: Any, *, specialize_on: Any = ()) -> tuple[Any, ...]:
    """The indices of the elements that are not 0, as `jnp.nonzero`.

    Args:
        x: an array with at least one axis.
        specialize_on: as in :func:`boolean_mask`.

    Returns:
        For each axis the indices, in row-major order of the elements. All have one
        size, at most the number of elements of `x`; see :func:`boolean_mask`.

    Raises:
        ValueError: for a scalar.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pliax as px
        >>> rows, columns = px.ragged.nonzero(jnp.array([[0, 7], [8, 9]]))
        >>> rows.to_numpy(), columns.to_numpy()
        (array([0, 1, 1], dtype=int32), array([1, 0, 1], dtype=int32))
    """
    of = (_SELECTED, x)
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError(
            "px.ragged.nonzero: found a scalar, which has no axis to index.\n"
            "Pass an array with at least one axis, x[None] for example."
        )
    check_whole("px.ragged.nonzero", "the array", x, range(x.ndim))
    rest, size = _selected((x != jnp.zeros((), x.dtype)).reshape(-1))
    rest = rest.astype(jax.dtypes.canonicalize_dtype(int))
    found = []
    for n in reversed(x.shape[1:]):
        divisor = jnp.maximum(jnp.asarray(n, rest.dtype), 1)
        found.append(rest % divisor)
        rest = rest // divisor
    kept = {"of": of, "specialize_on": specialize_on}
    return tuple(cut("px.ragged.nonzero", [rest, *reversed(found)], size, **kept))


def unique(
    x: Any,
    *,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    equal_nan: bool = True,
    specialize_on: Any = (),
) -> Any:
    """The distinct elements in ascending order, as `jnp.unique`.

    Args:
        x: an array, which is taken as flat.
        return_index: whether to return where each of them first occurs in flat `x`.
        return_inverse: whether to return, for each element of `x`, which of the
            distinct ones it is; its size is that of `x` and no unknown.
        return_counts: whether to return how often each of them occurs.
        equal_nan: whether all NaN are one element.
        specialize_on: as in :func:`boolean_mask`.

    Returns:
        The distinct elements, or a tuple of them and what else was asked for, in the
        order of the options. What is as long as they are has one size with them, at
        most the number of elements of `x`; see :func:`boolean_mask`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pliax as px
        >>> x = jnp.array([5, 2, 5, 5])
        >>> values, counts = px.ragged.unique(x, return_counts=True)
        >>> values.to_numpy(), counts.to_numpy()
        (array([2, 5], dtype=int32), array([1, 3], dtype=int32))
    """
    x = jnp.asarray(x)
    check_whole("px.ragged.unique", "the array", x, range(x.ndim))
    flat = x.reshape(-1)
    places = jnp.argsort(flat, stable=True)
    ordered = _taken(flat, places, 0)
    is_first = _starts_group(ordered, equal_nan)
    order, size = _selected(is_first)
    group = jnp.cumsum(is_first.astype(places.dtype)) - 1
    found = [_taken(ordered, order, 0)]
    if return_index:
        found.append(_taken(places, order, 0))
    if return_counts:
        found.append(jnp.zeros_like(group).at[group].add(1))
    found = cut("px.ragged.unique", found, size, specialize_on=specialize_on)
    if return_inverse:
        inverse = jnp.zeros_like(group).at[places].set(group).reshape(x.shape)
        found.insert(1 + return_index, inverse)
    return tuple(found) if len(found) > 1 else found[0]


def _check_mask(x: Any, mask: Any, axis: Any) -> int:
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"px.ragged.boolean_mask: the mask holds {mask.dtype}, not booleans.\n"
            "Compare it with something, mask != 0 for example."
        )
    rank, place = mask.ndim, axis_of("px.ragged.boolean_mask", x, axis)
    covered = x.shape[place : place + rank]
    if rank == 0 or len(covered) != rank or covered != mask.shape:
        raise ValueError(
            f"px.ragged.boolean_mask: a mask of shape {mask.shape} for an array of "
            f"shape {x.shape}, from axis {axis}.\nPass a mask of the shape of one or "
            "more neighbouring axes, and the first of them as axis=."
        )
    return place


def _number(mask: Any) -> Any:
    """How many elements an array has, which may be a symbolic size."""
    result = 1
    for n in mask.shape:
        result = n * result
    return result


def _selected(mask: Any) -> tuple[Any, Any]:
    """Where the true elements of a flat mask are, in order, and how many there are."""
    (n,) = mask.shape
    place = lax.iota(jnp.int32, n)
    count = jnp.cumsum(mask.astype(jnp.int32))
    target = jnp.where(mask, count - 1, jnp.asarray(n, jnp.int32))
    order = jnp.zeros_like(place).at[target].set(place, mode="drop")
    return order, jnp.sum(mask, dtype=jnp.int32)


def _taken(x: Any, index: Any, axis: int) -> Any:
    """Elements at indices that lie inside."""
    return jnp.take(x, index, axis=axis, mode="clip")


def _starts_group(ordered: Any, equal_nan: bool) -> Any:
    """Which elements of a sorted array differ from the one before."""
    place = lax.iota(jnp.int32, ordered.shape[0])
    before = _taken(ordered, jnp.maximum(place - 1, 0), 0)
    differs = ordered != before
    if equal_nan and jnp.issubdtype(ordered.dtype, jnp.inexact):
        differs &= ~(jnp.isnan(ordered) & jnp.isnan(before))
    return differs | (place == 0)
