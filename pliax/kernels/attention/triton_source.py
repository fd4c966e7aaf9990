"""A mod as the text of a function in Triton's language.

    simplify : separated mod, sizes  ->  jaxpr of scalars
    write    : jaxpr, what was separated  ->  text, one line an equation

The text computes on whole tiles what the jaxpr says of one score: an index of queries
comes as (M, 1) and one of keys as (1, N), or the other way round, and what meets grows
as in NumPy. The values that XLA computed are loaded from pointers, `args`. Equal mods
have equal texts, whoever wrote them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pliax.core.dataflow import is_literal
from pliax.core.jaxprs import ClosedFunction, Program

from .normalization import flatten
from .separation import Separated
from .tile_evaluation import Space, compute_inside
from .triton_primitives import constant, expression


ARGUMENTS = "sbhqk"


@dataclass(frozen=True)
class Source:
    """The text of a mod.

    Attributes:
        lines: The body of a function of `s, b, h, q, k, args`.
        results: What it returns, one or two expressions.
    """

    lines: tuple[str, ...]
    results: tuple[str, ...]

    def first(self) -> "Source":
        """Without the second result."""
        return Source(self.lines, self.results[:1])

    def function(self, name: str) -> str:
        """As a definition."""
        body = [*self.lines, f"return {', '.join(self.results)}"]
        indented = "".join(f"    {line}\n" for line in body)
        return f"def {name}({', '.join(ARGUMENTS)}, args):\n{indented}"


def write(
    separated: Separated, sizes: Mapping[str, int], *, hardware_tanh: bool
) -> Source:
    """What is left of a mod for a kernel, as text.

    Args:
        separated: The mod.
        sizes: Sequences, heads, queries and keys, by "bhqk".
        hardware_tanh: Whether the instruction for tanh is exact enough.
    """
    jaxpr = simplify(separated, sizes)
    writer = _Writer(hardware_tanh)
    loads = [_load(n, x, sizes) for n, x in enumerate(separated.hoisted)]
    writer.names |= dict(zip(jaxpr.invars, (*ARGUMENTS, *loads), strict=True))
    for eqn in jaxpr.eqns:
        writer.add(eqn)
    return Source(tuple(writer.lines), tuple(writer.read(v) for v in jaxpr.outvars))


def loadable(values: Sequence[Any]) -> tuple[Any, ...]:
    """What was computed outside as a kernel is given it: truths as bytes."""
    return tuple(
        jnp.asarray(x).astype(jnp.int8 if x.dtype == jnp.bool_ else x.dtype)
        for x in values
    )


def _load(number: int, item: Any, sizes: Mapping[str, int]) -> str:
    """A pointer to the elements of this sequence and head, or the value itself."""
    place, pointer = "", f"args[{number}]"
    size = item.variable.aval.size if item.is_looked_up else 1
    for axis in item.axes:
        if axis in "bh":
            place = f"({place} * {sizes[axis]} + {axis})" if place else axis
            continue
        size *= sizes[axis]
    if place:
        pointer += f" + {place}.to(tl.int64) * {size}"
    if item.is_looked_up:
        return f"({pointer})"
    last = [a for a in item.axes if a in "qk"]
    value = f"tl.load({pointer}{''.join(f' + {a}' for a in last)})"
    is_truth = item.variable.aval.dtype == jnp.bool_
    return f"({value} != 0)" if is_truth else value


# --- from a mod to scalars ------------------------------------------------------------


def simplify(separated: Separated, sizes: Mapping[str, int]) -> Any:
    """A jaxpr of native primitives on scalars, of "sbhqk" and what is hoisted.

    An array to look into is flat; a place in it is one `dynamic_slice`, never outside.
    """
    index, hoisted = jax.ShapeDtypeStruct((), jnp.int32), separated.hoisted
    score = jax.ShapeDtypeStruct((), jnp.float32)
    avals = [x.variable.aval for x in hoisted]
    shapes = [
        jax.ShapeDtypeStruct((a.size,) if x.is_looked_up else (), a.dtype)
        for x, a in zip(hoisted, avals, strict=True)
    ]

    def run(*args: Any) -> list[Any]:
        given, loaded = dict(zip(ARGUMENTS, args, strict=False)), args[len(ARGUMENTS) :]

        def look_up(number: int, places: Sequence[Any]) -> Any:
            place, *rest = places
            for other, n in zip(rest, avals[number].shape[1:], strict=True):
                place = place * jnp.int32(n) + other
            array, inside = loaded[number], {"allow_negative_indices": False}
            return lax.dynamic_slice(array, (place,), (1,), **inside).reshape(())

        space = Space(
            rows="q",
            limits={axis: n - 1 for axis, n in sizes.items()},
            argument=lambda role: given[role],
            load=lambda number: loaded[number],
            look_up=look_up,
            spread=lambda value, kind, to: value,
        )
        return compute_inside(separated, space)

    given = (score, *[index] * 4, *shapes)
    closed = jax.make_jaxpr(run)(*given)
    return flatten(ClosedFunction(Program(closed.jaxpr), tuple(closed.consts)))


# --- from scalars to text -------------------------------------------------------------


class _Writer:
    """Lines, one an equation; `names` are the expressions of variables."""

    def __init__(self, hardware_tanh: bool) -> None:
        self.names: dict[Any, str] = {}
        self.lines: list[str] = []
        self.hardware_tanh = hardware_tanh

    def read(self, v: Any) -> str:
        return constant(v.val, v.aval.dtype) if is_literal(v) else self.names[v]

    def add(self, eqn: Any) -> None:
        (result,), operands = eqn.outvars, [self.read(v) for v in eqn.invars]
        text = expression(eqn, operands, hardware_tanh=self.hardware_tanh)
        self.names[result] = f"v{len(self.lines)}"
        self.lines.append(f"{self.names[result]} = {text}")
