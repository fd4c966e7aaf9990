"""Which tile a thread block takes after the one it has.

The warpgroup that moves data takes a number that nobody has and tells the others
through shared memory, so that what the next tile needs is on its way while the results
of this one leave.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .mosaic_gpu_tiles import i32


class NextTiles(NamedTuple):
    """What the warpgroup that moves tells the others.

    Attributes:
        numbers: In shared memory: of tiles, and what is counted of them.
        here: Barriers: told.
        free: Heard by all.
    """

    numbers: Any
    here: Any
    free: Any

    @staticmethod
    def scratch(listeners: int, ahead: int, counted: int = 0) -> tuple[Any, Any, Any]:
        """The shared memory and the barriers.

        Args:
            listeners: Warpgroups that are told.
            ahead: Tiles that can be told before all have heard of them.
            counted: What is told beside a tile's number.
        """
        barriers = partial(plgpu.Barrier, num_barriers=ahead)
        numbers = plgpu.SMEM((ahead, 1 + counted), jnp.int32)
        return numbers, barriers(), barriers(num_arrivals=listeners)

    def slot(self, k: Any) -> Any:
        """Where the k-th number is."""
        ahead = self.numbers.shape[0]
        return lax.rem(k, i32(ahead)) if ahead > 1 else 0

    def tell(
        self,
        k: Any,
        take: Callable[[Any], None],
        counts: Callable[[Any], tuple[Any, ...]] = lambda n: (),
    ) -> tuple[Any, tuple[Any, ...]]:
        """The tile that is told next, and its counts.

        Args:
            k: How many were told before; of one slot, whether some was.
            take: Writes the number into shared memory.
            counts: From the number to what is counted of the tile.
        """
        ahead, slot = self.numbers.shape[0], self.slot(k)
        numbers = self.numbers.at[slot]
        pl.when(k >= ahead)(partial(plgpu.barrier_wait, self.free.at[slot]))
        take(numbers.at[0])
        found = counts(n := numbers[0])
        for i, count in enumerate(found):
            numbers[1 + i] = count
        plgpu.barrier_arrive(self.here.at[slot])
        return n, found

    def await_listeners(self, told: Any) -> None:
        """Nobody leaves before all have heard that no tile is left.

        Args:
            told: How many tiles were told; of one slot, 1.
        """

        @pl.loop(jnp.maximum(i32(told) - self.numbers.shape[0], 0), i32(told))
        def _(k: Any) -> None:
            plgpu.barrier_wait(self.free.at[self.slot(k)])

    def hear(self, k: Any, counted: int = 0) -> tuple[Any, tuple[Any, ...]]:
        """The same, for the others; they hear `counted` counts."""
        slot = self.slot(k)
        numbers = self.numbers.at[slot]
        plgpu.barrier_wait(self.here.at[slot])
        found = numbers[0], tuple(numbers[1 + i] for i in range(counted))
        plgpu.commit_smem()  # all warps have read
        plgpu.barrier_arrive(self.free.at[slot])
        return found
