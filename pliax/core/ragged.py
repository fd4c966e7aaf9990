"""Arrays of which one axis is as long as data says: data, bound, size.

    Ragged : array as long as its axis can become, number of valid elements

Outside of a symbolic trace a function of `px.ragged` returns a `Ragged`, a pytree. In
one, where sizes are symbols, it returns an ordinary array whose size is a name that the
device counts (`unbacked.py`). `logical` and `as_result` go from one to the other.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._jax import current_trace, weakly_typed_as
from .callers import asker
from .conditions import Condition
from .dims import Size
from .guards import Assumptions
from .marks import check_conditions
from .provenance import user_place
from .reals import Real
from .size_expressions import variables
from .unbacked import NeedsSizesError, count, new_size, tracing_context


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Ragged:
    """An array of which the device knows how long one axis is.

    A pytree of two arrays: it passes through `jax.jit`, `jax.lax.scan` and
    checkpoints. As an argument of a function of `px.compile` or `px.pad` it is an
    ordinary array of a symbolic size; as a result, such an array is a `Ragged`.

    Attributes:
        data: the array; the first `size` elements along the axis are valid, and what
            the others hold means nothing.
        size: the number of valid elements, an int32 scalar on the device. Of one
            made by hand nobody checks that it is at least 0 and at most the bound.
        axis: which axis, counted from the end: an axis that `jax.vmap` puts in front
            does not move it.
        excess: the error where `size` is more than the bound; empty where it cannot be.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pliax as px
        >>> x = jnp.array([3.0, -1.0, 2.0, -5.0])
        >>> positive = px.ragged.boolean_mask(x, x > 0)
        >>> positive
        Ragged(float32[<=4])
        >>> positive.to_numpy()
        array([3., 2.], dtype=float32)
        >>> float(px.compile(jnp.mean)(positive))
        2.5
    """

    data: Any
    size: Any
    axis: int = dataclasses.field(default=-1, metadata={"static": True})
    excess: str = dataclasses.field(default="", metadata={"static": True})

    @property
    def bound(self) -> Any:
        """How long the axis can be."""
        return self.data.shape[self.axis]

    def to_numpy(self) -> np.ndarray:
        """The valid part, on the host: waits for the device and copies.

        Raises:
            TypeError: if it is made of something else than an array and an integer, or
                holds random keys, which NumPy has not.
            ValueError: if there are more elements than the bound, or a batch of sizes.
        """
        _check_parts(self, f"px.ragged: {self!r}")
        if jax.dtypes.issubdtype(self.data.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"px.ragged: {self!r} holds random keys, which NumPy has not.\nTake "
                "the keys, ragged.data[: int(ragged.size)], or their data, "
                "jax.random.key_data(ragged.data)."
            )
        if np.ndim(self.size):
            raise ValueError(
                f"px.ragged: {self!r} has a size for each of {self.size.shape} rows; "
                "no one array holds them.\nTake one: "
                "jax.tree.map(lambda x: x[i], ragged).to_numpy()."
            )
        size = int(self.size)
        if self.excess and not 0 <= size <= self.bound:
            raise ValueError(self.excess)
        index = [slice(None)] * self.data.ndim
        index[self.axis] = slice(size)
        return np.asarray(self.data)[tuple(index)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The valid part, for functions of NumPy."""
        return np.array(self.to_numpy(), dtype, copy=copy)

    def __repr__(self) -> str:
        shape = [str(n) for n in getattr(self.data, "shape", ())]
        if -len(shape) <= self.axis < 0:
            shape[self.axis] = f"<={shape[self.axis]}"
        return f"Ragged({getattr(self.data, 'dtype', '?')}[{', '.join(shape)}])"


def _check_parts(x: Ragged, what: str) -> None:
    """Refuses what cannot be a `Ragged`: as a pytree it may hold anything.

    Raises:
        TypeError: if it has no array or no integer for its size.
        ValueError: if it has no such axis.
    """
    found = ""
    if not hasattr(x.data, "ndim"):
        found = f"holds {type(x.data).__name__}, which is no array"
    elif not isinstance(x.size, Size) and not _is_integer(x.size):
        kind = getattr(x.size, "dtype", type(x.size).__name__)
        found = f"has a size of {kind}, which is no integer"
    if found:
        raise TypeError(
            f"{what} {found}.\nMake it of an array and the number of its valid "
            "elements, px.ragged.Ragged(data, size)."
        )
    rank = x.data.ndim
    if not -rank <= x.axis < 0:
        raise ValueError(
            f"{what} has axis {x.axis}, which is no axis of an array of rank {rank} "
            f"counted from the end.\nName one from {-rank} to -1."
        )


def _is_integer(x: Any) -> bool:
    dtype = getattr(x, "dtype", np.dtype(object))
    return type(x) is int or jnp.issubdtype(dtype, np.integer)


# --- what state a trace is in ---------------------------------------------------------


CONSTANTS = "constants"  # px.compile lets JAX trace a function: no size is a symbol
EXACT = "exact"  # px.compile under jax.disable_jit: every size has its value


