"""One evaluation of a jaxpr, equation by equation, in the types of its arguments.

    evaluate : jaxpr, constants, arguments  ->  results

What JAX's own evaluation does not do: inner `jit`s are inlined, chained lookups are put
off (`lookups`), floats may be wider than they were traced, and operands may vary over
axes of a `jax.shard_map` that the trace did not know.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AbstractMesh, use_abstract_mesh

from . import lookups
from ._jax import bind_equation, is_pvary
from .dataflow import is_literal
from .manual_axes import vary, varying_axes


CUSTOM_RULES = ("custom_jvp_call", "custom_vjp_call")
# What only moves elements, or casts: exact in the dtype of a wider operand as well.
_MOVES = {"broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "gather"}
_MOVES |= {"reshape", "rev", "slice", "squeeze", "transpose"}

type Rules = Mapping[str, Callable[..., Any]]
_NO_RULES: Rules = MappingProxyType({})


@contextmanager
def at_trace_time() -> Iterator[None]:
    """What is computed of values at hand, now, whoever traces.

    Who calls may have a mesh, which is not meant for this, and a guard against
    transfers that nobody asked for: these are asked for.
    """
    with (
        jax.ensure_compile_time_eval(),
        use_abstract_mesh(AbstractMesh((), ())),
        jax.transfer_guard("allow"),
    ):
        yield


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr; inner `jit`s are inlined, chained lookups read once.

    Inside `jax.shard_map` the operands of an equation are made to vary alike, so that a
    jaxpr traced outside takes arrays which vary over the mesh.
    """
    return [lookups.read(x) for x in _walk(jaxpr, consts, args)]


def _walk(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The results of `evaluate`, where lookups may not have been read yet."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def value(x: Any) -> Any:
        return x.val if is_literal(x) else env[x]

    def read(x: Any) -> Any:
        if not is_literal(x):
            env[x] = lookups.read(env[x])
        return value(x)

    for eqn in jaxpr.eqns:
        if lookup := lookups.put_off(eqn, [value(x) for x in eqn.invars]):
            env[eqn.outvars[0]] = lookup
        elif is_jit(eqn):
            inner, values = eqn.params["jaxpr"], [value(x) for x in eqn.invars]
            results = _walk(getattr(inner, "jaxpr", inner), inner.consts, values)
            env.update(zip(eqn.outvars, results, strict=True))
        else:
            results = _results(eqn, [read(x) for x in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
    return [value(x) for x in jaxpr.outvars]


def _results(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    if eqn.primitive.name not in _MOVES:
        values = [declared(*x) for x in zip(eqn.invars, values, strict=True)]
    axes = varying_axes(values)
    if is_pvary(eqn):
        return vary(values, axes | set(eqn.params["axes"]))
    traced = [x.aval.mat.varying for x in eqn.invars]
    if eqn.primitive.name in CUSTOM_RULES and any(traced):
        # The function inside casts from the types it was traced with.
        values = [vary(x, own) for x, own in zip(values, traced, strict=True)]
        return bind_equation(eqn, values)
    return bind_equation(eqn, vary(values, axes))


def extend(
    env: dict[Any, Any], equations: Sequence[Any], rules: Rules = _NO_RULES
) -> None:
    """Adds the results of equations to an environment, in place.

    Operands of one equation are made to vary over mesh axes alike.

    Args:
        env: Of each variable, its value.
        equations: In order, traced where they are evaluated or outside `jax.shard_map`.
        rules: By name of a primitive, what computes results of an equation and its
            operands in its place.
    """
    for eqn in equations:
        values = [x.val if is_literal(x) else env[x] for x in eqn.invars]
        values = vary(values, varying_axes(values))
        results = rules.get(eqn.primitive.name, bind_equation)(eqn, values)
        env.update(zip(eqn.outvars, results, strict=True))


def declared(x: Any, value: Any) -> Any:
    """A value in the dtype of its variable."""
    same = is_literal(x) or getattr(value, "dtype", None) in (None, x.aval.dtype)
    return value if same else value.astype(x.aval.dtype)


def is_jit(eqn: Any) -> bool:
    """Whether an equation calls a jitted function."""
    return eqn.primitive.name == "jit"
