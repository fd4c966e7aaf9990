"""In which order the thread blocks of a matrix product make its tiles.

One thread block stays on each multiprocessor and takes every n-th tile. Tiles that are
near each other in the order share rows and columns, which are then in the cache. If
the last round would leave most thread blocks without work its tiles are cut in four.
"""

import math
from dataclasses import dataclass

import numpy as np

from pliax.kernels._hopper import MULTIPROCESSORS


TILE = 128  # rows and columns: what one warpgroup has registers for
HALF = TILE // 2  # rows of one instruction of the tensor cores; a quarter has as many
BAND = 4  # columns of tiles that are made together; 8 and 16 took as long, or longer
# Rounds: of more a part is nothing, and a kernel without quarters compiles faster.
_MANY = 16
# Of a round of whole tiles: a quarter reads twice as much for each product. On an H200
# it took 0.44, and 0.56 where its pieces come one at a time.
_ROUND_OF_QUARTERS = 0.5


@dataclass(frozen=True)
class Schedule:
    """Which tiles there are, and how they are shared out.

    Attributes:
        matrices: How many are stacked.
        order: Row and column of each tile of a matrix, (tiles, 2).
        blocks: Thread blocks; or pairs of them, which make neighbouring tiles.
    """

    matrices: int
    order: np.ndarray
    blocks: int = MULTIPROCESSORS

    @property
    def tiles(self) -> int:
        """Of one matrix."""
        return len(self.order)

    @property
    def whole(self) -> int:
        """How many tiles are made in one piece; the others follow as quarters."""
        total = self.matrices * self.tiles
        rest = total % self.blocks
        gains = 4 * rest <= self.blocks and total < _MANY * self.blocks
        return total - rest if gains else total

    @property
    def quarters(self) -> int:
        """How many quarters of tiles there are."""
        return 4 * (self.matrices * self.tiles - self.whole)

    @property
    def rounds(self) -> float:
        """How many whole tiles the busiest thread block could make in that time."""
        rest = _ROUND_OF_QUARTERS if self.quarters else 0.0
        return math.ceil(self.whole / self.blocks) + rest


def triangle(matrices: int, rows: int, blocks: int = MULTIPROCESSORS) -> Schedule:
    """Tiles on and below the diagonal of symmetric matrices."""
    n = -(-rows // TILE)
    order = [(i, j) for i, j in _in_bands(n, n) if j <= i]
    return Schedule(matrices, np.array(order, np.int32), blocks)


def rectangle(
    matrices: int,
    rows: int,
    columns: int,
    *,
    width: int = TILE,
    blocks: int = MULTIPROCESSORS,
) -> Schedule:
    """All tiles, of which each is as wide as said."""
    order = _in_bands(-(-rows // TILE), -(-columns // width))
    return Schedule(matrices, np.array(order, np.int32), blocks)


def _in_bands(rows: int, columns: int) -> list[tuple[int, int]]:
    return [
        (i, j)
        for first in range(0, columns, BAND)
        for i in range(rows)
        for j in range(first, min(first + BAND, columns))
    ]
