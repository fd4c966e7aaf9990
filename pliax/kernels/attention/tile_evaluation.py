"""The part of a mod that is left for a kernel, on one tile of scores.

    compute_inside : separated mod, what was loaded, score and indices  ->  tile

A value is a scalar, a row (one number for each query of the tile), a column (one for
each key) or a tile, and is made as large as it is needed where it meets another. A tile
may lie on its side: then its rows are keys.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from pliax.core.dataflow import is_literal, leading_to, variables

from .index_bounds import GUESS, IndexBounds
from .normalization import compute
from .separation import MOVES, Separated


# Operations on integers that are exact for their floats too.
_SUMS: dict[str, Callable[..., Any]] = {
    "abs": jnp.abs,
    "add": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "neg": jnp.negative,
    "sub": jnp.subtract,
}


_STRIDE = 32  # Python allows a thousand calls in each other, an equation takes four


@dataclass(frozen=True)
class Space:
    """What a kernel says of its tile.

    Attributes:
        rows: The index its rows are of, "q", or "k" for a tile on its side.
        limits: The largest value of each index.
        argument: From "s", "b", "h", "q" or "k" to the scores or the index.
        load: From the number of a hoisted value to it, as a scalar, row or column.
        look_up: `(number of a hoisted array, indices)` to a tile of its elements.
        spread: `(value, kind, kind)` makes a value larger; kinds are "scalar", "row",
            "column" and "tile".
        guesses: Whether integers that are loaded once, as where a sequence begins, are
            taken for small.
    """

    rows: str
    limits: Mapping[str, int]
    argument: Callable[[str], Any]
    load: Callable[[int], Any]
    look_up: Callable[[int, Sequence[Any]], Any]
    spread: Callable[[Any, str, str], Any]
    guesses: bool = False

    def kind(self, needs: frozenset[str]) -> str:
        """How large a value is that depends on these."""
        if "s" in needs or {"q", "k"} <= needs:
            return "tile"
        if not needs & {"q", "k"}:
            return "scalar"
        return "row" if self.rows in needs else "column"


def compute_inside(
    separated: Separated, space: Space, which: Sequence[int] | None = None
) -> list[Any]:
    """A mod's results on a tile; what they need is computed and loaded.

    Args:
        separated: The mod.
        space: The tile.
        which: Of its results; None for all.
    """
    results = separated.jaxpr.outvars
    wanted = results if which is None else [results[n] for n in which]
    inside = _inside(separated, space, guesses=space.guesses)
    for v in _milestones(separated, wanted):
        inside.reach(v)
    return [inside.read(v, "tile") for v in wanted]


def _milestones(separated: Separated, wanted: Sequence[Any]) -> list[Any]:
    """What equations make that are `_STRIDE` links from the milestones before them.

    Who computes these first, in order, calls itself no deeper than that.
    """
    links, found = dict[Any, int](), list[Any]()
    for eqn in leading_to(separated.inside, wanted):
        before = max((links.get(v, 0) for v in variables(eqn.invars)), default=0)
        is_far = before + 1 == _STRIDE
        found += eqn.outvars if is_far else []
        links |= dict.fromkeys(eqn.outvars, 0 if is_far else before + 1)
    return found


def guess_holds(separated: Separated, space: Space) -> Any:
    """Whether what is guessed is so, a scalar; None if nothing is gained by it."""
    sure, more = (
        _inside(separated, space, guesses=x).sums_of_floats() for x in (False, True)
    )
    if sure == more:
        return None
    inside = _inside(separated, space, guesses=False)
    numbers = map(inside.value, _numbers_loaded(separated))
    are_small = [(x >= -GUESS) & (x <= GUESS) for x in numbers]
    return functools.reduce(operator.and_, are_small)


def _inside(separated: Separated, space: Space, *, guesses: bool) -> "_Inside":
    guessed = _numbers_loaded(separated) if guesses else ()
    bounds = IndexBounds(separated, space.limits, guessed)
    inside = _Inside(separated, space, bounds)
    for eqn in separated.inside:  # in order, so that none asks deeply
        list(map(inside.is_exact, eqn.outvars))
    return inside


def _numbers_loaded(separated: Separated) -> list[Any]:
    """Integers that a kernel loads once for a sequence or a head."""
    return [
        x.variable
        for x in separated.hoisted
        if not x.is_looked_up
        and not {"q", "k"} & set(x.axes)
        and x.variable.aval.dtype == jnp.int32
    ]


@dataclass(frozen=True)
class _Inside:
    separated: Separated
    space: Space
    bounds: IndexBounds
    found: dict[Any, Any] = field(default_factory=dict)
    floats: dict[Any, Any] = field(default_factory=dict)
    exact: dict[Any, bool] = field(default_factory=dict)

    def kind(self, v: Any) -> str:
        return "scalar" if is_literal(v) else self.space.kind(self.separated.needs[v])

    def read(self, v: Any, kind: str) -> Any:
        return self.space.spread(self.value(v), self.kind(v), kind)

    def value(self, v: Any) -> Any:
        if is_literal(v):
            return jnp.asarray(v.val, v.aval.dtype)
        if v not in self.found:
            self.found[v] = self.make(v)
        return self.found[v]

    def reach(self, v: Any) -> None:
        """Compute it as those will need it that are made of it."""
        if v.aval.dtype == jnp.int32 and self.is_sum(v) and self.is_exact(v):
            self.as_float(v, "tile")
        self.value(v)

    def make(self, v: Any) -> Any:
        hoisted = [x.variable for x in self.separated.hoisted]
        if v in hoisted:
            return self.space.load(hoisted.index(v))
        if v in self.separated.roles_of:
            return self.space.argument(self.separated.roles_of[v])
        return self.result(self.separated.makers[v])

    def result(self, eqn: Any) -> Any:
        kind, name = self.kind(eqn.outvars[0]), eqn.primitive.name
        if name == "dynamic_slice":
            return self.looked_up(eqn, kind)
        if name in MOVES:
            return self.read(eqn.invars[0], kind)
        if self.is_float(eqn):
            return self.as_float(eqn.invars[0], kind)
        if name == "select_n":
            chosen = self.bounds.chosen(eqn)
            if chosen is not None:
                return self.read(chosen, kind)
        return compute(eqn, [self.read(x, kind) for x in eqn.invars])

    def looked_up(self, eqn: Any, kind: str) -> Any:
        """Elements of an array; an index beyond its end takes the nearest."""
        array, *starts = eqn.invars
        number = [x.variable for x in self.separated.hoisted].index(array)
        places = []
        for start, n in zip(starts, array.aval.shape, strict=True):
            place, (low, high) = self.read(start, kind), self.bounds.of(start)
            is_inside = low >= 0 and high < n
            places.append(place if is_inside else jnp.clip(place, 0, n - 1))
        return self.space.look_up(number, places)

    def sums_of_floats(self) -> list[Any]:
        """What need not be converted for each score."""
        return [
            eqn.outvars[0]
            for eqn in self.separated.inside
            if self.is_float(eqn) and self.is_sum(eqn.invars[0])
        ]

    # A conversion takes as long as an exponential. That of a difference of positions is
    # the difference of what was converted once a row and once a column.

    def as_float(self, v: Any, kind: str) -> Any:
        """An integer as float32, by sums of floats."""
        key = (id(v), kind) if is_literal(v) else (v, kind)
        if key not in self.floats:
            self.floats[key] = self.make_float(v, kind)
        return self.floats[key]

    def make_float(self, v: Any, kind: str) -> Any:
        own = self.kind(v)
        if self.is_sum(v):
            eqn = self.separated.makers[v]
            operation = _SUMS[eqn.primitive.name]
            return operation(*(self.as_float(x, kind) for x in eqn.invars))
        if own != kind:
            return self.space.spread(self.as_float(v, own), own, kind)
        return self.value(v).astype(jnp.float32)

    def is_float(self, eqn: Any) -> bool:
        """Whether it converts an integer whose sums float32 holds exactly."""
        if eqn.primitive.name != "convert_element_type":
            return False
        is_float = eqn.params["new_dtype"] == jnp.float32
        return is_float and self.is_exact(eqn.invars[0])

    def is_sum(self, v: Any) -> bool:
        """Whether it is made for each score, of what floats are added for, too."""
        eqn = self.separated.maker(v)
        is_known = eqn is not None and eqn.primitive.name in _SUMS
        return is_known and self.kind(v) == "tile"

    def is_exact(self, v: Any) -> bool:
        """Whether that gives the float of the sum of integers."""
        if not self.is_sum(v):
            return self.bounds.are_exact(v)
        if v not in self.exact:
            parts = self.separated.makers[v].invars
            are_exact = all(map(self.is_exact, parts))
            self.exact[v] = are_exact and self.bounds.are_exact(v)
        return self.exact[v]
