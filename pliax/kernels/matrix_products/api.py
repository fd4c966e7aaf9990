"""symmetric_matmul and add_matmul: what is checked, and which backend runs."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pliax.kernels._backends import check_options, choose, integer_options

from . import derivatives, xla
from .backends import BACKENDS, Arguments, Kind
from .derivatives import Static


def symmetric_matmul(
    X: Any,
    C: Any = None,
    *,
    alpha: Any = 1.0,
    beta: Any = 1.0,
    gamma: Any = 0.0,
    transpose: bool = False,
    precision: Any = None,
    implementation: str | None = None,
    kernel_options: Any = None,
) -> Any:
    r"""Gram matrices, at half of the work where a fused kernel runs.

    .. math:: \alpha X X^\top + \beta C + \gamma I

    For a symmetric `A`, ``symmetric_matmul(A, A, alpha=c, beta=b)`` is ``b A + c A A``.
    The fused kernel computes the tiles on one side of the diagonal and writes both.
    Sums are float32 (float64 for float64), and the result is rounded once.

    Args:
        X: Matrices, [\*L, M, K], floating.
        C: Symmetric matrices of the result's shape and dtype; None for zero. The fused
            kernel reads the tiles on one side of the diagonal alone: of a C that is not
            symmetric the result's upper triangle may have either.
        alpha: Factor of the products: a number, or one for each matrix, [\*L]. As in
            BLAS 0 leaves the product out, whatever it is; not so in derivatives.
        beta: Factor of C, likewise.
        gamma: Factor of the identity matrix, likewise.
        transpose: Whether products are X^T X, [\*L, K, K], of X as it lies in memory.
        precision: Of float32 and float64 products, as `jax.numpy.matmul` takes it.
        implementation: "xla" (the full product, on any platform), "mosaic_gpu" (half
            of the tiles, for Hopper GPUs, bfloat16 and float16) or "triton" (likewise,
            for NVIDIA GPUs from Ampere on; `pip install "pliax[triton]"`). None takes
            the kernel for Hopper where there is one such GPU, or the program is that
            of one of several, and the matrices gain by it: rows and depth of at least
            512, or 128 with a C, multiples of 64, of which tiles of 128 are filled to
            90%, and enough of them for the device; else "xla". A name never falls back.
        kernel_options: For "mosaic_gpu": `interpret`, 1 to run the kernel in JAX's
            interpreter, on any device, slowly.

    Returns:
        Symmetric matrices, [\*L, M, M] or, of X^T X, [\*L, K, K], in X's dtype:
        to the last bit where the fused kernel runs, elsewhere up to rounding.

    Raises:
        ValueError: If shapes, dtypes or options do not fit.
        TypeError: If an argument is no floating array.
        NotImplementedError: If the named implementation refuses the arguments.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pliax as px
        >>> X = jnp.array([[1.0, 2.0], [0.0, 1.0]])
        >>> px.kernels.symmetric_matmul(X, jnp.eye(2), beta=10.0)
        Array([[15.,  2.],
               [ 2., 11.]], dtype=float32)

    References:
        Dongarra et al., "A set of level 3 basic linear algebra subprograms", 1990,
        where it is SYRK.
    """
    operation = "symmetric_matmul"
    X = _matrices(operation, "X", X)
    kind = Kind(
        is_symmetric=True,
        transposed="left" if transpose else "right",
        has_shift=not _is(gamma, 0),
        has_scale=not _is(alpha, 1),
    )
    if C is not None:
        C = _addend(operation, C, X, kind.sizes(X, X)[0])
    factors = (("alpha", alpha), ("beta", beta), ("gamma", gamma))
    factors = tuple(_factor(operation, name, x, X) for name, x in factors)
    options = integer_options(operation, kernel_options)
    backend = choose(
        operation,
        BACKENDS,
        Arguments((X, X, C), factors, kind, options),
        implementation,
    )
    check_options(operation, backend, options)
    static = Static(backend, kind, precision, tuple(sorted(options.items())))
    return derivatives.gram(static, X, C, factors)


def add_matmul(
    A: Float[Array, "*L M K"],
    B: Float[Array, "*L K N"],
    C: Float[Array, "*L M N"] | None = None,
    *,
    alpha: Any = 1.0,
    beta: Any = 1.0,
    gamma: Any = 0.0,
    commute: bool = False,
    precision: Any = None,
    implementation: str | None = None,
    kernel_options: Any = None,
) -> Array:
    """The sum alpha A B + beta C + gamma I, rounded once, in one pass over memory.

    XLA leaves the sum to a second kernel: on an H200 72 products of (896, 896) with
    (896, 4864) take 1.56 ms so, and 0.94 ms here. If A and B are symmetric and
    `commute`, so is A B, of which one side of the diagonal is made then. Other options
    are those of `symmetric_matmul`, but that an alpha of 0 may not leave out a product
    that overflows if it does not `commute`.
    """
    operation = "add_matmul"
    factors = (("alpha", alpha), ("beta", beta), ("gamma", gamma))
    factors = tuple(_factor(operation, name, x, A) for name, x in factors)
    options = integer_options(operation, kernel_options)
    kind = Kind(
        commute,
        has_shift=not _is(gamma, 0),
        has_scale=not _is(alpha, 1),
    )
    backend = choose(
        operation,
        BACKENDS,
        Arguments((A, B, C), factors, kind, options),
        implementation,
    )
    static = Static(backend, kind, precision, tuple(sorted(options.items())))
    return derivatives.added(static, A, B, C, factors)


def gram_is_fused(X: Any) -> bool:
    """Whether X X^T takes the fused kernel, of X of this shape and dtype."""
    arguments = Arguments((X, X, None), (), Kind(True, "right"), {})
    return choose("symmetric_matmul", BACKENDS, arguments, None).name != "xla"


# --- boundary -------------------------------------------------------------------------


def _matrices(operation: str, name: str, x: Any) -> Array:
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        found = getattr(x, "dtype", type(x).__name__)
        raise TypeError(
            f"{operation}: {name} must be a floating array, found {found}.\n"
            f"Pass jnp.asarray({name}, dtype) with a floating dtype."
        )
    if x.ndim < 2:
        raise ValueError(
            f"{operation}: {name} must be matrices [*L, M, K], found shape {x.shape}.\n"
            f"Give a vector its second axis: {name}[:, None]."
        )
    return jnp.asarray(x)


def _addend(operation: str, C: Any, X: Array, rows: int) -> Array:
    C = _matrices(operation, "C", C)
    wanted = jax.ShapeDtypeStruct((*X.shape[:-2], rows, rows), X.dtype)
    if C.shape != wanted.shape or C.dtype != wanted.dtype:
        raise ValueError(
            f"{operation}: X {_described(X)} wants C {_described(wanted)}, found "
            f"{_described(C)}.\nBroadcast or cast C first."
        )
    return C


def _is(factor: Any, number: int) -> bool:
    return isinstance(factor, int | float) and factor == number


def _described(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _factor(operation: str, name: str, x: Any, X: Array) -> Array:
    """A number for each matrix."""
    stack = X.shape[:-2]
    dtype = getattr(x, "dtype", None)
    kinds = jnp.floating, jnp.integer, jnp.bool_
    is_real = isinstance(x, int | float) or (
        dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)
    )
    if not is_real or jnp.shape(x) not in ((), stack):
        found = repr(x) if dtype is None else _described(x)
        raise ValueError(
            f"{operation}: {name} must be a real number, or an array of one for each "
            f"matrix, of shape {stack}, found {found}."
        )
    return jnp.broadcast_to(jnp.asarray(x, xla.sums_dtype(X.dtype)), stack)
