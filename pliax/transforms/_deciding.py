"""Whether a size of a call is a symbol: by the user's word, or by what calls showed."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pliax.core.symbols import Symbol

from ._decisions import Learned


OFFSETS = {False: 1, True: 2**30}  # jax.export's names are at least 1; integers not


@dataclasses.dataclass(frozen=True)
class Position:
    """One size of a call.

    Attributes:
        leaf: the number of the flat argument.
        axis: its axis; None for the value of a Python integer.
        name: as the user would write it, "x.shape[0]".
    """

    leaf: int
    axis: int | None
    name: str


@dataclasses.dataclass(frozen=True)
class Declared:
    """What the user says of a family's sizes.

    Attributes:
        names: an expression of named sizes for some positions.
        symbols: the named sizes without hints.
        constraints: what is known of them.
        dynamic: positions that are symbols from the start.
        strong: those of them that must not become constants.
        static: positions that stay constants.
        everything: the option `dynamic`.
        learned: positions that changed in earlier runs, as a file of decisions says.
    """

    names: Mapping[Position, str]
    symbols: Mapping[str, Symbol]
    constraints: tuple[str, ...] = ()
    dynamic: frozenset[Position] = frozenset()
    static: frozenset[Position] = frozenset()
    strong: frozenset[Position] = frozenset()
    everything: bool | None = None
    learned: Mapping[Position, Learned] = MappingProxyType({})


class Decision(NamedTuple):
    """What a size of a call is taken for, and why.

    Attributes:
        is_dynamic: whether it is a symbol.
        why: in words; empty for a size that has not changed so far.
        is_learned: whether earlier calls, here or in another run, are the reason.
    """

    is_dynamic: bool
    why: str = ""
    is_learned: bool = False


def decide(declared: Declared, position: Position, history: Sequence[int]) -> Decision:
    """Whether a size is a symbol, from the user's word, then from its history."""
    if position in declared.names:
        return Decision(True, "declared by dims")
    if position in declared.static:
        return Decision(False, "marked by px.static")
    if declared.everything is False and position not in declared.dynamic:
        return Decision(False)
    if position.axis is not None and history[-1] == 0:
        return Decision(False, "an empty array is a case of its own")
    if position.axis is None and abs(history[-1]) >= OFFSETS[True]:
        return Decision(False, "it is too large for int32, in which sizes run")
    if position in declared.dynamic:
        is_strong = position in declared.strong
        mark = "px.dynamic" if is_strong else "px.maybe_dynamic"
        return Decision(True, f"marked by {mark}")
    if declared.everything:
        return Decision(True, "dynamic=True")
    return _by_history(declared, position, history)


def _by_history(
    declared: Declared, position: Position, history: Sequence[int]
) -> Decision:
    earlier = [size for size in history if size != history[-1]]
    if earlier:
        what = "the Python integer" if position.axis is None else "the size"
        why = f"{what} changed {earlier[-1]} -> {history[-1]}"
        return Decision(True, why, is_learned=True)
    if position in declared.learned:
        return Decision(True, declared.learned[position].why, is_learned=True)
    return Decision(False)
