"""How a call reaches its executable."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import dispatch as _dispatch, pjit as _pjit, tree_util as _tree_util
from jax._src.array import ArrayImpl as _ArrayImpl
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax as _lib

from .tracing import is_tracing


# Under this name `jax.monitoring` tells the seconds of each executable that XLA builds.
compile_event = _dispatch.BACKEND_COMPILE_EVENT


# `aval_of(x).shape` is `x.shape` where `type(x) is Array`, without the Python function
# behind that attribute.
Array, aval_of = _ArrayImpl, vars(_ArrayImpl)["aval"].fget


def with_first(
    jitted: Any,
    *first: Any,
    refusal: type[Exception],
    fits: Callable[[tuple, dict], bool] = lambda args, kwargs: True,
) -> Any:
    """A function of `jax.jit`, whose executables it calls, with first arguments given.

    To JAX's dispatcher they are constants of the executable, which takes 0.15 us less
    than one array more. They are placed once, as the executable has them, where
    `jitted` would copy them to its devices in each call.

    After an error in a trace `jax.jit` serves the same arguments without its dispatcher
    for good, 10 times as slowly. This function forgets that they failed.

    Args:
        jitted: the function.
        first: its first arguments.
        refusal: raised in a transformation, of which such a call is never a part, and
            for arguments that do not fit.
        fits: whether arguments that the dispatcher has not seen are for this function.
    """
    fun = functools.partial(jitted.__wrapped__, *first)

    def missed(*args: Any, **kwargs: Any) -> Any:
        if is_tracing() or not fits(args, kwargs):
            raise refusal
        try:
            results, fast, again = jitted._cache_miss(*first, *args, **kwargs)
        except BaseException:
            called._clear_cache()
            raise
        if fast is not None:
            constants = [*fast.const_args, *_placed(jax.tree.leaves(first), fast)]
            fast = fast._replace(const_args=constants)
        return results, fast, again

    called = _lib.pjit(
        jitted.__name__,
        fun,
        missed,
        [],
        [],
        (),
        _tree_util.dispatch_registry,
        _pxla.cc_shard_arg,
        _pjit._get_cpp_global_cache(False),
    )
    called._fun = fun  # where jax_debug_nans looks for what made a NaN
    return called


def _placed(arrays: Sequence[Any], fast: Any) -> list[Any]:
    """What an executable is given first, on its devices; `fast` calls it."""
    start, places = len(fast.const_args), iter(fast.in_shardings)
    for is_kept in fast.kept_var_bitvec[:start]:
        if is_kept:
            next(places)
    is_kept = fast.kept_var_bitvec[start:]
    return [
        _on_devices(np.asarray(x), next(places)) if kept else x
        for x, kept in zip(arrays, is_kept, strict=False)
    ]


def _on_devices(x: np.ndarray, sharding: Any) -> Any:
    """An array for all devices, of which this process has some."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
