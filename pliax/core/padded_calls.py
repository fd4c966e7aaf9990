"""Functions that run in a bucket by themselves: one equation in a symbolic trace.

    padded_call : function, arguments, shapes of results  ->  results

What a kernel is made of for all sizes at once is the plainest of its forms. So where a
size is symbolic its call stays one equation, and is traced when the bucket is known:
the function gets physical arrays, 0 in all their padding, and says itself what of them
is valid. The padding transform has a rule for the primitive; this is how a kernel, or
an operation of the user's, enters one without either knowing the other.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from ._jax import Primitive, batching
from .dims import Size
from .jaxprs import ClosedFunction


@runtime_checkable
class InBucket(Protocol):
    """What a function may ask while it runs on padded arrays."""

    def is_padded(self, size: Any) -> bool:
        """Whether arrays are longer than this size says."""
        ...

    def length(self, size: Any) -> int:
        """How many elements an array has along an axis of this size."""
        ...

    def count(self, size: Any) -> Any:
        """How many of them are valid, an int32 scalar."""
        ...

    def exact(self, size: Any, name: str) -> int:
        """A size that must not be padded; refuses the program where it is."""
        ...

    def closed(self, function: ClosedFunction) -> ClosedFunction:
        """A function of scalars that captured arrays, on the padded ones."""
        ...


def has_size(tree: Any) -> bool:
    """Whether an array in a pytree, or a static part of it, has a symbolic size."""
    leaves, structure = jax.tree.flatten(tree)
    shapes = (n for x in leaves for n in getattr(x, "shape", ()))
    return any(isinstance(n, Size) for n in shapes) or _mentions_size(structure)


def _mentions_size(structure: Any) -> bool:
    """Whether a function among the nodes was traced for symbolic sizes."""
    data = structure.node_data()
    own = data[1] if data else None
    return _is_symbolic(own) or any(map(_mentions_size, structure.children()))


def _is_symbolic(static: Any) -> bool:
    if isinstance(static, tuple | list):
        return any(map(_is_symbolic, static))
    jaxpr = getattr(static, "jaxpr", None)
    return isinstance(static, Size) or (jaxpr is not None and mentions_size(jaxpr))


def mentions_size(jaxpr: Any) -> bool:
    """Whether a program computes with a size, or with an array of such a shape."""
    variables = (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars)
    seen = [*variables, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    if any(isinstance(n, Size) for v in seen for n in getattr(v.aval, "shape", ())):
        return True
    inner = (x for eqn in jaxpr.eqns for x in _programs(list(eqn.params.values())))
    return any(map(mentions_size, inner)) or any(
        isinstance(x, Size) for eqn in jaxpr.eqns for x in eqn.params.values()
    )


def _programs(values: Sequence[Any]) -> list[Any]:
    found = []
    for value in values:
        if isinstance(value, list | tuple):
            found += _programs(value)
        elif hasattr(value, "eqns"):
            found.append(getattr(value, "jaxpr", value))
    return found


def padded_call(
    name: str, function: Callable[..., Any], args: Any, results: Any
) -> Any:
    """Calls a function that runs in a bucket, from a trace for symbolic sizes.

    Args:
        name: what refusals call it.
        function: ``(bucket, *args)`` to results, where `bucket` is an `InBucket`, and
            arrays of `args` are physical, with 0 in their padding. JAX does not
            differentiate it; it is mapped by `jax.vmap`.
        args: a tuple of pytrees of arrays.
        results: a pytree of `jax.ShapeDtypeStruct`, of symbolic shapes.

    Returns:
        Arrays of the shapes of `results`.
    """
    leaves, tree = jax.tree.flatten(args)
    avals, out_tree = jax.tree.flatten(results)
    values = padded_call_p.bind(
        *leaves, name=name, function=function, tree=tree, avals=tuple(avals)
    )
    return jax.tree.unflatten(out_tree, values)


padded_call_p = Primitive("padded_call")
padded_call_p.multiple_results = True


@padded_call_p.def_abstract_eval
def _shapes(*_: Any, avals: Sequence[Any], **__: Any) -> list[Any]:
    return [ShapedArray(a.shape, a.dtype) for a in avals]


def _batched(
    values: Sequence[Any],
    axes: Sequence[Any],
    *,
    function: Any,
    avals: Any,
    **rest: Any,
) -> tuple[Any, list[int]]:
    tree = rest["tree"]
    is_mapped = [axis is not None for axis in axes]
    pairs = zip(values, axes, is_mapped, strict=True)
    values = [jnp.moveaxis(x, a, 0) if m else x for x, a, m in pairs]
    (count, *_) = (x.shape[0] for x, m in zip(values, is_mapped, strict=True) if m)

    def mapped(bucket: Any, *args: Any) -> Any:
        def one(*some: Any) -> Any:
            return function(bucket, *jax.tree.unflatten(tree, some))

        in_axes = [0 if m else None for m in is_mapped]
        return jax.vmap(one, in_axes)(*jax.tree.leaves(args))

    avals = tuple(jax.ShapeDtypeStruct((count, *a.shape), a.dtype) for a in avals)
    results = padded_call_p.bind(*values, function=mapped, avals=avals, **rest)
    return results, [0] * len(avals)


batching.primitive_batchers[padded_call_p] = _batched
