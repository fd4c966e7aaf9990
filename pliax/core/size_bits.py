"""Bits of sizes, by quotients and remainders: Python's integers have no last bit."""

from typing import Any

import numpy as np


def common_bits(size: Any, other: Any) -> Any:
    """Of a size and an integer, by quotients and remainders: Python's bits have no end.

    As an expression it is as exact in whatever is computed of it.
    """
    if not isinstance(other, int | np.integer):
        return NotImplemented
    mask = int(other)
    if mask < 0:
        return size - common_bits(size, ~mask)
    total: Any = 0
    while mask:  # a run of ones after the other
        low = _trailing_zeros(mask)
        many = _trailing_zeros((mask >> low) + 1)
        total = total + (size // 2**low) % 2**many * 2**low
        mask -= (2**many - 1) << low
    return total


def _trailing_zeros(x: int) -> int:
    return (x & -x).bit_length() - 1
