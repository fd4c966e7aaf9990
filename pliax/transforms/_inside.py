"""A function with sizes born from data inside another transformation.

Such a function is traced with symbols, and the padded program runs in place: under
`jax.jit` it is compiled with the rest, `jax.vmap` takes it apart as any other. Its
derivative is that of the function, not of the padded program, in which 0 times what the
padding holds may be NaN: so it is a function with a rule of its own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pliax.core.provenance import calling_place
from pliax.core.ragged import logical
from pliax.core.unbacked import with_unbacked

from ._families import is_integer
from ._leaves import on_leaves
from ._trace_errors import NotSymbolicError
from .padding.interpreter import run_whole
from .padding.layouts import Bucket
from .padding.rules import PaddingRefused
from .tracing import trace


def run_inside(f: Callable[..., Any], args: tuple, kwargs: dict, owner: str) -> Any:
    """What f returns for arguments that may be tracers.

    Raises:
        PaddingRefused: where it cannot be padded, or checks something at run time.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if not is_integer(x)]

    def of_arrays(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = logical((args, kwargs), owner)
        return f(*args, **kwargs)

    flat = on_leaves(of_arrays, leaves, tree, places)
    return _differentiable(flat, owner)(*(jnp.asarray(leaves[i]) for i in places))


def _padded(f: Callable[..., Any], owner: str) -> Callable[..., Any]:
    """F of arrays, run as a padded program; `Ragged` results."""

    def call(*arrays: Any) -> Any:
        avals = [jax.typeof(x) for x in arrays]
        try:
            found = trace(f, lambda _: (tuple(avals), {}), (), owner=owner)
        except NotSymbolicError as error:
            raise error.original from error.original.__cause__
        ranges = with_unbacked(found.assumptions, {})
        bucket = Bucket(ranges, {}, found.equal)
        given = [bucket.exact(arrays[i]) for i in found.inputs]
        data = run_whole(bucket, found.jaxpr, found.consts, given)
        if bucket.checks:
            reason = "inside another transformation nobody can raise what it checks"
            text, _ = bucket.checks[0]
            reason = f"{reason} at run time ({text})"
            raise PaddingRefused("check", reason, calling_place())
        return jax.tree.unflatten(found.out_tree, data)

    return call


def _differentiable(f: Callable[..., Any], owner: str) -> Callable[..., Any]:
    """F as a padded program whose derivative is one, too."""
    call = jax.custom_vjp(_padded(f, owner))

    def forward(*arrays: Any) -> tuple[Any, Any]:
        return call(*arrays), arrays

    def backward(arrays: Any, cotangents: Any) -> Any:
        floating = [i for i, x in enumerate(arrays) if _is_floating(x)]
        given = [x for x in jax.tree.leaves(cotangents) if _is_floating(x)]

        def pull(arrays: Any, given: Any) -> Any:
            def some(*parts: Any) -> list[Any]:
                values = list(arrays)
                for i, x in zip(floating, parts, strict=True):
                    values[i] = x
                return [x for x in jax.tree.leaves(f(*values)) if _is_floating(x)]

            results, transpose = jax.vjp(some, *(arrays[i] for i in floating))
            return transpose([_cut(x, r) for x, r in zip(given, results, strict=True)])

        count = len(arrays)
        found = _differentiable(lambda *x: pull(x[:count], x[count:]), owner)
        gradients = dict(zip(floating, found(*arrays, *given), strict=True))
        return tuple(gradients.get(i) for i in range(count))

    call.defvjp(forward, backward)
    return call


def _cut(x: Any, like: Any) -> Any:
    """The valid part of the cotangent of an array whose size is born from data."""
    limits = [n if m != n else m for n, m in zip(like.shape, x.shape, strict=True)]
    return lax.slice(x, [0] * x.ndim, limits)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", jnp.int32), jnp.inexact)
