"""What the Triton kernels do not do, and why."""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from pliax.core.padded_calls import Size

from .mod_limits import refused_mods
from .triton_configs import CHANNELS, LEAST


AMPERE = 8.0  # the first with bfloat16
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def refusal(arrays: Any, score_mod: Any, block_mask: Any) -> str | None:
    """Why the kernels cannot run a call; None where they can."""
    return (
        _refused_device()
        or _refused_arrays(*arrays)
        or _refused_mask(block_mask)
        or refused_mods(arrays[0].shape, score_mod, block_mask)
    )


def _refused_device() -> str | None:
    device = jax.devices()[0]
    found = str(getattr(device, "compute_capability", device.platform))
    is_newer = found.split(".")[0].isdecimal() and float(found) >= AMPERE
    if not is_newer and not found.startswith("gfx"):
        return (
            f"it runs on NVIDIA GPUs of compute capability {AMPERE} and newer and on "
            f"AMD's, found {found}"
        )
    if find_spec("jax_triton") is None:
        return 'it needs jax-triton, which pip install "pliax[triton]" brings'
    return None


def _refused_arrays(query: Any, key: Any, value: Any) -> str | None:
    dtypes = [x.dtype for x in (query, key, value)]
    sizes = [n for x in (query, key, value) for n in x.shape]
    if not all(isinstance(n, int | Size) for n in sizes):
        return f"it needs known sizes, found {query.shape}, {key.shape}, {value.shape}"
    if dtypes[0] not in _DTYPES or len(set(dtypes)) > 1:
        found = ", ".join(str(x) for x in dtypes)
        return (
            "query, key and value must all be bfloat16, float16 or float32, found "
            f"{found}"
        )
    channels = max(key.shape[3], value.shape[3])
    if channels > CHANNELS:
        return f"it takes up to {CHANNELS} channels, found {channels}"
    return None


def _refused_mask(block_mask: Any) -> str | None:
    if block_mask is None or not any(n % LEAST for n in block_mask.block_size):
        return None
    return (
        f"it takes masks whose blocks are multiples of {LEAST} x {LEAST}, found "
        f"block_size={block_mask.block_size}"
    )
