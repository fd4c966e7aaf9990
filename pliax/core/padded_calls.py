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
from jax.sharding import NamedSharding, PartitionSpec

from ._jax import Primitive, ad, batching
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

    def evaluated(self, program: Any, args: Sequence[Any]) -> list[Any]:
        """The results of a program of symbolic sizes without constants, physical."""
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
    name: str,
    function: Callable[..., Any],
    args: Any,
    results: Any,
    *,
    is_differentiable: bool | tuple[bool, ...] = False,
) -> Any:
    """Calls a function that runs in a bucket, from a trace for symbolic sizes.

    Args:
        name: what refusals call it.
        function: ``(bucket, *args)`` to results, where `bucket` is an `InBucket`, and
            arrays of `args` are physical, with 0 in their padding. It is mapped by
            `jax.vmap`.
        args: a tuple of pytrees of arrays.
        results: a pytree of `jax.ShapeDtypeStruct`, of symbolic shapes, or of types of
            arrays, which say where an Explicit mesh has them.
        is_differentiable: whether JAX may differentiate the function where it is, or
            of each leaf of `args` whether by that. Then a cotangent of 0 in any
            padding of a result must meet what is finite, or what it makes must stay in
            padding: it must not be summed, for a captured array neither.

    Returns:
        Arrays of the shapes of `results`.
    """
    leaves, tree = jax.tree.flatten(args)
    avals, out_tree = jax.tree.flatten(results)
    values = padded_call_p.bind(
        *leaves,
        name=name,
        function=function,
        tree=tree,
        avals=tuple(avals),
        is_differentiable=is_differentiable,
        known=len(leaves),
    )
    return jax.tree.unflatten(out_tree, values)


padded_call_p = Primitive("padded_call")
padded_call_p.multiple_results = True


@padded_call_p.def_abstract_eval
def _shapes(*_: Any, avals: Sequence[Any], **__: Any) -> list[Any]:
    return [
        a if isinstance(a, ShapedArray) else ShapedArray(a.shape, a.dtype)
        for a in avals
    ]


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

    def mapped(bucket: Any, *args: Any) -> Any:
        def one(*some: Any) -> Any:
            return function(bucket, *jax.tree.unflatten(tree, some))

        in_axes = [0 if m else None for m in is_mapped]
        return jax.vmap(one, in_axes)(*jax.tree.leaves(args))

    (like, *_) = (jax.typeof(x) for x, m in zip(values, is_mapped, strict=True) if m)
    avals = tuple(_mapped(a, like) for a in avals)
    results = padded_call_p.bind(*values, function=mapped, avals=avals, **rest)
    return results, [0] * len(avals)


def _mapped(aval: Any, like: Any) -> Any:
    """The type of a result under vmap, with an axis as the first of an argument's."""
    shape = like.shape[0], *aval.shape
    if not isinstance(aval, ShapedArray):
        return jax.ShapeDtypeStruct(shape, aval.dtype)
    spec = PartitionSpec(like.sharding.spec[0], *aval.sharding.spec)
    return aval.update(shape=shape, sharding=NamedSharding(like.sharding.mesh, spec))


# --- derivatives ----------------------------------------------------------------------


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    function: Any,
    tree: Any,
    is_differentiable: bool | tuple[bool, ...],
    **rest: Any,
) -> tuple[list[Any], list[Any]]:
    """The tangents are another call, linear in those that come in."""
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    if isinstance(is_differentiable, bool):
        is_differentiable = (is_differentiable,) * len(primals)
    if not all(is_differentiable[i] for i in moving):
        name = rest["name"]
        raise NotImplementedError(f"{name} has no derivative in a bucket")

    def derivative(bucket: Any, primals: Any, tangents: Any) -> Any:
        def of_moving(*xs: Any) -> Any:
            values = dict(enumerate(primals)) | dict(zip(moving, xs, strict=True))
            args = jax.tree.unflatten(tree, list(values.values()))
            return jax.tree.leaves(function(bucket, *args))

        return jax.jvp(of_moving, [primals[i] for i in moving], tangents)[1]

    args = list(primals), [tangents[i] for i in moving]
    leaves, tree_of_both = jax.tree.flatten(args)
    options = {**rest, "is_differentiable": True}
    results = padded_call_p.bind(*primals, function=function, tree=tree, **options)
    options["known"] = len(primals)
    changes = padded_call_p.bind(
        *leaves, function=derivative, tree=tree_of_both, **options
    )
    return results, changes


def _transposed(
    cotangents: Sequence[Any],
    *values: Any,
    function: Any,
    tree: Any,
    known: int,
    avals: Any,
    **rest: Any,
) -> list[Any]:
    """The cotangents of the operands after the known ones, in which it is linear."""
    unknown = [x.aval for x in values[known:]]

    def back(bucket: Any, first: Any, cotangents: Any) -> Any:
        def forward(*xs: Any) -> Any:
            args = jax.tree.unflatten(tree, [*first, *xs])
            return jax.tree.leaves(function(bucket, *args))

        shapes = [tuple(map(bucket.length, a.shape)) for a in unknown]
        pairs = zip(shapes, unknown, strict=True)
        xs = [a.update(shape=shape) for shape, a in pairs]
        return list(jax.linear_transpose(forward, *xs)(cotangents))

    args = list(values[:known]), [ad.instantiate_zeros(ct) for ct in cotangents]
    leaves, tree_of_both = jax.tree.flatten(args)
    found = padded_call_p.bind(
        *leaves,
        function=back,
        tree=tree_of_both,
        known=known,
        avals=tuple(a.update(weak_type=False) for a in unknown),
        **rest,
    )
    return [None] * known + found


batching.primitive_batchers[padded_call_p] = _batched
ad.primitive_jvps[padded_call_p] = _jvp
ad.primitive_transposes[padded_call_p] = _transposed
