"""Arrays on their way into buckets and out of them, without a compilation per size."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pliax.core._jax import weakly_typed_as


_SMALL = 1 << 18  # bytes that are sooner at the host and back than a copy is compiled


class Unlike(Exception):  # noqa: N818  (no user sees it)
    """An argument of another shape, structure or division than a plan was bound to."""


@dataclasses.dataclass(frozen=True)
class Padding:
    """What happens to one argument.

    Attributes:
        leaf: its number among the flat arguments.
        exact: the shape it comes with.
        physical: the shape of the bucket.
        inside: where it lies in its bucket.
    """

    leaf: int
    exact: tuple[int, ...]
    physical: tuple[int, ...]
    inside: tuple[slice, ...] = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "inside", _start(self.exact))

    def pad(self, x: Any) -> Any:
        """The argument in its bucket."""
        if x.shape != self.exact:
            raise Unlike
        if type(x) is not np.ndarray:
            return pad_array(x, self.physical)
        longer = np.zeros(self.physical, x.dtype)
        longer[self.inside] = x
        return longer


def _start(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(map(slice, shape))


def pad_array(x: Any, shape: tuple[int, ...]) -> Any:
    """An array at the start of a longer one.

    On a GPU small arrays go through the host, for large ones the copy is compiled.

    Raises:
        Unlike: where devices cannot divide the longer one as they divide the array.
    """
    if not isinstance(x, jax.Array):
        return _longer(np.asarray(x), shape)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # keys know no zero to pad with
        pairs = zip(shape, x.shape, strict=True)
        return x[np.ix_(*(np.minimum(np.arange(n), m - 1) for n, m in pairs))]
    if not _divides(x.sharding, shape):
        raise Unlike
    if _is_spread(x, shape):
        return _by_device(pad_array, x, shape)
    if _is_on_host(x):
        longer = _longer(np.asarray(x), shape)
        return jax.device_put(longer, x.sharding) if x.committed else longer
    widths = [(0, n - m, 0) for n, m in zip(shape, x.shape, strict=True)]
    longer = jax.lax.pad(x, jnp.zeros((), x.dtype), widths)
    return jax.device_put(longer, x.sharding) if x.committed else longer


def _longer(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    longer = np.zeros(shape, x.dtype)
    longer[_start(x.shape)] = x
    return longer


def cut_array(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The first elements along each axis; on a GPU as in `pad_array`."""
    if _is_spread(x, shape):
        return _by_device(cut_array, x, shape)
    part = _start(shape)
    if not _is_on_host(x):
        return x[part]
    cut = np.ascontiguousarray(np.asarray(x)[part])
    return jax.device_put(cut, x.sharding if x.committed else None)


def _is_spread(x: jax.Array, shape: tuple[int, ...]) -> bool:
    """Whether several devices have parts of an array, whole along axes that change."""
    if len(x.sharding.device_set) == 1:
        return False
    local = x.sharding.shard_shape(x.shape)
    return all(a in (b, c) for a, b, c in zip(x.shape, shape, local, strict=True))


def _divides(sharding: Any, shape: tuple[int, ...]) -> bool:
    """Whether devices can have equal parts of such an array."""
    if len(sharding.device_set) == 1:
        return True
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def _by_device(change: Callable[..., Any], x: jax.Array, shape: tuple[int, ...]) -> Any:
    local = x.sharding.shard_shape(shape)
    with jax.set_mesh(None):  # in that of a context JAX wants arrays on all its devices
        parts = [change(shard.data, local) for shard in x.addressable_shards]
    made = jax.make_array_from_single_device_arrays(shape, x.sharding, parts)
    return weakly_typed_as(made, x.aval)


def _is_on_host(x: jax.Array) -> bool:
    """Whether NumPy can read an array in place, or cheaply."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or x.weak_type:
        return False
    return x.nbytes <= _readable(x.sharding)


@functools.lru_cache(maxsize=64)
def _readable(sharding: Any) -> float:
    """The most bytes of an array so placed that NumPy reads."""
    if len(sharding.device_set) > 1:
        return -1
    (device,) = sharding.device_set
    return math.inf if device.platform == "cpu" else _SMALL


# --- arguments with some of them padded -----------------------------------------------


def padder(
    call: tuple[tuple, dict], paths: Sequence[tuple], paddings: Sequence[Padding]
) -> Callable[[tuple, dict], tuple[tuple, dict]]:
    """What puts the arguments of calls like this one into their buckets.

    Args:
        call: arguments by position and by name.
        paths: of their leaves.
        paddings: what happens to some of those.
    """
    places: dict = {}
    for padding in paddings:
        *outer, last = paths[padding.leaf]
        if not _is_plain(call, paths[padding.leaf]):
            return functools.partial(_pad_leaves, paddings)
        inner = places
        for key in outer:
            inner = inner.setdefault(_step(key), {})
        inner[_step(last)] = padding.pad
    in_args, in_kwargs = (_changing(x, places.get(i, {})) for i, x in enumerate(call))
    return lambda args, kwargs: (in_args(args), in_kwargs(kwargs))


def _pad_leaves(
    paddings: Sequence[Padding], args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    leaves, tree = jax.tree.flatten((args, kwargs))
    for padding in paddings:
        leaves[padding.leaf] = padding.pad(leaves[padding.leaf])
    return jax.tree.unflatten(tree, leaves)


def _is_plain(tree: Any, path: tuple[Any, ...]) -> bool:
    """Whether a path leads through dicts, lists and tuples, and no kinds of them."""
    for key in path:
        if type(tree) not in (dict, list, tuple):
            return False
        tree = tree[_step(key)]
    return True


def _step(key: Any) -> Any:
    return key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key


def _changing(tree: Any, places: Any) -> Callable[[Any], Any]:
    """What copies a container with changes at some places: dicts, down to functions.

    To walk the places in each call took 0.4 us more for a dict among the arguments.
    """
    if not places:
        return lambda given: given
    if callable(places):
        return places
    kind = type(tree)
    changes = [(step, _changing(tree[step], x)) for step, x in places.items()]

    def change(given: Any) -> Any:
        if type(given) is not kind:
            raise Unlike
        copy: Any = given.copy() if kind is dict else list(given)
        for step, part in changes:
            copy[step] = part(copy[step])
        return tuple(copy) if kind is tuple else copy

    return change
