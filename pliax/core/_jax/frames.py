"""Which of JAX's code asks about sizes, and what it may be told."""

import types

from jax._src.lax import slicing as _slicing


_WINDOWS = {
    rule.__code__
    for rule in (
        _slicing._gather_shape_rule,
        _slicing._dynamic_slice_shape_rule,
        _slicing._dynamic_update_slice_shape_rule,
        _slicing._scatter_shape_rule,
    )
}


def asks_whether_windows_fit(frame: types.FrameType) -> bool:
    """Whether a frame compares the size of an array with that of a window of it."""
    return frame.f_code in _WINDOWS


_LIBRARY = ("jax._src.numpy.", "jax._src.scipy.", "jax._src.nn.", "jax._src.image.")
_LIBRARY += ("jax._src.random", "jax.numpy", "jax.scipy", "jax.nn", "jax.experimental")


# They ask in order to take a shorter way, to broadcast, or to refuse an empty array.
_RIGHT_EITHER_WAY = {
    "_fftconvolve_unbatched",
    "_rsf2csf_2d",
    "_take",
    "det",
    "diagonal",
    "slogdet",
    "trapezoid",
    "vectorize",
}


def may_call_equal_sizes_different(frame: types.FrameType) -> bool:
    """Whether JAX's code in a frame is right also where equal sizes are not known so.

    The rules of its primitives are written for symbolic dimensions: they stop where
    sizes have to be equal. Its library over them is not: `jnp.array_equal` says False.
    """
    name = frame.f_globals.get("__name__", "")
    function = frame.f_code.co_qualname.partition(".")[0]
    return not name.startswith(_LIBRARY) or function in _RIGHT_EITHER_WAY


# They shorten the way for arrays without elements: the long one gives the same.
_RIGHT_FOR_NOTHING = {"_unique", "_unique_sorted_mask", "_in1d"}


def may_call_nothing_something(frame: types.FrameType) -> bool:
    """Whether JAX's code in a frame is right for no elements if told there are some."""
    at: types.FrameType | None = frame
    if frame.f_code.co_name == "nonzero":  # jax 0.11 asks there, of unique's mask
        at = frame.f_back
    name = at.f_globals.get("__name__", "") if at else ""
    is_right = at is not None and at.f_code.co_name in _RIGHT_FOR_NOTHING
    if at is not None and at.f_code.co_name == "_in1d":  # it also searches, or sorts
        is_right = at.f_locals.get("method") in ("auto", "compare_all")
    return is_right and name.startswith(_LIBRARY)
