"""What is known of a mod's integers before a kernel runs: least and largest value.

    variable  ->  (least, largest),  all of int32 where nothing is known

Indices are at least 0 and less than the lengths. A result that might wrap around may be
anything.

References:
    Moore, "Interval Analysis", 1966, chapter 2.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from pliax.core.dataflow import is_literal

from .separation import MOVES, Separated


type Bounds = tuple[int, int]

EXACT = 2**24  # integers up to here are float32 numbers, and so are their sums
GUESS = 2**22  # what is guessed of an integer is that it is at most so large
_ALL = -(2**31), 2**31 - 1
_RULES: Mapping[str, Callable[..., Bounds]] = {
    "abs": lambda x: (max(0, x[0], -x[1]), max(-x[0], x[1])),
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "div": lambda x, y: (0, x[1] // y[0]) if x[0] >= 0 and y[0] > 0 else _ALL,
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "mul": lambda x, y: (
        min(n * m for n in x for m in y),
        max(n * m for n in x for m in y),
    ),
    "neg": lambda x: (-x[1], -x[0]),
    "rem": lambda x, y: (0, min(x[1], y[1] - 1)) if x[0] >= 0 and y[0] > 0 else _ALL,
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
}


@dataclass(frozen=True)
class IndexBounds:
    """The bounds of a mod's variables.

    Attributes:
        separated: The mod.
        limits: The largest value of each index, by "b", "h", "q" and "k".
        guessed: Variables that are taken for at most `GUESS`, below and above zero.
    """

    separated: Separated
    limits: Mapping[str, int]
    guessed: Collection[Any] = ()
    _found: dict[Any, Bounds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for eqn in self.separated.jaxpr.eqns:  # in order, so that none asks deeply
            for v in eqn.outvars:
                self.of(v)

    def of(self, v: Any) -> Bounds:
        """Least and largest value of an integer."""
        if v.aval.dtype != jnp.int32:
            return _ALL
        if is_literal(v):
            return int(v.val), int(v.val)
        if v not in self._found:
            low, high = self._find(v)
            is_sure = _ALL[0] <= low and high <= _ALL[1]
            self._found[v] = (low, high) if is_sure else _ALL
        return self._found[v]

    def are_exact(self, v: Any) -> bool:
        """Whether float32 holds all that an integer may be."""
        low, high = self.of(v)
        return max(-low, high) <= EXACT

    def chosen(self, eqn: Any) -> Any:
        """The case a select always takes, as that of an index that is never < 0."""
        test = self.separated.maker(eqn.invars[0])
        if test is None or test.primitive.name != "lt":
            return None
        left, right = map(self.of, test.invars)
        if left[0] >= right[1]:
            return eqn.invars[1]
        return eqn.invars[2] if left[1] < right[0] else None

    def _find(self, v: Any) -> Bounds:
        if v in self.guessed:
            return -GUESS, GUESS
        if role := self.separated.roles_of.get(v):
            return 0, self.limits.get(role, _ALL[1])
        eqn = self.separated.maker(v)
        if eqn is None:
            return _ALL
        name, rule = eqn.primitive.name, _RULES.get(eqn.primitive.name)
        if name in MOVES:
            return self.of(eqn.invars[0])
        if name == "select_n":
            chosen = self.chosen(eqn)
            cases = eqn.invars[1:] if chosen is None else [chosen]
            lows, highs = zip(*map(self.of, cases), strict=True)
            return min(lows), max(highs)
        return rule(*map(self.of, eqn.invars)) if rule else _ALL
