"""Sizes born from data: where they get their values, and what is asserted of them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.conditions import computed

from .interpreter import HIGHER_ORDER
from .layouts import Bucket, Padded
from .rules import rule


HIGHER_ORDER |= {"size_from_data", "check"}


@rule("size_from_data")
def size_from_data(bucket: Bucket, eqn: Any, value: Padded) -> list[Padded]:
    """From here on the size has this value, at most its bound whatever comes."""
    size, excess = eqn.params["size"], eqn.params["excess"]
    bound = bucket.scalar(eqn.params["bound"])
    found = lax.convert_element_type(value.data, jnp.int32)
    if excess:
        bucket.check(excess, (found >= 0) & (found <= bound))
    bucket.count(str(size), jnp.clip(found, np.int32(0), bound))
    return []


@rule("check")
def check(bucket: Bucket, eqn: Any) -> list[Padded]:
    """The condition on the sizes as they are, not as it says they are."""
    holds = computed(eqn.params["condition"], bucket.counted)
    bucket.check(eqn.params["text"], jnp.asarray(holds))
    return []
