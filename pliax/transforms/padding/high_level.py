"""Operations that JAX lowers late: what they are made of, in place."""

from typing import Any

import jax

from .interpreter import HIGHER_ORDER, run
from .layouts import Bucket, Padded
from .rules import rule


HIGHER_ORDER |= {"call_hi_primitive"}


@rule("call_hi_primitive")
def in_lower_operations(bucket: Bucket, eqn: Any, *operands: Padded) -> list[Padded]:
    """Its definition in lower operations, traced for the sizes of its operands."""
    lower = eqn.primitive.to_lojax
    closed = jax.make_jaxpr(lambda *xs: lower(*xs, **eqn.params))(
        *(x.aval for x in eqn.invars)
    )
    return run(bucket, closed.jaxpr, closed.consts, operands)
