"""Jaxprs that JAX traced for its own symbolic dimensions, with `Size`s in their place.

    jax.make_jaxpr(f)(jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, t"), …))

JAX's dimensions stand in shapes, in parameters, and in the programs among these.
"""

from collections.abc import Callable
from typing import Any

from jax.core import ShapedArray

from ._jax import Var, is_symbolic_dim
from .dataflow import is_literal
from .dims import Size


type ToSize = Callable[[Any], Any]


def shapes_of(jaxpr: Any) -> list[str]:
    """The shape of each argument in `jax.export`'s notation, "b, t, 4"."""
    return [", ".join(map(str, v.aval.shape)) for v in jaxpr.invars]


def is_symbolic(jaxpr: Any) -> bool:
    """Whether an argument has a symbolic dimension."""
    return any(_is_dimension(n) for v in jaxpr.invars for n in v.aval.shape)


def _is_dimension(n: Any) -> bool:
    return is_symbolic_dim(n) and not isinstance(n, Size)


def with_sizes(jaxpr: Any, size: ToSize) -> Any:
    """The same open jaxpr, with `size(n)` for each symbolic dimension n."""
    known: dict[Any, Any] = {}

    def variable(v: Any) -> Any:
        if is_literal(v):
            return v
        if v not in known:
            aval = _value(v.aval, size)
            known[v] = v if aval is v.aval else Var(aval)
        return known[v]

    def equation(eqn: Any) -> Any:
        return eqn.replace(
            invars=[variable(v) for v in eqn.invars],
            outvars=[variable(v) for v in eqn.outvars],
            params={name: _value(x, size) for name, x in eqn.params.items()},
        )

    return jaxpr.replace(
        constvars=[variable(v) for v in jaxpr.constvars],
        invars=[variable(v) for v in jaxpr.invars],
        eqns=[equation(eqn) for eqn in jaxpr.eqns],
        outvars=[variable(v) for v in jaxpr.outvars],
    )


def _value(x: Any, size: ToSize) -> Any:
    """A parameter or an abstract value with sizes; itself where it has none."""
    if _is_dimension(x):
        return size(x)
    if isinstance(x, dict):
        return {key: _value(item, size) for key, item in x.items()}
    if isinstance(x, list | tuple):
        items = [_value(item, size) for item in x]
        if all(a is b for a, b in zip(items, x, strict=True)):
            return x
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if isinstance(x, ShapedArray):
        shape = tuple(_value(n, size) for n in x.shape)
        return x if all(map(_is_same, shape, x.shape)) else x.update(shape=shape)
    if hasattr(x, "eqns"):
        return _program(x, size)
    return x


def _is_same(a: Any, b: Any) -> bool:
    return a is b


def _program(x: Any, size: ToSize) -> Any:
    """A jaxpr among the parameters, open or with its constants."""
    inner = with_sizes(getattr(x, "jaxpr", x), size)
    return type(x)(inner, x.consts) if hasattr(x, "consts") else inner
