"""What kernels for Hopper GPUs share: where they run, and their shared memory."""

import math
from typing import Any

import jax
import jax.numpy as jnp


CAPABILITY = "9.0"  # wgmma and TMA as the kernels use them
# Of an H100 or H200. One with fewer runs the last of as many thread blocks after the
# first.
MULTIPROCESSORS = 132


def refused_device() -> str | None:
    """Why the default device runs no such kernel; None if it does."""
    device = jax.devices()[0]
    found = getattr(device, "compute_capability", device.platform)
    if found == CAPABILITY:
        return None
    return (
        f"it runs on NVIDIA GPUs of compute capability {CAPABILITY} (H100, H200), "
        f'found {found}; kernel_options={{"interpret": 1}} runs it anywhere, slowly'
    )


def refused_interpreter() -> str | None:
    """Why JAX's interpreter cannot run a kernel; None if it can.

    It has one shared memory for all devices (jax 0.12): those of a `shard_map` would
    free each other's, and leave it broken for what comes after.
    """
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape[name] for name in mesh.manual_axes)
    if devices == 1:
        return None
    return (
        "JAX's interpreter runs it on one device at a time, found jax.shard_map over "
        f"{devices}"
    )


def refused_counting() -> str | None:
    """Why a kernel that counts in 32 bits cannot run; None if it can."""
    if jax.dtypes.canonicalize_dtype("int64") == jnp.int64:
        return "it counts in 32 bits, and jax_enable_x64 is on"
    return None


def shared_memory(dtype: Any, *shape: int) -> Any:
    """Matrices in shared memory, as TMA writes and the tensor cores read them."""
    import jax.experimental.pallas.mosaic_gpu as plgpu  # which takes a second to load

    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    width = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, width)), swizzle(128)))
