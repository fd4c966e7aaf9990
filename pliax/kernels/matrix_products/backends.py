"""Who computes alpha A B + beta C, and where each is the default."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pliax.core.manual_axes import varying_axes
from pliax.kernels._backends import Backend
from pliax.kernels._hopper import refused_counting, refused_device

from . import schedules, xla


# Of the time a full product takes: a round of the kernel takes up to a tenth longer
# than one of the library's, which has larger tiles. With an addend XLA's second kernel
# takes as long again.
_WORTHWHILE, _WITH_ADDEND = 0.8, 1.0
_SMALLEST = 512  # rows, columns and depth: smaller ones were not faster
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


def _run_mosaic_gpu(
    A: Array,
    B: Array,
    C: Any,
    factors: Factors,
    *,
    kind: Kind,
    precision: Any,  # products of half-precision numbers are exact
    interpret: int = 0,
) -> Array:
    fused = partial(_fused, kind=kind, interpret=interpret > 0)
    numbers = jnp.stack(factors, axis=-1).astype(jnp.float32)
    return _over_stacks(fused)(A, B, C, numbers)


def _fused(
    A: Array, B: Array, C: Any, factors: Array, *, kind: Kind, interpret: bool
) -> Array:
    from . import mosaic_gpu  # loads Pallas, which takes a second

    if 0 in A.shape:  # after vmap over nothing
        return jnp.zeros((*A.shape[:-2], *kind.sizes(A, B)[:2]), A.dtype)
    left, right = _as_stack(A, 2), _as_stack(B, 2)
    rest = None if C is None else _as_stack(C, 2), _as_stack(factors, 1)
    found = mosaic_gpu.add_product(left, right, *rest, kind=kind, interpret=interpret)
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
    A, B, _ = arguments.arrays
    if "interpret" not in arguments.options and (reason := refused_device()):
        return reason
    if A.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, found {A.dtype}"
    if not all(isinstance(n, int) for n in (*A.shape, *B.shape)):
        return f"it needs known sizes, found {A.shape}"
    if 0 in A.shape or 0 in B.shape:
        return f"it has no tiles to make of {A.shape}"
    return refused_counting()


def _refused_unless_named(arguments: Arguments) -> str | None:
    """Where the fused kernel is not the default, though it runs."""
    if (reason := _refused_by_mosaic_gpu(arguments)) is not None:
        return reason
    A, B, C = arguments.arrays
    given = jax.tree.leaves((arguments.arrays, arguments.factors))
    is_explicit = any(jax.typeof(x).sharding.mesh.explicit_axes for x in given)
    if jax.device_count() > 1 or varying_axes(given) or is_explicit:
        return "XLA cannot partition a kernel among several devices"
    rows, columns, _ = sizes = arguments.kind.sizes(A, B)
    stack = A.shape[:-2]
    if min(sizes) < _SMALLEST or any(n % schedules.HALF for n in sizes):
        return "smaller products, and those of odd sizes, gain nothing"
    down, across = (-(-n // schedules.TILE) for n in (rows, columns))
    if rows * columns < _FILLED * across * down * schedules.TILE**2:
        return "its tiles would reach too far beyond the matrices"
    tiles = math.prod(stack) * across * down
    if tiles < schedules.MULTIPROCESSORS:
        return "so few tiles leave a part of the device without work"
    if not arguments.kind.is_symmetric:
        return None
    schedule = schedules.triangle(math.prod(stack), rows)
    share = _WORTHWHILE if C is None else _WITH_ADDEND
    if schedule.rounds > share * tiles / schedule.blocks:
        return "half of so few tiles takes the device as long as all"
    return None


BACKENDS = (
    Backend("xla", _run_xla, _anything, priority=0),
    Backend(
        "mosaic_gpu",
        _run_mosaic_gpu,
        _refused_by_mosaic_gpu,
        priority=1,
        options=("interpret",),
        by_default=Backend(
            "mosaic_gpu", _run_by_platform, _refused_unless_named, priority=1
        ),
    ),
)
