"""A function with sizes born from data inside another transformation.

    symbolic trace  ->  a function of arrays, tracers among them, and its derivatives

Such a function is traced with symbols, and the padded program runs in place: under
`jax.jit` it is compiled with the rest, `jax.vmap` takes it apart as any other. Its
derivatives are those of the function, not of the padded program, in which 0 times what
the padding holds may be NaN: tangents and gradients are padded programs of their own.
What the function closes over of other transformations is an argument of them all.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer, eval_jaxpr

from pliax.core._jax import call_context
from pliax.core.linear_maps import linear_map
from pliax.core.provenance import calling_place
from pliax.core.ragged import logical
from pliax.core.unbacked import with_unbacked

from ._families import is_integer
from ._leaves import on_leaves
from ._trace_errors import NotSymbolicError
from .padding.interpreter import run_whole
from .padding.layouts import Bucket
from .padding.rules import PaddingRefused
from .tracing import SymbolicTrace, program_under, trace


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
    arrays = [jnp.asarray(leaves[i]) for i in places]
    avals = tuple(map(jax.typeof, arrays))
    try:
        found = trace(flat, lambda _: (avals, {}), (), owner=owner)
    except NotSymbolicError as error:
        raise error.original from error.original.__cause__
    given = [arrays[i] for i in found.inputs]
    traced = [x for x in found.consts if isinstance(x, Tracer)]
    results = _differentiable(_Program(found))(*traced, *given)
    return jax.tree.unflatten(found.out_tree, results)


@dataclasses.dataclass(frozen=True)
class _Program:
    """A symbolic trace as a function of flat arrays.

    The first of them are tracers that it captured, then come its arguments.

    Attributes:
        trace: the program.
        lock: of whoever traces with its sizes, of which all derivatives know.
    """

    trace: SymbolicTrace
    lock: Any = dataclasses.field(default_factory=threading.RLock)

    def _inputs(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Its constants and its arguments."""
        given = iter(arrays)
        consts = self.trace.consts
        captured = [next(given) if isinstance(x, Tracer) else x for x in consts]
        return captured, list(given)

    def symbolic(self, *arrays: Any) -> list[Any]:
        """The results in a trace with the same sizes."""
        consts, given = self._inputs(arrays)
        return eval_jaxpr(self.trace.jaxpr, consts, *given)

    def padded(self, *arrays: Any) -> list[Any]:
        """The results as arrays as long as their sizes can become."""
        found = self.trace
        bucket = Bucket(with_unbacked(found.assumptions, {}), {}, found.equal)
        consts, given = self._inputs(arrays)
        data = run_whole(bucket, found.jaxpr, consts, [*map(bucket.exact, given)])
        if bucket.checks:
            reason = "inside another transformation nobody can raise what it checks"
            text, _ = bucket.checks[0]
            reason = f"{reason} at run time ({text})"
            raise PaddingRefused("check", reason, calling_place())
        return data

    def derived(
        self, f: Callable[..., Any], arrays: Sequence[Any]
    ) -> tuple["_Program", list[Any]]:
        """What f of such arrays does, running this program symbolically.

        Returns:
            That as a program, and the tracers it captured, which are its first
            arguments: a custom rule may close over what the function does not.
        """
        assumptions, avals = self.trace.assumptions, [*map(jax.typeof, arrays)]
        with self.lock:
            assumptions.open_again()  # rules of custom derivatives are the user's code
            jaxpr, consts = program_under(assumptions, f, avals)
        again = dataclasses.replace(self.trace, jaxpr=jaxpr, consts=consts)
        traced = [x for x in consts if isinstance(x, Tracer)]
        return _Program(again, self.lock), traced

    def derived_once(
        self, known: dict[Any, Any], f: Callable[..., Any], arrays: Sequence[Any]
    ) -> tuple["_Program", list[Any]]:
        """As `derived`; a pullback is called often, and means the same each time.

        Each trace would leave sizes in the record of all. One that captures tracers
        belongs to the trace they are of.
        """
        key = (call_context(), tuple(map(jax.typeof, arrays)))
        found = known.get(key)
        if found is None:
            found = self.derived(f, arrays)
            if not found[1]:
                known[key] = found
        return found

    def of_floats(
        self, arrays: Sequence[Any]
    ) -> tuple[Callable[..., list[Any]], list[Any]]:
        """The floating results as a function of the floating arrays, and these."""
        places = _floating(arrays)

        def some(*floats: Any) -> list[Any]:
            values = list(arrays)
            for i, x in zip(places, floats, strict=True):
                values[i] = x
            results = self.symbolic(*values)
            return [results[i] for i in _floating(results)]

        return some, [arrays[i] for i in places]


def _differentiable(program: _Program) -> Callable[..., list[Any]]:
    """The padded program; its tangents and gradients are padded programs, too."""
    call = jax.custom_jvp(program.padded)

    @call.defjvp
    def rule(arrays: Any, dots: Any) -> tuple[list[Any], list[Any]]:
        results, count = call(*arrays), len(arrays)
        like = [results[i] for i in _floating(results)]
        given = [dots[i] for i in _floating(arrays)]
        push, pull = (partial(f, program, count) for f in (_push, _pull))
        pushed, captured = program.derived(push, [*arrays, *given])

        def tangents(known: Any, dots: Any) -> list[Any]:
            return _differentiable(pushed)(*known[count:], *known[:count], *dots)

        pulls: dict[Any, Any] = {}

        def gradients(known: Any, cotangents: Any) -> list[Any]:
            values = [*known[:count], *cotangents]
            pulled, captured = program.derived_once(pulls, pull, values)
            return _differentiable(pulled)(*captured, *values)

        known = [*arrays, *captured]
        found = iter(linear_map(tangents, gradients, known, given, like=like))
        return results, [next(found) if _is_floating(x) else _none(x) for x in results]

    return call


def _push(program: _Program, count: int, *values: Any) -> list[Any]:
    """Tangents of the results, from so many arrays and tangents of the floating."""
    some, floats = program.of_floats(values[:count])
    return jax.jvp(some, floats, list(values[count:]))[1]


def _pull(program: _Program, count: int, *values: Any) -> Any:
    """Gradients of the floating arrays, from the arrays and cotangents of results."""
    some, floats = program.of_floats(values[:count])
    results, transpose = jax.vjp(some, *floats)
    pairs = zip(values[count:], results, strict=True)
    return transpose([_cut(x, r) for x, r in pairs])


def _cut(x: Any, like: Any) -> Any:
    """The valid part of the cotangent of an array whose size is born from data."""
    limits = [n if m != n else m for n, m in zip(like.shape, x.shape, strict=True)]
    return lax.slice(x, [0] * x.ndim, limits)


def _floating(arrays: Sequence[Any]) -> list[int]:
    """The places of the arrays that have derivatives."""
    return [i for i, x in enumerate(arrays) if _is_floating(x)]


def _none(x: Any) -> Any:
    """The tangent of an array that has none."""
    return np.zeros(np.shape(x), jax.dtypes.float0)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)