def with_constants(f: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Calls f; where JAX traces it, the first size born from data ends the trace.

    Raises:
        NeedsSizesError: where it is to be traced with symbols.
    """
    if tracing_context.value is not None:  # an outer trace has its own way
        return f(*args, **kwargs)
    state = EXACT if jax.config.jax_disable_jit else CONSTANTS
    with tracing_context(state):
        args, kwargs = logical((args, kwargs), "px.compile")
        return f(*args, **kwargs)


# --- made by the functions of px.ragged -----------------------------------------------


def cut(
    owner: str,
    arrays: Sequence[Any],
    size: Any,
    *,
    axis: int = 0,
    excess: str = "",
    of: tuple[Any, ...] = (),
    specialize_on: Any = (),
) -> list[Any]:
    """The first elements of arrays, as many as a scalar on the device says.

    Args:
        owner: the function that counted.
        arrays: as long along the axis as there can be elements.
        size: an int32 scalar.
        axis: which axis, counted from the front.
        excess: the error where there are more elements than that.
        of: what was counted; the same objects in the same trace give the same size.
        specialize_on: conditions on the number of elements which the user gave.

    Returns:
        In a symbolic trace, arrays of one new size; else each a :class:`Ragged`.
    """
    cases = check_conditions(owner, specialize_on)
    assumptions = tracing_context.value
    if assumptions is CONSTANTS:
        raise NeedsSizesError(owner)
    if assumptions is EXACT:
        return [_exact(x, size, axis, excess) for x in arrays]
    if assumptions is None:
        return [Ragged(x, size, axis - x.ndim, excess) for x in arrays]
    origin = f"{owner} at {user_place(asker())}"
    bound = arrays[0].shape[axis]
    symbol: Any = _size_of(of, bound, assumptions)
    if symbol is None:
        symbol = new_size(assumptions, bound, origin)
        count(size, symbol, excess, cases)
        _remember(of, bound, assumptions, symbol)
    return [lax.slice_in_dim(x, 0, symbol, axis=axis) for x in arrays]


def _exact(x: Any, size: Any, axis: int, excess: str) -> Any:
    """The valid elements, whose number the host reads."""
    number = int(size)
    if excess and not 0 <= number <= x.shape[axis]:
        raise ValueError(excess)
    return lax.slice_in_dim(x, 0, number, axis=axis)


def _key(of: tuple[Any, ...], bound: Any) -> tuple[int | str, ...]:
    """Arrays by identity, all else by what it says."""
    parts = (id(x) if isinstance(x, jax.Array) else str(x) for x in of)
    return (id(current_trace()), str(bound), *parts)


def _size_of(of: tuple[Any, ...], bound: Any, assumptions: Assumptions) -> Any:
    """The size that was counted of the same objects in the same trace, if any."""
    return assumptions.counted.get(_key(of, bound), (None,))[0] if of else None


def _remember(
    of: tuple[Any, ...], bound: Any, assumptions: Assumptions, size: Any
) -> None:
    """Holds the objects, so that no other takes their place under the same id."""
    if all(isinstance(x, jax.Array | Size | int | str) for x in of):
        assumptions.counted[_key(of, bound)] = size, of, current_trace()


# --- arguments and results of a trace -------------------------------------------------


def is_ragged(x: Any) -> bool:
    """Whether a node of a pytree is a `Ragged`."""
    return isinstance(x, Ragged)


def logical(tree: Any, owner: str) -> Any:
    """The arguments of a trace, with arrays of new sizes in place of each `Ragged`."""

    def one(x: Any) -> Any:
        if not is_ragged(x):
            return x
        what = f"{owner}: an argument {x!r}"
        _check_parts(x, what)
        if np.ndim(x.size):
            raise ValueError(
                f"{what} has {np.shape(x.size)} sizes, one for "
                "each row.\nPass one row, or jax.vmap the compiled function."
            )
        axis, who = x.axis % x.data.ndim, f"{owner}: an argument"
        return cut(who, [x.data], x.size, axis=axis, excess=x.excess)[0]

    return jax.tree.map(one, tree, is_leaf=is_ragged)


def as_result(x: Any, assumptions: Assumptions, owner: str) -> Any:
    """A result of a trace: a `Ragged` where one of its sizes is born from data.

    Raises:
        ValueError: where two of them are.
    """
    if isinstance(x, Real):
        return x.dimension_as_value()
    if isinstance(x, Condition):  # a Python bool gives way to no other type in a result
        return weakly_typed_as(x.dimension_as_value(), x)
    shape = getattr(x, "shape", ())
    unbacked = assumptions.known.unbacked.keys()
    axes = [i for i, n in enumerate(shape) if variables(n) & unbacked]
    if not axes:
        return x
    if len(axes) > 1:
        names = ", ".join(str(shape[i]) for i in axes)
        raise ValueError(
            f"{owner}: a result of shape {shape} has {len(axes)} sizes born from data "
            f"({names}), but a px.ragged.Ragged has one.\nReduce the result, or return "
            "it with one of these axes padded to a size that is known."
        )
    (axis,) = axes
    return Ragged(x, shape[axis].dimension_as_value(), axis - len(shape))
