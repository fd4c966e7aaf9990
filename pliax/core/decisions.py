"""What a trace took for granted about sizes, on record so that it can be proved.

A guard says what was assumed. A `Decision` says what was concluded: every answer that
code outside of JAX, or JAX itself, went on with. The guards of a trace, the ranges of
its sizes and what users declared must imply all of them (`px.validate_guards`).

One answer is no decision: JAX's `==` between sizes that are not the same expression is
False, which to JAX means "not known to be equal". What it does then is right for equal
sizes as well, or it stops with an error; that is its contract for symbolic dimensions.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any

from .conditions import Condition, opposite
from .provenance import Place


@dataclasses.dataclass(frozen=True)
class Decision:
    """An answer about sizes that a trace relied upon.

    Attributes:
        question: what was asked.
        answer: what was answered.
        place: the line of the user's code that asked.
        is_from_jax: whether it was JAX, called from that line.
        decided: what the sizes at hand decided and a guard states; None where the
          answer followed from what was known.
    """

    question: Condition
    answer: bool
    place: Place
    is_from_jax: bool
    decided: Condition | None = None

    @property
    def condition(self) -> str:
        """What has to hold of all sizes that the trace serves: "t + 1 != t"."""
        return str(self.question if self.answer else opposite(self.question))

    def __str__(self) -> str:
        return f"{self.condition}  # {self.place}"


def key_of(question: Condition, is_from_jax: bool) -> Hashable:
    """What tells questions apart. Sizes by their expressions: a `Size` asks back."""
    if question.operation in ("and", "or"):
        return str(question), is_from_jax
    a, b = question.parts
    return comparison_key(a, question.operation, b, is_from_jax)


def comparison_key(a: Any, relation: str, b: Any, is_from_jax: bool) -> Hashable:
    """As `key_of`, of a comparison that is no `Condition` yet."""
    a, b = (getattr(x, "expression", x) for x in (a, b))
    return a, relation, b, is_from_jax
