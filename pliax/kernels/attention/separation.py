"""A mod split by where its values are computed: outside of a kernel, or inside.

    tab[h] * (q - k) + ids[b, q]  ->  outside: tab[h] a head, ids[b, q] a query
                                      inside:  scalar * (row - column) + row

What an equation depends on decides: the batch b, the head h, the query q, the key k or
the score s. A value that looks into captured arrays, or that no kernel can compute, is
computed outside if it depends neither on the score nor on both q and k; a kernel then
loads one number a head, one a query or one a key. An element chosen by both is
looked up in the kernel. Of what a tile of keys shares, `pages[lax.div(k, 128)]`, it
loads one number a tile.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from pliax.core.dataflow import is_literal, leading_to, variables
from pliax.core.evaluation import extend
from pliax.core.jaxprs import ClosedFunction

from .normalization import PLAIN, conditions, flatten, is_elementwise


AXES = ("b", "h", "q", "k")
SCORE_MOD, MASK_MOD = "sbhqk", "bhqk"
"""What the arguments of a mod are."""

MOVES = frozenset(("broadcast_in_dim", "reshape", "squeeze"))
"""Primitives that do nothing to one element."""


class Inseparable(Exception):  # noqa: N818  (a reason, which becomes a refusal)
    """Why a mod cannot be part of a kernel."""


@dataclass(frozen=True)
class Hoisted:
    """A value computed outside.

    Attributes:
        variable: The variable of the mod's jaxpr.
        axes: Those of AXES it has one of, in front of its own.
        is_looked_up: Whether the kernel chooses elements of it, by query and key.
        keys: There is one for so many keys, which begin at a multiple of that.
    """

    variable: Any
    axes: tuple[str, ...]
    is_looked_up: bool
    keys: int = 1


@dataclass(frozen=True)
class Separated:
    """A mod in two parts.

    Attributes:
        jaxpr: Its program, as `flatten` gives it.
        captured: How many arguments of that were captured.
        roles: What the others are, each one of "sbhqk".
        hoisted: What is computed outside.
        inside: The equations that are left, in order.
        needs: What each variable depends on, inside one that keys share not on them.
    """

    jaxpr: Any
    captured: int
    roles: str
    hoisted: tuple[Hoisted, ...]
    inside: tuple[Any, ...]
    needs: Mapping[Any, frozenset[str]]

    @cached_property
    def makers(self) -> Mapping[Any, Any]:
        """The equation that makes each variable."""
        return {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}

    def maker(self, v: Any) -> Any:
        """The equation of a variable, or None."""
        return None if is_literal(v) else self.makers.get(v)

    @cached_property
    def roles_of(self) -> Mapping[Any, str]:
        """What each scalar is that the mod is a function of."""
        return dict(zip(self.jaxpr.invars[self.captured :], self.roles, strict=True))

    @cached_property
    def is_costly(self) -> bool:
        """Whether it computes more of a score than plain arithmetic."""
        of_score = (e for e in self.inside if "s" in self.needs[e.outvars[0]])
        return any(e.primitive.name not in PLAIN | MOVES for e in of_score)

    @cached_property
    def is_shift(self) -> bool:
        """Whether the first result is the score plus what does not depend on it."""
        out = self.jaxpr.outvars[0]
        eqn = None if is_literal(out) else self.makers.get(out)
        if eqn is None or eqn.primitive.name not in ("add", "sub"):
            return False
        score, shift = eqn.invars
        if eqn.primitive.name == "add" and self.is_score(shift):
            score, shift = shift, score
        is_free = is_literal(shift) or "s" not in self.needs[shift]
        return self.is_score(score) and is_free

    def is_score(self, v: Any) -> bool:
        """Whether an operand is the score that a score_mod is given."""
        return not is_literal(v) and self.roles_of.get(v) == "s"


def separate(
    mod: ClosedFunction, roles: str, *, apart: bool = False, keys: int = 0
) -> Separated:
    """Splits a mod.

    Args:
        mod: The mod.
        roles: What its arguments are, each one of "sbhqk".
        apart: Whether the conditions of a mask are a result each.
        keys: Of a tile, from a multiple of it on; 0 if they may be any.

    Raises:
        Inseparable: If a kernel cannot compute what depends on the score, or on both a
            query and a key.
    """
    jaxpr = flatten(mod)
    jaxpr = jaxpr.replace(outvars=conditions(jaxpr)) if apart else jaxpr
    return separate_program(jaxpr, len(mod.captured), roles, keys=keys)


def separate_program(
    jaxpr: Any, captured: int, roles: str, *, keys: int = 0
) -> Separated:
    """The same of a program as `flatten` gives it, with so many captured arrays."""
    given = dict.fromkeys(jaxpr.invars[:captured], "")
    given |= dict(zip(jaxpr.invars[captured:], roles, strict=True))
    needs = _needs(jaxpr.eqns, given)
    shared = _shared_by_keys(jaxpr.eqns, given, keys) if keys else {}
    inside, outside = _divide(jaxpr, needs, captured, shared)
    lookups = [e for e in inside if e.primitive.name == "dynamic_slice"]
    looked_up = {e.invars[0] for e in lookups}
    of_each = {v: needs[v] for e in lookups for v in e.outvars}
    hoisted = tuple(
        Hoisted(
            v,
            tuple(a for a in AXES if a in needs[v]),
            v in looked_up,
            shared.get(v, 1) if "k" in needs[v] else 1,
        )
        for v in outside
    )
    own = {x.variable: needs[x.variable] - {"k"} for x in hoisted if x.keys > 1}
    needs |= _needs(inside, needs | own, of_each) | own
    found = Separated(jaxpr, captured, roles, hoisted, inside, needs)
    _check(found, looked_up)
    return found


def _needs(
    equations: Sequence[Any],
    given: Mapping[Any, Iterable[str]],
    of_each: Mapping[Any, frozenset[str]] | None = None,
) -> dict[Any, frozenset[str]]:
    """What each variable depends on, from what those do that are given.

    Elements that are looked up are `of_each` score, whatever chooses them.
    """
    needs = {v: frozenset(x) for v, x in given.items()}
    for eqn in equations:
        found = frozenset().union(*(needs.get(v, ()) for v in variables(eqn.invars)))
        needs |= {v: (of_each or {}).get(v, found) for v in eqn.outvars}
    return needs


def _shared_by_keys(
    equations: Sequence[Any], roles: Mapping[Any, str], keys: int
) -> dict[Any, int]:
    """What is not computed for each key alone, and how many share it.

    A kernel that has a tile of keys has one of it: it is made of `div(k, n)` where n is
    a multiple of `keys`. Arithmetic alone stays inside; this is about what is loaded.
    """
    grains, loaded = dict[Any, int](), set[Any]()
    for eqn in equations:
        given = variables(eqn.invars)
        found = math.gcd(*(int(roles.get(v) == "k") or grains.get(v, 0) for v in given))
        if eqn.primitive.name == "div" and [roles.get(v) for v in given] == ["k"]:
            by = eqn.invars[1]
            found = int(by.val) if is_literal(by) and by.val > 0 else found
        grains |= dict.fromkeys(eqn.outvars, found)
        if not is_elementwise(eqn) or not loaded.isdisjoint(given):
            loaded |= set(eqn.outvars)
    return {v: n for v, n in grains.items() if v in loaded and n and n % keys == 0}


def _divide(
    jaxpr: Any,
    needs: Mapping[Any, frozenset[str]],
    captured: int,
    shared: Mapping[Any, int],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The equations inside, and the variables that come from outside."""
    first = set(jaxpr.invars[:captured])
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    inside, outside, todo = set(), {}, variables(jaxpr.outvars)
    seen = set()
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        eqn = makers.get(v)
        is_free = "s" not in needs[v] and not {"q", "k"} <= needs[v]
        is_made = eqn is not None and is_elementwise(eqn) and v not in shared
        if v in first or (eqn is not None and is_free and not is_made):
            outside[v] = None
        elif eqn is not None:
            inside.add(id(eqn))
            todo += variables(eqn.invars)
    return tuple(e for e in jaxpr.eqns if id(e) in inside), tuple(outside)


