"""Operations that are made of others late: their definitions, in place.

JAX lowers some of its own only when it compiles. Kernels leave one equation in a
symbolic trace, `padded_call`, and run on padded arrays by themselves.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pliax.core.dims import Size
from pliax.core.evaluation import evaluate
from pliax.core.jaxprs import ClosedFunction, close
from pliax.core.padded_calls import mentions_size

from .contractions import zero
from .formulas import by_formula
from .interpreter import HIGHER_ORDER, run
from .layouts import Bucket, Padded
from .rules import PaddingRefused, refuse, rule, sizes_of


HIGHER_ORDER |= {"call_hi_primitive", "padded_call"}


@rule("call_hi_primitive")
def in_lower_operations(
    bucket: Bucket, eqn: Any, *operands: Padded
) -> Sequence[Padded]:
    """Its definition in lower operations, traced for the sizes of its operands."""
    lower = eqn.primitive.to_lojax
    return by_formula(bucket, eqn, lambda *xs: lower(*xs, **eqn.params), *operands)


@rule("padded_call")
def padded_call(bucket: Bucket, eqn: Any, *operands: Padded) -> list[Padded]:
    """A kernel on padded arrays, with 0 in all padding; it masks by itself."""
    arrays = [_zero_filled(bucket, x) for x in operands]
    args = jax.tree.unflatten(eqn.params["tree"], arrays)
    results = jax.tree.leaves(eqn.params["function"](Here(bucket, eqn), *args))
    shapes = [v.aval.shape for v in eqn.outvars]
    for x, sizes in zip(results, shapes, strict=True):
        if x.shape != bucket.shape(sizes):
            name, wanted = eqn.params["name"], bucket.shape(sizes)
            raise refuse(eqn, f"{name} gave {x.shape} in a bucket of {wanted}")
    pairs = zip(results, shapes, strict=True)
    return [bucket.simple(x, sizes) for x, sizes in pairs]


def _zero_filled(bucket: Bucket, x: Padded) -> Any:
    x = bucket.simplified(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # keys have no zero
        return x.data
    return bucket.filled(x, zero(x)).data


@dataclasses.dataclass(frozen=True)
class Here:
    """A bucket as a kernel sees it: `core.padded_calls.InBucket`."""

    bucket: Bucket
    eqn: Any

    def is_padded(self, size: Any) -> bool:
        """Whether arrays are longer than this size says."""
        return isinstance(self.bucket.size(size), Size)

    def length(self, size: Any) -> int:
        """How many elements an array has along an axis of this size."""
        return self.bucket.length(size)

    def count(self, size: Any) -> Any:
        """How many of them are valid."""
        return jnp.asarray(self.bucket.scalar(size))

    def exact(self, size: Any, name: str) -> int:
        """A size that must not be padded."""
        size = self.bucket.size(size)
        if isinstance(size, Size):
            kernel, place = self.eqn.params["name"], refuse(self.eqn, "").place
            raise PaddingRefused(kernel, f"{name} cannot be padded ({size})", place)
        return size

    def evaluated(self, program: Any, args: Sequence[Any]) -> list[Any]:
        """The results of a program of symbolic sizes, on padded arrays."""
        bucket, jaxpr = self.bucket.inner(), program.jaxpr
        pairs = zip(args, jaxpr.invars, strict=True)
        xs = [bucket.simple(x, sizes_of(v)) for x, v in pairs]
        results = run(bucket, jaxpr, program.consts, xs)
        return [bucket.simplified(x).data for x in results]

    def closed(self, function: ClosedFunction) -> ClosedFunction:
        """A function of scalars, on padded arrays in place of those it captured."""
        jaxpr = function.program.jaxpr
        if not mentions_size(jaxpr):
            return function
        shapes = [v.aval.shape for v in jaxpr.constvars]
        scalars = [jax.ShapeDtypeStruct((), v.aval.dtype) for v in jaxpr.invars]
        arrays = [
            jax.ShapeDtypeStruct(shape, x.dtype)  # as wide as they are here
            for shape, x in zip(shapes, function.captured, strict=True)
        ]
        count = len(arrays)
        wide = jax.make_jaxpr(lambda *xs: evaluate(jaxpr, xs[:count], xs[count:]))
        program = wide(*arrays, *scalars)

        def call(*args: Any) -> Any:
            bucket = self.bucket.inner()
            pairs = zip(function.captured, shapes, strict=True)
            xs = [bucket.simple(x, shape) for x, shape in pairs]
            xs += [bucket.exact(x) for x in args]
            return run(bucket, program.jaxpr, program.consts, xs)[0].data

        return close(call, *scalars)
