"""The axis that a function of `px.ragged` works along."""

from typing import Any

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
