"""alpha A B + beta C + gamma I on NVIDIA GPUs: a kernel of Triton's.

One program makes one tile of 128 x 128. Of a symmetric product it makes those on and
below the diagonal, and stores each a second time, transposed. The kernel for Hopper
GPUs is a rival of it, with which it shares the order of the tiles.
"""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]  # not this module
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Array, Float

from pliax.kernels._jax_triton import triton_call

from .backends import Kind
from .schedules import TILE, rectangle, triangle


DEPTH = 64  # of the pieces that a program multiplies at a time
WARPS, STAGES = 8, 4


def add_product(
    A: Float[Array, "L _ _"],
    B: Float[Array, "L _ _"],
    C: Float[Array, "L M N"] | None,
    factors: Float[Array, "L 3"],
    *,
    kind: Kind,
) -> Float[Array, "L M N"]:
    """The sum alpha A B + beta C + gamma I, C zero if it is None.

    A or B is given as its transpose if the kind says so.
    """
    L, (M, N, K) = len(A), kind.sizes(A, B)
    schedule = triangle(L, M) if kind.is_symmetric else rectangle(L, M, N)
    return triton_call(
        A,
        B,
        A if C is None else C,
        factors,
        jnp.asarray(schedule.order.reshape(-1)),
        kernel=_make_tile,
        out_shape=jax.ShapeDtypeStruct((L, M, N), A.dtype),
        grid=(L * schedule.tiles,),
        num_warps=WARPS,
        num_stages=STAGES,
        tiles=schedule.tiles,
        M=M,
        N=N,
        K=K,
        left_turned=kind.transposed == "left",
        right_turned=kind.transposed == "right",
        has_addend=C is not None,
        has_shift=kind.has_shift,
        is_symmetric=kind.is_symmetric,
        SIDE=TILE,
        DEEP=DEPTH,
    )


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def _make_tile(
    A, B, C, factors, order, result,
    tiles: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    left_turned: tl.constexpr, right_turned: tl.constexpr,
    has_addend: tl.constexpr, has_shift: tl.constexpr, is_symmetric: tl.constexpr,
    SIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """One tile of one matrix; of a symmetric one also that across the diagonal."""
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    at = tl.program_id(0) % tiles
    row, column = tl.load(order + 2 * at), tl.load(order + 2 * at + 1)
    rows = row * SIDE + tl.arange(0, SIDE)
    columns = column * SIDE + tl.arange(0, SIDE)
    A += matrix * M * K
    B += matrix * K * N
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, K, DEEP):
        deep = start + tl.arange(0, DEEP)
        a = _piece(A, rows, deep, M, K, left_turned, SIDE, DEEP)
        b = _piece(B, deep, columns, K, N, right_turned, DEEP, SIDE)
        total = tl.dot(a, b, total)
    alpha = tl.load(factors + 3 * matrix)
    total = tl.where(alpha == 0, 0.0, total * alpha)
    if has_shift:
        shift = tl.load(factors + 3 * matrix + 2)
        total = tl.where(rows[:, None] == columns[None, :], total + shift, total)
    if has_addend:
        c = _piece(C + matrix * M * N, rows, columns, M, N, False, SIDE, SIDE)
        total += tl.load(factors + 3 * matrix + 1) * c.to(tl.float32)
    found = total.to(result.dtype.element_ty)
    result += matrix * M * N
    is_there = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(result + rows[:, None] * N + columns[None, :], found, is_there)
    if is_symmetric:  # noqa: SIM102  # known when it is compiled
        if row != column:
            is_there = (columns[:, None] < N) & (rows[None, :] < M)
            across = result + columns[:, None] * N + rows[None, :]
            tl.store(across, tl.trans(found), is_there)


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def _piece(
    X, rows, columns, M: tl.constexpr, N: tl.constexpr, is_turned: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A part of X, or of the transpose that lies there; zero beyond its edges."""
    if is_turned:
        places = X + rows[:, None] + columns[None, :] * M
    else:
        places = X + rows[:, None] * N + columns[None, :]
    if M % HIGH == 0 and N % WIDE == 0:
        return tl.load(places)
    is_there = (rows[:, None] < M) & (columns[None, :] < N)
    return tl.load(places, is_there, 0.0)
