"""The part of a mod that is left for a kernel, on one tile of scores.

    compute_inside : separated mod, what was loaded, score and indices  ->  tile

A value is a scalar, a row (one number for each query of the tile), a column (one for
each key) or a tile, and is made as large as it is needed where it meets another. A tile
may lie on its side: then its rows are keys.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from .normalization import compute
from .separation import MOVES, Separated, is_literal


_EXACT = 2**24  # integers up to here are float32 numbers, and so are their sums


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
    """

    rows: str
    limits: Mapping[str, int]
    argument: Callable[[str], Any]
    load: Callable[[int], Any]
    look_up: Callable[[int, Sequence[Any]], Any]
    spread: Callable[[Any, str, str], Any]

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
    inside, results = _Inside(separated, space, {}, {}, {}), separated.jaxpr.outvars
    wanted = results if which is None else [results[n] for n in which]
    return [inside.read(v, "tile") for v in wanted]


@dataclass(frozen=True)
class _Inside:
    separated: Separated
    space: Space
    found: dict[Any, Any]
    floats: dict[Any, Any]
    known: dict[Any, Any]

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
        if name == "convert_element_type" and self.is_exact_float(eqn):
            return self.as_float(eqn.invars[0], kind)
        if name == "select_n" and (chosen := self.chosen(eqn)) is not None:
            return self.read(chosen, kind)
        return compute(eqn, [self.read(x, kind) for x in eqn.invars])

    def looked_up(self, eqn: Any, kind: str) -> Any:
        """Elements of an array; an index beyond its end takes the nearest."""
        array, *starts = eqn.invars
        number = [x.variable for x in self.separated.hoisted].index(array)
        places = []
        for start, n in zip(starts, array.aval.shape, strict=True):
            place, limits = self.read(start, kind), self.bounds(start)
            inside = limits is not None and limits[0] >= 0 and limits[1] < n
            places.append(place if inside else jnp.clip(place, 0, n - 1))
        return self.space.look_up(number, places)

    # A conversion takes as long as an exponential. That of a difference of positions is
    # the difference of what was converted once a row and once a column.

    def is_exact_float(self, eqn: Any) -> bool:
        """Whether an integer is a sum of indices that float32 holds exactly."""
        to_float = eqn.params["new_dtype"] == jnp.float32
        return to_float and self.bounds(eqn.invars[0]) is not None

    def as_float(self, v: Any, kind: str) -> Any:
        key = (id(v), kind) if is_literal(v) else (v, kind)
        if key not in self.floats:
            self.floats[key] = self.make_float(v, kind)
        return self.floats[key]

    def make_float(self, v: Any, kind: str) -> Any:
        eqn, own = self.maker(v), self.kind(v)
        if eqn is None or eqn.primitive.name not in _SUMS or own != "tile":
            value = self.read(v, own).astype(jnp.float32)
            return self.space.spread(value, own, kind)
        operation, _ = _SUMS[eqn.primitive.name]
        return operation(*(self.as_float(x, kind) for x in eqn.invars))

    # --- what is known of integers before the kernel runs ---

    def maker(self, v: Any) -> Any:
        """The equation of a variable, or None."""
        return None if is_literal(v) else self.separated.makers.get(v)

    def chosen(self, eqn: Any) -> Any:
        """The case a select always takes, as that of an index that is never < 0."""
        test = self.maker(eqn.invars[0])
        if test is None or test.primitive.name != "lt":
            return None
        left, right = (self.bounds(x) for x in test.invars)
        if left is None or right is None:
            return None
        if left[0] >= right[1]:
            return eqn.invars[1]
        return eqn.invars[2] if left[1] < right[0] else None

    def bounds(self, v: Any) -> tuple[int, int] | None:
        """Least and largest value of an integer made by sums of indices, if small."""
        if v.aval.dtype != jnp.int32:
            return None
        if is_literal(v):
            return _small(int(v.val), int(v.val))
        if v not in self.known:
            self.known[v] = self.find_bounds(v)
        return self.known[v]

    def find_bounds(self, v: Any) -> tuple[int, int] | None:
        if role := self.separated.roles_of.get(v):
            return _small(0, self.space.limits.get(role, _EXACT + 1))
        eqn = self.maker(v)
        if eqn is not None and eqn.primitive.name == "select_n":
            chosen = self.chosen(eqn)
            return None if chosen is None else self.bounds(chosen)
        if eqn is None or eqn.primitive.name not in _SUMS:
            return None
        found = [self.bounds(x) for x in eqn.invars]
        if None in found:
            return None
        return _small(*_SUMS[eqn.primitive.name][1](*found))


type _Pair = tuple[int, int]
# Operations on integers that are exact for their floats too, and their bounds.
_SUMS: dict[str, tuple[Callable[..., Any], Callable[..., _Pair]]] = {
    "abs": (jnp.abs, lambda x: (max(0, x[0], -x[1]), max(-x[0], x[1]))),
    "add": (jnp.add, lambda x, y: (x[0] + y[0], x[1] + y[1])),
    "max": (jnp.maximum, lambda x, y: (max(x[0], y[0]), max(x[1], y[1]))),
    "min": (jnp.minimum, lambda x, y: (min(x[0], y[0]), min(x[1], y[1]))),
    "neg": (jnp.negative, lambda x: (-x[1], -x[0])),
    "sub": (jnp.subtract, lambda x, y: (x[0] - y[1], x[1] - y[0])),
}


def _small(low: int, high: int) -> _Pair | None:
    return (low, high) if max(-low, high) <= _EXACT else None
