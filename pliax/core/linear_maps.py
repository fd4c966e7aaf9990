"""Linear maps with a transpose of their own: what a kernel's derivative is made of.

    linear_map(function, transpose, residuals, x)  =  function(residuals, x)

Forward mode evaluates `function`. Reverse mode never does: it calls `transpose` with
the residuals and the cotangents. So a `jax.custom_jvp` rule that ends in a linear map
has a fast backward pass and still every other derivative, which neither
`jax.custom_vjp` (no forward mode) nor `linear_call` (no `vmap`) has.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._jax import Primitive, ad, batching, mlir


def linear_map(
    function: Callable[[Any, Any], Any],
    transpose: Callable[[Any, Any], Any],
    residuals: Any,
    x: Any,
    like: Any = None,
) -> Any:
    """`function(residuals, x)`, which is linear in `x`.

    Args:
        function: `(residuals, x) -> y`, differentiable in both.
        transpose: `(residuals, cotangent of y) -> cotangent of x`.
        residuals: A pytree of arrays.
        x: A pytree of floating arrays.
        like: Arrays of the types of the result, which is found by a trace without them.
    """
    leaves, structure = jax.tree.flatten((residuals, x))
    count = len(jax.tree.leaves(residuals))
    results = jax.eval_shape(function, residuals, x) if like is None else like
    avals = None if like is None else tuple(map(jax.typeof, jax.tree.leaves(like)))

    def flat_function(*values: Any) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, values)))

    def flat_transpose(values: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        zeros = [jnp.zeros_like(a) for a in leaves[count:]]
        known, _ = jax.tree.unflatten(structure, [*values, *zeros])
        y = jax.tree.unflatten(jax.tree.structure(results), cotangents)
        return jax.tree.leaves(transpose(known, y))

    y = _linear_map_p.bind(
        *leaves,
        function=flat_function,
        transpose=flat_transpose,
        residuals=count,
        avals=avals,
    )
    return jax.tree.unflatten(jax.tree.structure(results), y)


def _evaluate(*values: Any, function: Any, **_: Any) -> Any:
    return function(*values)


def _shapes(*operands: Any, function: Any, avals: Any, **_: Any) -> Any:
    return jax.make_jaxpr(function)(*operands).out_avals if avals is None else avals


def _jvp(
    primals: Any, tangents: Any, *, function: Any, residuals: int, **rest: Any
) -> Any:
    parameters = {"residuals": residuals, "function": function, **rest}
    dense = tuple(ad.instantiate_zeros(t) for t in tangents)
    known, x = primals[:residuals], primals[residuals:]
    y_dot = _linear_map_p.bind(*known, *dense[residuals:], **parameters)
    if not all(isinstance(t, ad.Zero) for t in tangents[:residuals]):
        of_known = jax.jvp(
            lambda *known: function(*known, *x), known, dense[:residuals]
        )
        y_dot = [a + b for a, b in zip(y_dot, of_known[1], strict=True)]
    return _linear_map_p.bind(*primals, **parameters), y_dot


def _transposed(
    cotangents: Any, *values: Any, transpose: Any, residuals: int, **_: Any
) -> Any:
    known = tuple(values[:residuals])
    dense = [ad.instantiate_zeros(ct) for ct in cotangents]
    unknown = zip(values[residuals:], transpose(known, dense), strict=True)
    found = [ct if ad.is_undefined_primal(x) else None for x, ct in unknown]
    return [None] * residuals + found


def _batched(
    values: Any, axes: Any, *, function: Any, transpose: Any, residuals: int, **_: Any
) -> Any:
    """Residuals that are not mapped stay as they are."""
    size = next(x.shape[a] for x, a in zip(values, axes, strict=True) if a is not None)
    values = [
        x if a is None else jnp.moveaxis(x, a, 0)
        for x, a in zip(values, axes, strict=True)
    ]
    known, x = values[:residuals], values[residuals:]
    pairs = zip(x, axes[residuals:], strict=True)
    x = [jnp.broadcast_to(x, (size, *x.shape)) if a is None else x for x, a in pairs]
    of_known = tuple(None if a is None else 0 for a in axes[:residuals])
    y = _linear_map_p.bind(
        *known,
        *x,
        function=jax.vmap(function, (*of_known, *[0] * len(x))),
        transpose=jax.vmap(transpose, (of_known, 0)),
        residuals=residuals,
        avals=None,
    )
    return y, [0] * len(y)


_linear_map_p = Primitive("linear_map")
_linear_map_p.multiple_results = True
_linear_map_p.def_impl(_evaluate)
_linear_map_p.def_abstract_eval(_shapes)
ad.primitive_jvps[_linear_map_p] = _jvp
ad.primitive_transposes[_linear_map_p] = _transposed
batching.primitive_batchers[_linear_map_p] = _batched
mlir.register_lowering(_linear_map_p, mlir.lower_fun(_evaluate, multiple_results=True))
