"""What mods know of each column of a tile, brought along with what is visited.

A visit is short, beside the time that a load from global memory takes: the warpgroup
that moves keys or queries has the copy engine bring these arrays, too. Where shared
memory has no room for more, the warpgroups that compute load them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from .configs import ALIGNED_BYTES, Config
from .mosaic_gpu_tiles import MOVED, ModOnTile, Operands, i32, window
from .separation import Hoisted


_ITEM = 4  # bytes: mods know booleans and half precision as numbers of 32 bits, too


@dataclass(frozen=True)
class Columns:
    """The arrays that come along.

    Attributes:
        mods: `score_mod` and `mask_mod`, those that there are.
        places: Which of their arrays, by mod and number.
        config: The kernel's.
    """

    mods: Sequence[Operands]
    places: tuple[tuple[int, int], ...]
    config: Config

    def scratch(self) -> list[Any]:
        """The shared memory they take."""
        arrays = (self.mods[n].arrays[number] for n, number in self.places)
        lengths = (MOVED if x.keys > 1 else self.config.columns for x in self.items)
        return [
            plgpu.SMEM((self.config.stages, n), x.dtype)
            for n, x in zip(lengths, arrays, strict=True)
        ]

    @property
    def items(self) -> list[Hoisted]:
        """What they are."""
        return [self.mods[n].separated.hoisted[number] for n, number in self.places]

    def load(
        self, refs: Sequence[Any], there: Any, slot: Any, at: Any, here: Any
    ) -> None:
        """Starts to load those of a visit.

        Args:
            refs: The arrays of each mod, in global memory.
            there: What `scratch` gave.
            slot: Of the visit.
            at: Sequence, head and first column.
            here: The barrier that says that they are there.
        """
        *place, first = at
        every = zip(self.places, self.items, there, strict=True)
        for (n, number), item, to in every:
            start = first
            if item.keys > 1:
                start = lax.div(first, i32(item.keys * MOVED)) * i32(MOVED)
            x = window(item, refs[n][number], place, start, to.shape[1])
            plgpu.copy_gmem_to_smem(x, to.at[slot], here)

    def known(
        self, there: Any, slot: Any, mod: ModOnTile | None, first: Any = None
    ) -> dict[int, Any]:
        """What a mod, or None, knows of the columns of a visit, if it came along.

        Args:
            there: What `scratch` gave.
            slot: Of the visit.
            mod: One of the mods.
            first: Its first column, for what its columns share.
        """
        if mod is None:
            return {}
        pairs = zip(self.places, there, strict=True)
        refs = {
            number: x.at[slot]
            for (n, number), x in pairs
            if self.mods[n].separated is mod.separated
        }
        return mod.columns_in(refs, first)


def columns_of(
    mods: Sequence[Operands | None], axis: str, config: Config, room: int
) -> Columns:
    """The arrays that there is room for.

    Args:
        mods: `score_mod` and `mask_mod`, or None.
        axis: What a column is: "q" or "k".
        config: The kernel's.
        room: Bytes of shared memory that are left.
    """
    some = [mod for mod in mods if mod is not None]
    each = config.stages * config.columns * _ITEM
    most = room // (-(-each // ALIGNED_BYTES) * ALIGNED_BYTES)
    places = (
        (n, number)
        for n, mod in enumerate(some)
        for number, item in enumerate(mod.separated.hoisted)
        if axis in item.axes and not item.is_looked_up
    )
    return Columns(some, tuple(places)[: most if config.has_mover else 0], config)
