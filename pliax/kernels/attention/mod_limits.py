"""Which mods no kernel computes, and why."""

import math
from typing import Any

from .normalization import with_slope
from .separation import MASK_MOD, SCORE_MOD, Inseparable, separate


_ELEMENTS = 2**31 - 1  # of an array whose elements are looked up by an int32


def refused_mods(shape: Any, score_mod: Any, block_mask: Any) -> str | None:
    """Why a kernel cannot compute the mods of a call; None where it can.

    Args:
        shape: Of the queries.
        score_mod: Score modification or None.
        block_mask: A mask or None.
    """
    B, _, H, _ = shape
    mods = []
    if score_mod is not None:
        mods.append(("score_mod", lambda: score_mod, SCORE_MOD))
        mods.append(("score_mod's slope", lambda: with_slope(score_mod), SCORE_MOD))
    if block_mask is not None:
        mods.append(("mask_mod", lambda: block_mask.mask_mod, MASK_MOD))
    for name, mod, roles in mods:
        try:
            separated = separate(mod(), roles)
        except Inseparable as reason:
            return f"of {name}, {reason}"
        for x in separated.hoisted:
            copies = math.prod({"b": B, "h": H}.get(a, 1) for a in x.axes)
            if x.is_looked_up and copies * x.variable.aval.size > _ELEMENTS:
                return f"of {name}, {x.variable.aval} has more than 2^31 elements"
    return None