def _check(separated: Separated, looked_up: set[Any]) -> None:
    for eqn in separated.inside:
        name = eqn.primitive.name
        if name == "dynamic_slice":
            if eqn.invars[0] not in {x.variable for x in separated.hoisted}:
                raise Inseparable("it looks into an array that it makes for each score")
            if any(n != 1 for n in eqn.params["slice_sizes"]):
                raise Inseparable("it looks up a row by query and key")
        elif name in MOVES:
            if eqn.outvars[0].aval.size > 1:
                raise Inseparable(f"it makes an array for each score ({name})")
        elif not is_elementwise(eqn):
            kinds = ", ".join(str(v.aval) for v in (*eqn.invars, *eqn.outvars))
            raise Inseparable(f"no kernel computes {name} for each score ({kinds})")
    for x in separated.hoisted:
        v = x.variable
        if v.aval.dtype.itemsize == 8:
            raise Inseparable(
                f"no kernel has numbers of 64 bits for each score ({v.aval})"
            )
        if x.is_looked_up and {"q", "k"} & set(x.axes):
            raise Inseparable(f"it looks into an array {v.aval} of each query or key")
        if not x.is_looked_up and v.aval.size > 1:
            raise Inseparable(f"it uses a whole array {v.aval} for each score")


# --- outside --------------------------------------------------------------------------


def compute_outside(
    separated: Separated, captured: Sequence[Any], sizes: Mapping[str, int]
) -> list[Any]:
    """The hoisted values, with an axis for each of what they have one of.

    Args:
        separated: The mod.
        captured: The arrays it captured.
        sizes: How many sequences, heads, queries and keys there are, by "bhqk".
    """
    return [
        outside(
            separated,
            captured,
            x.variable,
            {a: _indices(sizes[a], x.keys if a == "k" else 1) for a in x.axes},
        )
        for x in separated.hoisted
    ]


def outside(
    separated: Separated,
    captured: Sequence[Any],
    variable: Any,
    indices: Mapping[str, Any],
    roles: Callable[[dict[str, Any]], Mapping[str, Any]] = dict,
) -> Any:
    """A variable that does not depend on the score, with an axis for each index.

    Args:
        separated: The mod.
        captured: The arrays it captured.
        variable: Which.
        indices: The values of each index, in the order of the axes.
        roles: From one of each to the mod's arguments by role.
    """

    def one(*values: Any) -> Any:
        given = roles(dict(zip(indices, values, strict=True)))
        env = dict(zip(separated.jaxpr.invars, captured, strict=False))
        env |= {v: given.get(role) for v, role in separated.roles_of.items()}
        return _value(separated, variable, env)

    for n in range(len(indices))[::-1]:
        one = jax.vmap(one, [0 if i == n else None for i in range(len(indices))])
    return one(*indices.values())


def _indices(n: int, step: int) -> Any:
    """Every `step`-th of n."""
    every = jnp.arange(-(-n // step), dtype=jnp.int32)
    return every if step == 1 else every * step


def _value(separated: Separated, variable: Any, env: dict[Any, Any]) -> Any:
    """A variable's value, computing what it needs and no more."""
    extend(env, leading_to(separated.jaxpr.eqns, [variable]))
    return env[variable]
