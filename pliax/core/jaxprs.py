"""Functions as data: a jaxpr compared by structure, and the arrays it captured.

    close : (args -> result), shapes  ->  ClosedFunction

A Python closure has no useful identity: a factory called twice gives two functions
with the same code and other contents. Its jaxpr has one. `close` traces a function
once and separates what is static, the program, from what is data, the captured
arrays. A `ClosedFunction` is therefore a pytree which `jax.jit` takes as an argument
without tracing again when only the captured contents differ.

Sharp edge: rules attached to a function, such as those of `jax.custom_jvp`, and arrays
that an inner `jit` captured have no structure to compare. They are compared by
identity, which never confuses two programs, but compiles again for each fresh trace.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.core import eval_jaxpr

from ._jax import equation_context


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
        """Evaluate with arrays of the shapes and dtypes it was traced for."""
        (result,) = eval_jaxpr(self.program.jaxpr, self.captured, *args)
        return result

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


def close(function: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> ClosedFunction:
    """Trace a function of arrays to one array into data.

    Args:
        function: Any traceable function. What it captures may be concrete, or
            tracers of an enclosing `jit`, `grad` or `vmap`.
        *args: Shape and dtype of each argument.

    Returns:
        The same function as a pytree.

    Raises:
        TypeError: If the function does not return exactly one array.

    Example:
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
    trace = jax.make_jaxpr(lambda *args: function(*args), return_shape=True)
    closed, out_shape = trace(*args)
    if not hasattr(out_shape, "shape"):
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"{name} must return one array; it returned {out_shape}.")
    return ClosedFunction(Program(closed.jaxpr), tuple(closed.consts))


def structure(jaxpr: Any) -> Hashable:
    """Nested tuples equal for two jaxprs exactly when they are the same program."""
    number: dict[Any, int] = {}

    def atom(x: Any) -> Hashable:
        if hasattr(x, "val"):  # a literal
            return ("literal", str(x.aval), np.asarray(x.val).tobytes())
        return number.setdefault(x, len(number))

    def binders(variables: Any) -> Hashable:
        return tuple((atom(v), str(v.aval)) for v in variables)

    def equation(eqn: Any) -> Hashable:
        return (
            eqn.primitive,
            equation_context(eqn),
            tuple(atom(x) for x in eqn.invars),
            _parameter(eqn.params),
            binders(eqn.outvars),
        )

    return (
        binders(jaxpr.constvars),
        binders(jaxpr.invars),
        tuple(equation(eqn) for eqn in jaxpr.eqns),
        tuple(atom(x) for x in jaxpr.outvars),
    )


def _parameter(value: Any) -> Hashable:
    """An equation's parameter as something hashable that keeps its meaning."""
    if hasattr(value, "eqns"):
        consts = tuple(_ById(c) for c in getattr(value, "consts", ()))
        return (structure(getattr(value, "jaxpr", value)), consts)
    if isinstance(value, dict):
        return tuple((k, _parameter(v)) for k, v in sorted(value.items()))
    if isinstance(value, list | tuple):
        return (type(value), tuple(_parameter(v) for v in value))
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
