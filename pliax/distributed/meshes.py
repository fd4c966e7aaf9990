"""Meshes: the devices of a job under names."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def data_parallel_mesh(
    *, devices: Sequence[Any] | None = None, axis_name: str = "data"
) -> jax.sharding.Mesh:
    """A one-dimensional mesh over every device, for splitting the batch.

    The axis is of type Auto: XLA places what no annotation fixes, so that a training
    step written for one device runs unchanged. (``jax.make_mesh`` makes Explicit axes
    by default, which put the sharding into the type of every array.)

    Args:
        devices: the devices in mesh order. All devices of the default backend by
            default, those of other processes included, in the order that suits the
            interconnect.
        axis_name: the name of the axis in a PartitionSpec.

    Returns:
        A mesh of shape ``{axis_name: number of devices}``.

    Raises:
        ValueError: if devices is empty or names a device twice.

    Examples:
        >>> from pliax.distributed import data_parallel_mesh
        >>> mesh = data_parallel_mesh()
        >>> mesh.axis_names
        ('data',)
        >>> mesh.size == jax.device_count()
        True
    """
    axis_types = (jax.sharding.AxisType.Auto,)
    if devices is None:
        return jax.make_mesh((jax.device_count(),), (axis_name,), axis_types=axis_types)
    _check_devices(devices)
    grid = np.empty(len(devices), dtype=object)
    grid[:] = list(devices)
    return jax.sharding.Mesh(grid, (axis_name,), axis_types=axis_types)


def _check_devices(devices: Sequence[Any]) -> None:
    if not len(devices):
        raise ValueError(
            "data_parallel_mesh: devices is empty.\n"
            "Pass at least one device, or leave devices out to take all of them."
        )
    twice = [d for i, d in enumerate(devices) if d in devices[:i]]
    if twice:
        raise ValueError(
            f"data_parallel_mesh: devices names {twice[0]} twice.\n"
            "A mesh holds each device once: remove the copy."
        )
