"""Matrix decompositions: of padded batches; and where exact, of padded matrices.

A matrix in its bucket becomes blockdiag(A, I), and where padding is in a batch, I. What
reads A column by column (Cholesky, triangular solves, LU with pivots) computes the same
numbers for A; the iterative algorithms see a matrix that is done at once. Where every
entry of the result depends on every row and on their number, padded matrices are
refused.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pliax.core.dims import Size

from .contractions import zero
from .layouts import Bucket, Factors, Padded, choose, product, same_factors
from .reductions import same_size
from .rules import bind, refuse, rule, sizes_of, static


# How many trailing axes of each operand are one problem; the others are a batch.
_RANKS = {
    "cholesky": (2,),
    "cholesky_update": (2, 1),
    "eig": (2,),
    "eigh": (2,),
    "geqp3": (2, 1),
    "geqrf": (2,),
    "hessenberg": (2,),
    "householder_product": (2, 1),
    "lu": (2,),
    "lu_pivots_to_permutation": (1,),
    "ormqr": (2, 1, 2),
    "qr": (2,),
    "schur": (2,),
    "svd": (2,),
    "symmetric_product": (2, 2),
    "triangular_solve": (2, 2),
    "tridiagonal": (2,),
}
_EMBEDDED = {"cholesky", "lu", "lu_pivots_to_permutation", "triangular_solve"}

_EIGENVALUES = "eigenvalues depend on every row, and on how many there are"
_REFLECTORS = "each reflector depends on every row"
_REASONS = {
    "eig": _EIGENVALUES,
    "eigh": _EIGENVALUES,
    "geqp3": _REFLECTORS,
    "geqrf": _REFLECTORS,
    "hessenberg": _REFLECTORS,
    "householder_product": _REFLECTORS,
    "ormqr": _REFLECTORS,
    "qr": _REFLECTORS,
    "schur": _EIGENVALUES,
    "svd": "singular values depend on every row, and on how many there are",
    "tridiagonal": _REFLECTORS,
}


@rule(*_RANKS)
def decomposition(bucket: Bucket, eqn: Any, *operands: Padded) -> list[Padded]:
    """Problem by problem, with a harmless one wherever there is padding."""
    ranks = _RANKS[eqn.primitive.name]
    xs = _with_one_batch(bucket, operands, ranks)
    cores = [x.axes[x.rank - r :] for x, r in zip(xs, ranks, strict=True)]
    if not all(same_size(bucket, axis) for core in cores for axis in core):
        xs = _embedded(bucket, eqn, xs)
    data = [_harmless(bucket, eqn, i, x) for i, x in enumerate(xs)]
    sizes = {k: bucket.length(n) for k, n in eqn.params.items() if isinstance(n, Size)}
    results = bind(eqn, *data, **sizes)
    results = results if eqn.primitive.multiple_results else [results]
    batch = xs[0].axes[: xs[0].rank - ranks[0]]
    pairs = zip(results, eqn.outvars, strict=True)
    return [_result(bucket, eqn, x, v, batch) for x, v in pairs]


@rule("tridiagonal_solve")
def tridiagonal_solve(
    bucket: Bucket, eqn: Any, low: Padded, main: Padded, high: Padded, right: Padded
) -> Padded:
    """The system, and beyond it one of ones on the diagonal that nothing ties to it."""
    operands = (low, main, high, right)
    low, main, high, right = _with_one_batch(bucket, operands, (1, 1, 1, 2))
    size = main.axes[-1]
    low, high = (bucket.arranged(x, main.axes) for x in (low, high))
    right = bucket.arranged(right, (*main.axes, right.axes[-1]))
    last = lax.broadcasted_iota(jnp.int32, high.data.shape, high.data.ndim - 1)
    ties = lax.lt(last, lax.full_like(last, bucket.scalar(size[0]) - 1))
    high = Padded(lax.select(ties, high.data, lax.full_like(high.data, 0)), high.axes)
    filled = [bucket.filled(x, zero(x)).data for x in (low, high, right)]
    low_data, high_data, right_data = filled
    one = main.dtype.type(1).item()
    result = bind(eqn, low_data, bucket.filled(main, one).data, high_data, right_data)
    return Padded(result, right.axes)


@rule("fft")
def fft(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """Along the last axes, row by row."""
    batch = x.rank - len(eqn.params["fft_lengths"])
    for axis in range(batch, x.rank):
        x = bucket.packed(x, axis)
        if not same_size(bucket, x.axes[axis]):
            reason = "every frequency depends on its length"
            raise refuse(eqn, f"{_over([x.axes[axis]])}: {reason}")
    lengths = static(bucket, eqn.params["fft_lengths"])
    return _result(
        bucket,
        eqn,
        bind(eqn, x.data, fft_lengths=lengths),
        eqn.outvars[0],
        x.axes[:batch],
    )


def _with_one_batch(
    bucket: Bucket, operands: Sequence[Padded], ranks: Sequence[int]
) -> list[Padded]:
    """Operands with the same batch axes, and one factor for each axis of a problem."""
    first = operands[0]
    batch = [
        bucket.common([x.axes[i] for x in operands])
        for i in range(first.rank - ranks[0])
    ]
    return [
        bucket.arranged(x, [*batch, *_plain(bucket, x.axes[len(batch) :])])
        for x in operands
    ]


def _plain(bucket: Bucket, axes: Sequence[Factors]) -> list[Factors]:
    return [(bucket.size(product(axis)),) for axis in axes]


def _embedded(bucket: Bucket, eqn: Any, xs: list[Padded]) -> list[Padded]:
    """Operands whose padded axes meet in one size, where that is enough."""
    name = eqn.primitive.name
    if name not in _EMBEDDED:
        reason = _REASONS.get(name, "there is no rule for it yet")
        cores = [x.axes[x.rank - r :] for x, r in zip(xs, _RANKS[name], strict=True)]
        raise refuse(eqn, f"{_over(axis for core in cores for axis in core)}: {reason}")
    if name == "lu_pivots_to_permutation":
        return xs
    a, *others = xs
    size = a.axes[-2]
    if name == "lu" and not same_factors(size, a.axes[-1]):
        raise refuse(eqn, f"{_over(a.axes[-2:])}: a padded matrix must be square")
    a = bucket.arranged(a, (*a.axes[:-1], size))
    return [a, *(_meeting(bucket, eqn, b, size) for b in others)]


def _over(axes: Iterable[Factors]) -> str:
    """Names the padded ones among some axes, which have one factor each."""
    names = dict.fromkeys(str(n) for (n,) in axes if isinstance(n, Size))
    return "over " + " and ".join(f'dimension "{name}"' for name in names)


def _meeting(bucket: Bucket, eqn: Any, b: Padded, size: Factors) -> Padded:
    """The right-hand sides of a triangular system of this size."""
    axis = b.rank - (2 if eqn.params["left_side"] else 1)
    return bucket.arranged(b, (*b.axes[:axis], size, *b.axes[axis + 1 :]))


def _harmless(bucket: Bucket, eqn: Any, position: int, x: Padded) -> Any:
    """An operand with ones on the diagonal of its padding, 0 in that of vectors.

    Pivots stay in place. Right-hand sides are 0.
    """
    mask = bucket.valid(x.axes)
    if mask is None:
        return x.data
    rank = _RANKS[eqn.primitive.name][position]
    last = lax.broadcasted_iota(jnp.int32, x.data.shape, x.data.ndim - 1)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return choose(mask, x.data, lax.convert_element_type(last, x.dtype))
    if rank == 1 or (eqn.primitive.name == "triangular_solve" and position):
        return bucket.filled(x, zero(x)).data
    row = lax.broadcasted_iota(jnp.int32, x.data.shape, x.data.ndim - 2)
    return choose(mask, x.data, lax.convert_element_type(lax.eq(row, last), x.dtype))


def _result(
    bucket: Bucket, eqn: Any, x: Any, variable: Any, batch: Sequence[Factors]
) -> Padded:
    sizes = sizes_of(variable)[len(batch) :]
    axes = (*batch, *((bucket.size(n),) for n in sizes))
    if x.shape[x.ndim - len(sizes) :] != bucket.shape(sizes):
        raise refuse(eqn, f"a result of sizes {sizes} in a bucket of {x.shape}")
    return Padded(x, axes)
