"""Functions as data: a jaxpr compared by structure, and the arrays it captured.

    close : (args -> result), shapes  ->  ClosedFunction

A Python closure has no useful identity: a factory called twice gives two functions
with the same code and other contents. Its jaxpr has one. `close` traces a function
once and separates what is static, the program, from what is data, the captured
arrays. A `ClosedFunction` is therefore a pytree which `jax.jit` takes as an argument
without tracing again when only the captured contents differ.

Inner `jit`s are inlined, so that what they captured is data too. A `jax.custom_jvp` or
`custom_vjp` function is compared by what it computes and by the jaxpr of its rule.

Sharp edge: arrays which such a rule, or a `jit` inside a loop, captured are compared by
identity. That never confuses two programs, but compiles again for each fresh trace.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._jax import bind_equation, equation_context
from .dataflow import is_literal
from .evaluation import CUSTOM_RULES, declared, evaluate, is_jit
from .manual_axes import vary


_ORDERS = 2


@dataclass(frozen=True, eq=False)
class Program:
    """A jaxpr without its constants; equal to any other of the same structure.

    Attributes:
        jaxpr: The open jaxpr: captured arrays are its `constvars`.
    """

    jaxpr: Any

    @cached_property
    def structure(self) -> Hashable:
        """What equality and hash look at: nested tuples, variables by number."""
        return structure(self.jaxpr)

    @cached_property
    def _hash(self) -> int:
        return hash(self.structure)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Program)
            and self._hash == other._hash
            and self.structure == other.structure
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ClosedFunction:
    """A traced function: its program, and the arrays it captured as leaves.

    Attributes:
        program: The static part.
        captured: The arrays (or tracers) the function closed over, in the order
            of the program's constant variables.
    """

    program: Program = field(metadata={"static": True})
    captured: tuple[Any, ...]

    def __call__(self, *args: Any) -> Any:
        """Evaluate for the types it was traced for; `captured` may be wider floats."""
        jaxpr = self.program.jaxpr
        (result,) = evaluate(jaxpr, self.captured, args)
        return declared(jaxpr.outvars[0], jnp.asarray(result))  # NumPy's, if constant

    def reads(self, position: int) -> bool:
        """Whether the program uses its argument number `position`."""
        jaxpr = self.program.jaxpr
        argument = jaxpr.invars[position]
        users = (x for eqn in jaxpr.eqns for x in eqn.invars)
        return any(x is argument for x in (*users, *jaxpr.outvars))

    @property
    def out_aval(self) -> Any:
        """Shape and dtype of the single result."""
        return self.program.jaxpr.outvars[0].aval


def close(
    function: Callable[..., Any],
    *args: jax.ShapeDtypeStruct,
    axes: frozenset[str] = frozenset(),
    name: str = "",
) -> ClosedFunction:
    """Trace a function of arrays to one array into data.

    Args:
        function: Any traceable function. What it captures may be concrete, or
            tracers of an enclosing `jit`, `grad` or `vmap`.
        *args: Shape and dtype of each argument.
        axes: Manual mesh axes the arguments vary over, inside `jax.shard_map`: rules
            of custom derivatives keep the types they are traced with.
        name: What the function is called in errors; its own name by default.

    Returns:
        The same function as a pytree.

    Raises:
        TypeError: If the function does not return exactly one array.

    Examples:
        >>> import jax.numpy as jnp
        >>> index = jax.ShapeDtypeStruct((), jnp.int32)
        >>> def lookup(table):
        ...     return close(lambda i: table[i], index)
        >>> one, other = lookup(jnp.arange(4)), lookup(jnp.ones(4, jnp.int32))
        >>> one.program == other.program
        True
        >>> int(one(jnp.int32(2))), int(other(jnp.int32(2)))
        (2, 1)
    """
    # A fresh lambda: make_jaxpr remembers functions by identity, and what this one
    # captured may have been replaced since.
    trace = jax.make_jaxpr(lambda *a: function(*vary(a, axes)), return_shape=True)
    closed, out_shape = trace(*args)
    if not hasattr(out_shape, "shape"):
        name = name or getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"{name} must return one array; it returned {out_shape}.\n"
            "Return the array itself, neither nothing nor a container."
        )
    if any(is_jit(eqn) for eqn in closed.jaxpr.eqns):
        inline = jax.make_jaxpr(lambda *a: evaluate(closed.jaxpr, closed.consts, a))
        closed = inline(*args)
    return ClosedFunction(Program(closed.jaxpr), tuple(closed.consts))


def structure(jaxpr: Any, within: tuple[Hashable, ...] = ()) -> Hashable:
    """Nested tuples equal for two jaxprs exactly when they are the same program.

    Args:
        jaxpr: What to describe.
        within: The custom-rule functions whose rules are being described.
    """
    number: dict[Any, int] = {}

    def atom(x: Any) -> Hashable:
        if is_literal(x):
            return ("literal", str(x.aval), np.asarray(x.val).tobytes())
        return number.setdefault(x, len(number))

    def binders(variables: Any) -> Hashable:
        return tuple((atom(v), str(v.aval)) for v in variables)

    def equation(eqn: Any) -> Hashable:
        return (
            eqn.primitive,
            equation_context(eqn),
            tuple(atom(x) for x in eqn.invars),
            _parameters(eqn, within),
            binders(eqn.outvars),
        )

    return (
        binders(jaxpr.constvars),
        binders(jaxpr.invars),
        tuple(equation(eqn) for eqn in jaxpr.eqns),
        tuple(atom(x) for x in jaxpr.outvars),
    )


def _parameters(eqn: Any, within: tuple[Hashable, ...]) -> Hashable:
    if eqn.primitive.name not in CUSTOM_RULES:
        return _parameter(eqn.params, within)
    function = _parameter(eqn.params["call_jaxpr"], within)
    # A rule may use its own function, as that of logaddexp does. Its structure repeats
    # from there on: derivatives above the second are not looked at.
    if within.count(function) == _ORDERS:
        return ("itself", function)
    return (function, _parameter(_rule(eqn), (*within, function)))


def _rule(eqn: Any) -> Any:
    """The derivative of a function with a rule of its own, as a jaxpr."""
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    axes = frozenset().union(*(x.aval.mat.varying for x in eqn.invars))
    floating = [jnp.issubdtype(a.dtype, jnp.inexact) for a in avals]

    def split(values: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The equation as a function of its floating operands, and these."""

        def function(*some: Any) -> Any:
            given = iter(some)
            pairs = zip(floating, values, strict=True)
            operands = [next(given) if f else x for f, x in pairs]
            return bind_equation(eqn, vary(operands, axes))

        return function, tuple(x for f, x in zip(floating, values, strict=True) if f)

    def forward(values: Any, tangents: Any) -> Any:
        function, primals = split(values)
        return jax.jvp(function, primals, tangents)

    def backward(values: Any, cotangents: Any) -> Any:
        function, primals = split(values)
        return jax.vjp(function, *primals)[1](cotangents)

    if eqn.primitive.name == "custom_jvp_call":
        return jax.make_jaxpr(forward)(avals, split(avals)[1])
    results = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.outvars]
    return jax.make_jaxpr(backward)(avals, results)


def _parameter(value: Any, within: tuple[Hashable, ...]) -> Hashable:
    """An equation's parameter as something hashable that keeps its meaning."""
    if hasattr(value, "eqns"):
        consts = tuple(_ById(c) for c in getattr(value, "consts", ()))
        return (structure(getattr(value, "jaxpr", value), within), consts)
    if isinstance(value, dict):
        return tuple((k, _parameter(v, within)) for k, v in sorted(value.items()))
    if isinstance(value, list | tuple):
        return (type(value), tuple(_parameter(v, within) for v in value))
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype, value.tobytes())
    if isinstance(value, float):  # 0.0 == -0.0, and NaN is not NaN
        return ("float", value.hex())
    if isinstance(value, Hashable) and _hashes(value):
        return (type(value), value)
    return _ById(value)


def _hashes(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@dataclass(frozen=True, eq=False)
class _ById:
    """An object without structure, kept alive and compared by identity."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value
