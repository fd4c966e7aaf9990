"""Named sizes as they are declared: a name, a range, where each was read off.

scope_of : Symbols, constraints  ->  the scope in which `jax.export` computes with them
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A named size.

    Attributes:
        name: as it appears in expressions, "t".
        hint: its value in the call that is traced; None if only the device knows it.
        origin: what it was read off, "x.shape[0]".
        is_strong: whether it must not become a constant.
        is_named: whether the user gave it its name.
        low: its smallest value.
        high: its largest value, or None.
        offset: how much more it is than the Python integer that it was read off.
        is_traced: whether nobody knows its value, for which the hint stands in: what
            that decides is a guard, which a call has to refuse.
    """

    name: str
    hint: int | None
    origin: str
    is_strong: bool = False
    is_named: bool = True
    low: int = 1
    high: int | None = None
    offset: int = 0
    is_traced: bool = False

    @property
    def at_hand(self) -> str:
        """Its value in the call that is traced, in words: "t = 9 (x.shape[0])"."""
        if self.hint is None:
            return ""
        name = f"{self.name} - {self.offset}" if self.offset else self.name
        return f"{name} = {self.hint - self.offset} ({self.origin})"


def scope_of(symbols: Collection[Symbol], constraints: Sequence[str]) -> Any:
    """Where `jax.export` knows named sizes, and what else is said of them."""
    stated = (text for c in constraints for text in _as_jax_states(c))
    return jax.export.SymbolicScope((*_ranges(symbols), *stated))


def _ranges(symbols: Collection[Symbol]) -> list[str]:
    """What jax.export does not assume by itself: bounds other than at least 1."""
    lows = [f"{s.name} >= {s.low}" for s in symbols if s.low > 1]
    highs = [f"{s.name} <= {s.high}" for s in symbols if s.high is not None]
    return lows + highs


@functools.lru_cache(maxsize=1 << 10)
def _as_jax_states(condition: str) -> tuple[str, ...]:
    """A condition as `jax.export` takes it: it solves equations for one term alone.

    "5 == t" is turned around, and "t + u == 8" becomes two inequalities.
    """
    left, is_equation, right = condition.partition(" == ")
    for text in (condition, f"{right} == {left}") if is_equation else ():
        try:
            jax.export.SymbolicScope((text,))
        except ValueError:
            continue
        return (text,)
    return (f"{left} <= {right}", f"{left} >= {right}") if is_equation else (condition,)
