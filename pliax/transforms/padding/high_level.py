"""Operations that JAX lowers late: what they are made of, in place."""

from collections.abc import Sequence
from typing import Any

from .formulas import by_formula
from .interpreter import HIGHER_ORDER
from .layouts import Bucket, Padded
from .rules import rule


HIGHER_ORDER |= {"call_hi_primitive"}


@rule("call_hi_primitive")
def in_lower_operations(
    bucket: Bucket, eqn: Any, *operands: Padded
) -> Sequence[Padded]:
    """Its definition in lower operations, traced for the sizes of its operands."""
    lower = eqn.primitive.to_lojax
    return by_formula(bucket, eqn, lambda *xs: lower(*xs, **eqn.params), *operands)
