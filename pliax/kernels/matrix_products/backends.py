"""Who computes alpha A B + beta C, and where each is the default."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pliax.core.manual_axes import may_be_partitioned, vary, varying_axes
from pliax.kernels._backends import Backend
from pliax.kernels._hopper import MULTIPROCESSORS, refused_counting, refused_device

from . import schedules, xla


# Of the time a full product takes: a round of the kernel takes up to a tenth longer
# than one of the library's, which has larger tiles. With an addend XLA's second kernel
# takes as long again.
_WORTHWHILE, _WITH_ADDEND = 0.8, 1.0
_SMALLEST = 512  # rows, columns and depth: smaller ones were not faster
# XLA's second kernel takes longer than such a product: for 48 of (128, 128) and
# (128, 896) the two took 28 us on an H200, and the fused kernel 11.
_SMALLEST_WITH_ADDEND = 128
_AMPERE = 8.0  # the first with bfloat16
_FILLED = 0.9  # of the tiles: what lies beyond a matrix is computed, too


@dataclass(frozen=True)
class Kind:
    """What is known about a product.

    Attributes:
        is_symmetric: Whether one side of its diagonal says it all.
        transposed: Which factors are given as their transposes: "left", "right", none.
        has_scale: Whether the product has a factor.
        has_shift: Whether something is added to the diagonal.
    """

    is_symmetric: bool
    transposed: str | None = None
    has_shift: bool = False
    has_scale: bool = True

    def factors(self, A: Array, B: Array) -> tuple[Array, Array]:
        """What is multiplied, of what is given."""
        left = A.mT if self.transposed == "left" else A
        return left, B.mT if self.transposed == "right" else B

    def sizes(self, A: Any, B: Any) -> tuple[int, int, int]:
        """Rows, columns and depth of the product."""
        rows, depth = A.shape[-2:]
        if self.transposed == "left":
            rows, depth = depth, rows
        return rows, B.shape[-2 if self.transposed == "right" else -1], depth


@dataclass(frozen=True)
class Arguments:
    """What a backend may refuse."""

    arrays: tuple[Any, Any, Any]  # A, B, C
    factors: Any
    kind: Kind
    options: dict[str, int]


type Factors = tuple[Array, Array, Array]  # alpha, beta, gamma: of each matrix


def _run_xla(
    A: Array, B: Array, C: Any, factors: Factors, *, kind: Kind, precision: Any
) -> Array:
    if C is None and not (kind.has_scale or kind.has_shift):
        return xla.rounded_product(*kind.factors(A, B), precision=precision)
    AB = xla.product(*kind.factors(A, B), precision=precision)
    return xla.scaled_sum(AB, C, factors, A.dtype, has_shift=kind.has_shift)


def _run_mosaic_gpu(*arrays: Any, interpret: int = 0, **static: Any) -> Array:
    from . import mosaic_gpu  # loads Pallas, which takes a second

    run = partial(mosaic_gpu.add_product, interpret=interpret > 0)
    return _run_fused(run, *arrays, **static)


def _run_triton(*arrays: Any, **static: Any) -> Array:
    from . import triton  # of an extra

    return _run_fused(triton.add_product, *arrays, **static)


def _run_fused(
    add_product: Callable[..., Array],
    A: Array,
    B: Array,
    C: Any,
    factors: Factors,
    *,
    kind: Kind,
    precision: Any,
) -> Array:
    del precision  # products of half-precision numbers are exact
    numbers = jnp.stack(factors, axis=-1).astype(jnp.float32)
    one_stack = partial(_one_stack, partial(add_product, kind=kind), kind)
    found = _over_stacks(one_stack)(A, B, C, numbers)
    return vary(found, varying_axes(A, B, C, numbers))


def _one_stack(
    add_product: Callable[..., Array],
    kind: Kind,
    A: Array,
    B: Array,
    C: Any,
    factors: Array,
) -> Array:
    """A kernel over the leading axes, as one."""
    if 0 in A.shape:  # after vmap over nothing
        return jnp.zeros((*A.shape[:-2], *kind.sizes(A, B)[:2]), A.dtype)
    C = None if C is None else _as_stack(C, 2)
    left, right = _as_stack(A, 2), _as_stack(B, 2)
    found = add_product(left, right, C, _as_stack(factors, 1))
    return found.reshape(*A.shape[:-2], *found.shape[-2:])


def _as_stack(x: Array, rank: int) -> Array:
    axes = x.shape[x.ndim - rank :]
    return x.reshape(math.prod(x.shape[: x.ndim - rank]), *axes)


def _over_stacks(run: Callable[..., Array]) -> Callable[..., Array]:
    """What vmap adds is one more axis of the stack, not one kernel after another."""
    mapped = jax.custom_batching.custom_vmap(run)

    @mapped.def_vmap
    def _(size: int, is_batched: Sequence[Any], *arrays: Any) -> Any:
        arrays = jax.tree.map(
            lambda x, is_many: x if is_many else jnp.broadcast_to(x, (size, *x.shape)),
            arrays,
            tuple(is_batched),
        )
        return _over_stacks(run)(*arrays), True

    return mapped


def _run_by_platform(*arrays: Any, **static: Any) -> Array:
    """The fused kernel on a GPU, `xla` where a program is compiled for a CPU."""
    cuda, default = (partial(f, **static) for f in (_run_mosaic_gpu, _run_xla))
    return jax.lax.platform_dependent(*arrays, cuda=cuda, default=default)


def _anything(arguments: Arguments) -> None:
    """XLA takes every argument that passed the checks."""


def _refused_by_mosaic_gpu(arguments: Arguments) -> str | None:
    if "interpret" not in arguments.options and (reason := refused_device()):
        return reason
    return _refused_by_kernels(arguments) or refused_counting()


def _refused_by_triton(arguments: Arguments) -> str | None:
    device = jax.devices()[0]
    found = getattr(device, "compute_capability", device.platform)
    if not found.split(".")[0].isdecimal() or float(found) < _AMPERE:
        return (
            f"it runs on NVIDIA GPUs of compute capability {_AMPERE} and newer, found "
            f"{found}"
        )
    if find_spec("jax_triton") is None:
        return 'it needs jax-triton, which pip install "pliax[triton]" brings'
    sizes = arguments.kind.sizes(*arguments.arrays[:2])
    reason = _refused_by_kernels(arguments)
    if reason is None and math.prod(sizes) // min(sizes) >= 2**31:
        return f"it counts the elements of a matrix in 32 bits, found {sizes}"
    return reason


def _refused_by_kernels(arguments: Arguments) -> str | None:
    A, B, _ = arguments.arrays
    if A.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, found {A.dtype}"
    if not all(isinstance(n, int) for n in (*A.shape, *B.shape)):
        return f"it needs known sizes, found {A.shape}"
    if 0 in A.shape or 0 in B.shape:
        return f"it has no tiles to make of {A.shape}"
    if _is_explicit(arguments):
        return "it has no rule for Explicit axes: call it in jax.sharding.auto_axes"
    return None


def _is_explicit(arguments: Arguments) -> bool:
    given = jax.tree.leaves((arguments.arrays, arguments.factors))
    return any(jax.typeof(x).sharding.mesh.explicit_axes for x in given)


def _refused_unless_named(arguments: Arguments) -> str | None:
    """Where the fused kernel is not the default, though it runs."""
    if (reason := _refused_by_mosaic_gpu(arguments)) is not None:
        return reason
    A, B, C = arguments.arrays
    given = jax.tree.leaves((arguments.arrays, arguments.factors))
    if may_be_partitioned() or varying_axes(given):
        return "XLA cannot partition a kernel among several devices"
    rows, columns, _ = sizes = arguments.kind.sizes(A, B)
    stack = A.shape[:-2]
    smallest = _SMALLEST if C is None else _SMALLEST_WITH_ADDEND
    if min(sizes) < smallest or any(n % schedules.HALF for n in sizes):
        return "smaller products, and those of odd sizes, gain nothing"
    down, across = (-(-n // schedules.TILE) for n in (rows, columns))
    if rows * columns < _FILLED * across * down * schedules.TILE**2:
        return "its tiles would reach too far beyond the matrices"
    tiles = math.prod(stack) * across * down
    if tiles < MULTIPROCESSORS:
        return "so few tiles leave a part of the device without work"
    if not arguments.kind.is_symmetric:
        return None
    schedule = schedules.triangle(math.prod(stack), rows)
    share = _WORTHWHILE if C is None else _WITH_ADDEND
    if schedule.rounds > share * tiles / schedule.blocks:
        return "half of so few tiles takes the device as long as all"
    return None


BACKENDS = (
    Backend("xla", _run_xla, _anything, priority=1),
    # By name alone: where it was ahead of both others on an H200, small products, it
    # was so by 4 us at most; on other GPUs nobody has measured it.
    Backend("triton", _run_triton, _refused_by_triton, priority=0),
    Backend(
        "mosaic_gpu",
        _run_mosaic_gpu,
        _refused_by_mosaic_gpu,
        priority=2,
        options=("interpret",),
        by_default=Backend(
            "mosaic_gpu", _run_by_platform, _refused_unless_named, priority=2
        ),
    ),
)
