"""How scores change with the floating arrays that a score_mod captured, in two parts.

    linearize : score_mod  ->  leaves, slopes;  dm = sum_n slope_n(s, b, h, q, k) leaf_n

A leaf is what tangents of captured arrays become outside of a kernel: one number a
query, one a key, one for each difference of both, or one a pair, of each head. What
depends on more is a slope: a kernel computes it, and adds up for each leaf the
gradients of the modified scores times it. The transpose of the leaves makes gradients
of these sums:

    s - slopes[h] * (q - k)     leaf  d slopes[h]          slope  k - q    sums by query
    s + table[h, q - k + S]     leaf  d table[h, q-k+S]    slope  1   sums by difference
    s + bias[h, q, k]           leaf  d bias[h, q, k]      slope  1        none: by pair
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pliax.core.dataflow import is_literal, leading_to, variables
from pliax.core.evaluation import extend
from pliax.core.jaxprs import ClosedFunction, Program
from pliax.core.manual_axes import vary, varying_axes

from .derivatives import floating_captures, with_floating_captures
from .lookup_slices import LookupSlice, slice_of_lookup
from .normalization import first_order
from .ordered_scatters import are_compared, in_order
from .separation import (
    MOVES,
    SCORE_MOD,
    Inseparable,
    Separated,
    outside,
    separate_program,
)


DIFFERENCE = "q-k"
"""What is the same for all queries and keys of one difference has an axis of these."""
PAIR = "qk"
"""What has one for each query and key has axes of both."""

# What may make a leaf of tangents and of a sequence, a head, a query or a key. It
# multiplies by nothing that could be infinite where a sum is 0, as that of a query that
# sees nothing.
_CARRIERS = MOVES | {
    *("add", "add_any", "concatenate", "convert_element_type", "copy", "dynamic_slice"),
    *("gather", "neg", "pad", "reduce_sum", "rev", "select_n", "slice", "sub"),
    "transpose",
}
_SCATTERED = 2**26  # lookups, of which each has 12 to 16 bytes of indices
_SIGNS = {"add": (1, 1), "neg": (-1,), "sub": (1, -1)}  # of operands, in sums
_COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")
_SCALARS = tuple(jax.ShapeDtypeStruct((), x) for x in (jnp.float32, *[jnp.int32] * 4))


@dataclass(frozen=True)
class Leaf:
    """What a slope is multiplied by.

    Attributes:
        variable: Of the program of tangents.
        axes: Those of "b", "h", "q", "k" and DIFFERENCE that it has one of.
    """

    variable: Any
    axes: tuple[str, ...]

    @property
    def kind(self) -> str:
        """What a head's sums are by: "q", "k", DIFFERENCE or PAIR.

        They are by query, too, where a head has one.
        """
        if {*PAIR} <= {*self.axes}:
            return PAIR
        return next((x for x in ("k", DIFFERENCE) if x in self.axes), "q")

    def ranges(self, sizes: Mapping[str, int]) -> dict[str, range]:
        """The values of its axes, of so many sequences, heads, queries and keys."""
        every = {a: range(n) for a, n in sizes.items()}
        every[DIFFERENCE] = range(1 - sizes["k"], sizes["q"])
        return {a: every[a] for a in self.axes}

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """How many of each."""
        return tuple(map(len, self.ranges(sizes).values()))


@dataclass(frozen=True)
class Linearization:
    """The leaves and slopes of a score_mod.

    Attributes:
        score_mod: The mod.
        separated: The program of its tangent, whose arguments begin with what was
            captured, and the tangents of what is floating of that.
        tangents: The variables of that program which depend on tangents.
        leaves: The leaves.
    """

    score_mod: ClosedFunction
    separated: Separated
    tangents: frozenset[Any]
    leaves: tuple[Leaf, ...]

    def of_kind(self, kind: str) -> tuple[Leaf, ...]:
        """The leaves whose sums are by that."""
        return tuple(x for x in self.leaves if x.kind == kind)

    def with_slopes(self, leaves: Sequence[Leaf]) -> ClosedFunction:
        """The modified score, and how much it changes with each of these leaves."""

        def both(*scalars: Any) -> tuple[Any, ...]:
            return self.score_mod(*scalars), *self._slopes(leaves, scalars)

        closed = jax.make_jaxpr(both)(*_SCALARS)
        return ClosedFunction(Program(closed.jaxpr), tuple(closed.consts))

    def _slopes(self, leaves: Sequence[Leaf], scalars: Sequence[Any]) -> Any:
        """By transposing what is linear behind the leaves."""
        if not leaves:
            return ()
        jaxpr, linear = self.separated.jaxpr, self._behind_leaves
        ends = {x.variable for x in self.leaves}
        made = ends.union(*(eqn.outvars for eqn in linear))
        given = *self.score_mod.captured, *scalars
        count = self.separated.captured
        known = jaxpr.invars[: len(self.score_mod.captured)], jaxpr.invars[count:]
        env = dict(zip((*known[0], *known[1]), given, strict=True))
        asked = (v for eqn in linear for v in variables(eqn.invars) if v not in made)
        extend(env, leading_to(jaxpr.eqns, asked))

        def change(*values: Any) -> Any:
            here = env | {v: jnp.zeros(v.aval.shape, v.aval.dtype) for v in ends}
            for leaf, x in zip(leaves, values, strict=True):
                v = leaf.variable  # of one element
                here[v] = jnp.reshape(x, v.aval.shape)
            extend(here, linear)
            return here[jaxpr.outvars[0]]

        zeros = [jnp.zeros((), x.variable.aval.dtype) for x in leaves]
        # What does not vary, as they do, would be summed over devices.
        out, transpose = jax.vjp(change, *vary(zeros, varying_axes(given)))
        return transpose(vary(jnp.ones((), jnp.float32), varying_axes(out)))

    @property
    def _behind_leaves(self) -> list[Any]:
        """The equations between the leaves and the tangent of the score."""
        linear = self.tangents.difference(x.variable for x in self.leaves)
        return [eqn for eqn in self.separated.inside if eqn.outvars[0] in linear]

    def gradients(
        self,
        sums: Sequence[Array],
        sizes: Mapping[str, int],
        *,
        deterministic: bool | None = None,
    ) -> tuple[Array, ...]:
        """Of the floating captured arrays, in at least float32.

        Args:
            sums: For each leaf, over what it has no axis of.
            sizes: Sequences, heads, queries and keys, by "bhqk".
            deterministic: Whether to add in one order what belongs to one element:
                None where that can be, True or an error.

        Raises:
            Inseparable: If it is True, and some has no order.
        """
        floating = floating_captures(self.score_mod)
        zeros = [jnp.zeros(x.shape, x.dtype) for x in floating]
        parts = [(leaf, self._slice(leaf, sizes)) for leaf in self.leaves]

        def values(*tangents: Any) -> list[Any]:
            return [self._value(*x, tangents, sizes) for x in parts]

        like, transpose = jax.vjp(values, *vary(zeros, varying_axes(sums)))
        pairs = zip(sums, like, strict=True)
        given = [x.reshape(y.shape).astype(y.dtype) for x, y in pairs]
        if deterministic is False:
            return tuple(transpose(given))
        return tuple(in_order(transpose, given, is_strict=bool(deterministic)))

    def check(self, sizes: Mapping[str, int]) -> None:
        """Whether XLA may scatter what is looked up by both a query and a key.

        Raises:
            Inseparable: If memory is not to hold that, or sums would be rounded.
        """
        for leaf in (*self.of_kind(DIFFERENCE), *self.of_kind(PAIR)):
            is_half = leaf.variable.aval.dtype.itemsize < 4
            is_much = self._takes_much_memory(leaf, sizes)
            if (is_half or is_much) and self._slice(leaf, sizes) is None:
                why = "in half precision" if is_half else "too many, one by one"
                raise Inseparable(f"it looks up elements {why}")

    def _takes_much_memory(self, leaf: Leaf, sizes: Mapping[str, int]) -> bool:
        array = self.separated.makers[leaf.variable].invars[0]
        own = (n for a, n in sizes.items() if a in self.separated.needs[array])
        places, lookups = array.aval.size * math.prod(own), math.prod(leaf.shape(sizes))
        return lookups > _SCATTERED and not are_compared(places, lookups)

    def _value(
        self,
        leaf: Leaf,
        part: LookupSlice | None,
        tangents: Sequence[Array],
        sizes: Mapping[str, int],
    ) -> Array:
        """A leaf of tangents, with its axes; of a part of an array where it is one."""
        given, ranges = (*self.score_mod.captured, *tangents), leaf.ranges(sizes)
        indices = {
            a: jnp.arange(x.start, x.stop, dtype=jnp.int32) for a, x in ranges.items()
        }
        if part is None:
            return outside(self.separated, given, leaf.variable, indices, _roles)
        array = self.separated.makers[leaf.variable].invars[0]
        own = {a: indices[a] for a in part.own}
        whole = outside(self.separated, given, array, own, _roles)
        return part.of(whole, {a: len(x) for a, x in ranges.items()})

    def _slice(self, leaf: Leaf, sizes: Mapping[str, int]) -> LookupSlice | None:
        """The elements that it is, where they lie one behind the other."""
        if leaf.kind not in (DIFFERENCE, PAIR):
            return None
        lookup, ranges = self.separated.makers[leaf.variable], leaf.ranges(sizes)
        return slice_of_lookup(self.separated, lookup, ranges, _roles)


def linearize(score_mod: ClosedFunction) -> Linearization:
    """The leaves and slopes of a mod that captured floating arrays.

    Raises:
        Inseparable: If tangents become what no kernel computes.
    """
    captured, floating = score_mod.captured, floating_captures(score_mod)
    if _has_custom_vjp(score_mod.program.jaxpr):
        raise Inseparable("it has a derivative in reverse mode alone")
    of_captured = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in captured]
    of_tangents = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in floating]
    first, count = len(of_captured), len(of_captured) + len(of_tangents)

    def tangent(*given: Any) -> Any:
        mod = ClosedFunction(score_mod.program, given[:first])
        at = lambda *x: with_floating_captures(mod, x)(*given[count:])  # noqa: E731
        return jax.jvp(at, floating_captures(mod), given[first:count])[1]

    closed = first_order(tangent, (*of_captured, *of_tangents, *_SCALARS))
    if closed.consts:
        raise Inseparable("it has a derivative rule that captured arrays")
    jaxpr = closed.jaxpr
    separated = separate_program(jaxpr, count, SCORE_MOD)
    tangents = _made_of(jaxpr.eqns, jaxpr.invars[first:count])
    leaves = tuple(_leaves(separated, tangents))
    for eqn in leading_to(jaxpr.eqns, [x.variable for x in leaves]):
        name, is_of_all = eqn.primitive.name, not separated.needs[eqn.outvars[0]]
        is_tangent = not tangents.isdisjoint(eqn.outvars)
        if is_tangent and not is_of_all and name not in _CARRIERS:
            raise Inseparable(f"what it captured passes through {name} before scores")
    return Linearization(score_mod, separated, tangents, leaves)


def _leaves(separated: Separated, tangents: frozenset[Any]) -> list[Leaf]:
    found = []
    for item in separated.hoisted:
        if item.variable not in tangents:
            continue
        if not item.is_looked_up:
            found.append(Leaf(item.variable, item.axes))
            continue
        for eqn in separated.inside:
            if item.variable in eqn.invars:  # one element of it
                axes = _axes_of_element(separated, eqn)
                found.append(Leaf(eqn.outvars[0], axes))
    return found


def _axes_of_element(separated: Separated, eqn: Any) -> tuple[str, ...]:
    """Of what is looked up by a query and a key, or by their difference."""
    asked = frozenset().union(*(separated.needs[v] for v in variables(eqn.invars)))
    if "s" in asked:
        raise Inseparable("it looks up what scores choose")
    growth = _growth(separated)
    is_shared = all(growth[v] == 0 for v in variables(eqn.invars[1:]))
    last = (DIFFERENCE,) if is_shared else (*PAIR,)
    return *(a for a in "bh" if a in asked), *last


def _growth(separated: Separated) -> dict[Any, int | None]:
    """By how much values grow from a query and a key to the next of both.

    That is 0 of all functions of the difference; None where it is not always the same.
    """
    grow = {"s": None, "q": 1, "k": 1}
    jaxpr = separated.jaxpr
    found: dict[Any, int | None] = dict.fromkeys(jaxpr.invars, 0)
    found |= {v: grow.get(role, 0) for v, role in separated.roles_of.items()}
    for eqn in jaxpr.eqns:
        given = [0 if is_literal(x) else found[x] for x in eqn.invars]
        found |= dict.fromkeys(eqn.outvars, _grown(eqn, given))
    return found


def _grown(eqn: Any, given: Sequence[int | None]) -> int | None:
    steps = [n for n in given if n is not None]
    if len(steps) < len(given):
        return None
    if not any(steps):
        return 0
    name, kinds = eqn.primitive.name, {x.aval.dtype for x in eqn.invars}
    if kinds != {jnp.dtype("int32")}:  # sums of floats may be rounded
        return None
    if name in _COMPARISONS and len(set(steps)) == 1:
        return 0
    signs = _SIGNS.get(name)
    return signs and sum(n * x for n, x in zip(signs, steps, strict=True))


def _roles(indices: dict[str, Any]) -> dict[str, Any]:
    """A query and a key of a difference, where that is an index."""
    if DIFFERENCE not in indices:
        return indices
    d = indices[DIFFERENCE]
    return indices | {"q": jnp.maximum(d, 0), "k": jnp.maximum(-d, 0)}


# --- programs -------------------------------------------------------------------------


def _made_of(equations: Sequence[Any], first: Iterable[Any]) -> frozenset[Any]:
    """These variables, and all that depends on them."""
    found = set(first)
    for eqn in equations:
        if not found.isdisjoint(variables(eqn.invars)):
            found.update(eqn.outvars)
    return frozenset(found)


def _has_custom_vjp(jaxpr: Any) -> bool:
    """Whether forward mode has no rule for some function in it."""
    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name == "custom_vjp_call":
            return True
        if inner is not None and _has_custom_vjp(getattr(inner, "jaxpr", inner)):
            return True
    return False
