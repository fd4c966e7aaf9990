"""Associative scans along an axis of symbolic size: JAX's, in the bucket.

    scanned : combination, elements  ->  each with all before it, bit for bit

JAX combines slices of an axis, pairs first, then pairs of pairs. In which order it does
so for one element depends on none of those that follow, so the scan is that of the
bucket; what ends in its padding is 0 and has no derivative. JAX asks for a combination
that is "applied elementwise over the axis dimension" (`jax.lax.associative_scan`), of
slices of any length. So it is traced once for slices of one element, and mapped along
the axis.

A derivative in the padding of another axis, or in that of a captured array, may not be
finite. Where it would be summed with others, by the derivatives of what combines along
such an axis or captures, there is none in a bucket: 0 times infinity is NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .conditions import is_one, is_unknown
from .evaluation import evaluate
from .padded_calls import InBucket, mentions_size, padded_call
from .primitives import is_elementwise


def scanned(combine: Callable[..., Any], elems: Any, reverse: bool, axis: int) -> Any:
    """The scan of `jax.lax.associative_scan`.

    Args:
        combine: of two slices of the elements; it may capture arrays.
        elems: a pytree of arrays.
        reverse: whether to combine with all after it.
        axis: one of symbolic size, the same in all arrays.

    Raises:
        TypeError: where the combination is of another type than the elements.
    """
    leaves, tree = jax.tree.flatten(elems)
    n = leaves[0].shape[axis]
    if _keeps_weak_type(n, leaves):
        return elems
    # As in JAX, which counts axes from the end only where it does not reverse.
    leaves = [lax.rev(x, (axis,)) for x in leaves] if reverse else leaves
    axis %= leaves[0].ndim
    program, captured = _traced(combine, tree, leaves, axis)

    def run(bucket: InBucket, leaves: list[Any], captured: list[Any]) -> list[Any]:
        def join(left: list[Any], right: list[Any]) -> list[Any]:
            def one(left: list[Any], right: list[Any]) -> list[Any]:
                args = [jnp.expand_dims(x, axis) for x in (*left, *right)]
                results = bucket.evaluated(program, [*captured, *args])
                return [lax.squeeze(x, (axis,)) for x in results]

            return jax.vmap(one, axis, axis)(left, right)

        if not bucket.is_padded(n):
            return lax.associative_scan(join, leaves, axis=axis)
        shape = [1] * axis + [leaves[0].shape[axis]]
        inside = lax.broadcasted_iota(jnp.int32, shape, axis) < bucket.count(n)
        among_valid = _among_valid(join)
        return lax.associative_scan(among_valid, (leaves, inside), axis=axis)[0]

    types = [jax.typeof(x).update(weak_type=False) for x in leaves]
    args, name = (leaves, captured), "associative_scan"
    stays = not mentions_size(program.jaxpr) or is_elementwise(program.jaxpr)
    moves = (stays,) * len(leaves) + (False,) * len(captured)
    found = padded_call(name, run, args, types, is_differentiable=moves)
    found = [lax.rev(x, (axis,)) for x in found] if reverse else found
    return jax.tree.unflatten(tree, found)


def _keeps_weak_type(n: Any, leaves: Sequence[Any]) -> bool:
    """Whether JAX returns what it was given: a trace of its own, for weak types alone.

    What only the device knows is taken for more than one element.
    """
    is_weak = any(jax.typeof(x).weak_type for x in leaves)
    return is_weak and not is_unknown(n == 1) and is_one(n)


def _traced(
    combine: Callable[..., Any], tree: Any, leaves: Sequence[Any], axis: int
) -> tuple[Any, list[Any]]:
    """The program of captured arrays, left and right, for slices of one element."""

    def flat(left: list[Any], right: list[Any]) -> list[Any]:
        return jax.tree.leaves(combine(tree.unflatten(left), tree.unflatten(right)))

    types: list[Any] = [jax.typeof(x) for x in leaves]
    ones = [t.update(shape=(*t.shape[:axis], 1, *t.shape[axis + 1 :])) for t in types]
    made = jax.make_jaxpr(flat)(ones, ones)
    captured = list(made.consts)

    def wide(*args: Any) -> list[Any]:
        k = len(captured)
        return evaluate(made.jaxpr, args[:k], args[k:])

    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in captured]
    avals: list[Any] = [v.aval for v in made.jaxpr.outvars]
    found, wanted = (
        [f"{t.dtype}{list(t.shape)}" for t in each] for each in (avals, ones)
    )
    if found != wanted:
        raise TypeError(
            f"associative_scan: fn returned {', '.join(found)} for slices of one "
            f"element, {', '.join(wanted)}.\nReturn what it was given, in shape, dtype "
            "and structure."
        )
    return jax.make_jaxpr(wide)(*given, *ones, *ones), captured


def _among_valid(join: Callable[..., Any]) -> Callable[..., Any]:
    """The combination of two parts of a scan, if the last element of both is valid.

    What is not does not reach `join`: its derivative there may be infinite.
    """

    def chosen(inside: Any, xs: Sequence[Any]) -> list[Any]:
        masks = [lax.expand_dims(inside, range(inside.ndim, x.ndim)) for x in xs]
        return [
            jnp.where(m, x, jnp.zeros_like(x)) for m, x in zip(masks, xs, strict=True)
        ]

    def joined(left: Any, right: Any) -> Any:
        (a, _), (b, inside) = left, right
        return chosen(inside, join(chosen(inside, a), chosen(inside, b))), inside

    return joined
