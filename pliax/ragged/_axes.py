"""The axis that a function of `px.ragged` works along."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np


def axis_of(owner: str, x: Any, axis: Any) -> int:
    """The axis of an array, counted from the front.

    Raises:
        ValueError: if the array has no such axis.
    """
    if not isinstance(axis, int | np.integer) or not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{owner}: axis {axis} of an array of shape {x.shape}.\n"
            "Name one of its axes."
        )
    return int(axis) % x.ndim


def check_whole(owner: str, what: str, x: Any, axes: Iterable[int]) -> None:
    """Refuses axes that an Explicit mesh divides: their elements are counted in order.

    Auto axes are none of our business: there the compiler gathers what it needs.

    Raises:
        ValueError: with the axes of the mesh.
    """
    spec = jax.typeof(x).sharding.spec
    for axis in axes:
        names = spec[axis] if axis < len(spec) else None
        if names:
            whole = (None if i == axis else n for i, n in enumerate(spec))
            remedy = f"jax.sharding.reshard(x, jax.P({', '.join(map(repr, whole))}))"
            raise ValueError(
                f"{owner}: axis {axis} of {what} ({jax.typeof(x)}) is divided among "
                f"the mesh axis {names!r}, which is Explicit, but its elements are "
                f"counted in order.\nPass it whole along this axis, {remedy}, or use "
                "Auto axes."
            )
