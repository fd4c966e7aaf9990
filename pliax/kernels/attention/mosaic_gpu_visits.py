"""Which tiles the rows of a Mosaic GPU kernel are combined with, and in which order.

Full blocks come first where the two kinds have loops of their own (`Visits`), or the
last block where one order is wanted of all rows (`Backwards`).

A score_mod often prefers near keys, as ALiBi does, and a causal mask hides later ones:
from the last full block to the first maxima hardly grow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pliax.core.manual_axes import varying_axes

from .block_lists import column_and_met
from .configs import Config
from .mosaic_gpu_tiles import i32


def reach(config: Config, blocks: tuple[int, int] | None) -> int:
    """Columns that are visited together: those of a mask's block, else of a tile."""
    return config.columns if blocks is None else blocks[1]


class Visits(NamedTuple):
    """The columns a row of tiles is combined with.

    Attributes:
        full: How many visits see everything; they come first.
        total: How many there are.
        place: From the number of a visit to its first column, and to which conditions
            of the mask it meets, where lists tell; else None.
    """

    full: Any
    total: Any
    place: Callable[[Any], tuple[Any, Any]]

    def first(self, i: Any) -> Any:
        """The first column of the i-th visit."""
        return self.place(i)[0]

    def ahead(self, i: Any, stages: int) -> Any:
        """The first column of the visit so many later; beyond the end, of the last."""
        return self.first(jnp.minimum(i + stages, self.total - 1))

    def part(self, n: Any, parts: int) -> "Visits":
        """The n-th of parts of equal length; the last ones may be shorter, or empty."""
        length = lax.div(i32(self.total) + (parts - 1), i32(parts))
        start = n * length
        total = jnp.clip(self.total - start, 0, length)
        full = jnp.clip(self.full - start, 0, total)
        return Visits(full, total, lambda i: self.place(start + i))


def _row(num: Any, b: Any, h: Any, n: Any) -> tuple[Any, ...]:
    """Where the n-th row of blocks is in lists that sequences and heads may share."""
    return b if num.shape[0] > 1 else 0, h if num.shape[1] > 1 else 0, n


@dataclass(frozen=True)
class Blocks:
    """The lists of a mask, or none: then every column is visited.

    Attributes:
        sizes: Rows and columns of a mask's block; None without a mask.
        length: How many columns there are.
        config: The kernel's.
        tell: Whether the lists say which conditions of the mask each block meets
            (`TellingLists`).
        descends: Whether `visits` begins with the last full block, where lists are.
    """

    sizes: tuple[int, int] | None
    length: int
    config: Config
    tell: bool = False
    descends: bool = False

    @property
    def counted(self) -> int:
        """How many counts lists have: full visits, and all."""
        return 0 if self.sizes is None else 2

    def counts(self, lists: Any, b: Any, h: Any, first: Any) -> tuple[Any, ...]:
        """Full visits of the rows from `first` on, and all; () without lists."""
        if lists is None or self.sizes is None:
            return ()
        at = _row(lists[0], b, h, lax.div(first, i32(self.sizes[0])))
        per = i32(self.sizes[1] // self.config.columns)
        if self.tell:
            full, total = (x[at] for x in lists[:2])
        else:
            num, _, full_num, _ = lists
            full, total = full_num[at], full_num[at] + num[at]
        return full * per, total * per

    def visits(
        self, lists: Any, b: Any, h: Any, first: Any, counts: Any = None
    ) -> Visits:
        """The visits of the rows from `first` on, whose counts may be known."""
        step = self.config.columns
        if lists is None or self.sizes is None:
            full, total = self.length // step, -(-self.length // step)
            place = lambda i: (i * np.int32(step), None)  # noqa: E731
            return Visits(np.int32(full), np.int32(total), place)
        at = _row(lists[0], b, h, lax.div(first, i32(self.sizes[0])))
        per = i32(self.sizes[1] // step)
        full, total = counts or self.counts(lists, b, h, first)

        def told(i: Any) -> tuple[Any, Any]:
            return column_and_met(lists[2][(*at, lax.div(i, per))])

        def listed(i: Any) -> tuple[Any, Any]:
            _, indices, _, full_indices = lists
            is_full = i < full
            place = lax.div(jnp.where(is_full, i, i - full), per)
            whole = full_indices[(*at, jnp.where(is_full, place, 0))]
            part = indices[(*at, jnp.where(is_full, 0, place))]
            return jnp.where(is_full, whole, part), None

        def column(i: Any) -> tuple[Any, Any]:
            if self.descends:
                i = jnp.where(i < full, full - 1 - i, i)
            block, met = told(i) if self.tell else listed(i)
            return (block * per + lax.rem(i, per)) * step, met

        return Visits(full, total, column)

    def backwards(self, lists: Any, b: Any, h: Any, first: Any) -> "Backwards":
        """The same visits from the last column to the first."""
        step = self.config.columns
        if lists is None or self.sizes is None:
            whole = self.length // step if self.length % step else None
            return Backwards(i32(-(-self.length // step)), whole=whole)
        num, indices, full_num, full_indices = lists
        at = _row(num, b, h, lax.div(first, i32(self.sizes[0])))
        per = self.sizes[1] // step
        total = (full_num[at] + num[at]) * per
        ends = _computed(full_num[at]), _computed(num[at])
        return Backwards(total, (full_indices, indices), at, ends, per)


def _computed(x: Any) -> Any:
    """A loaded number, as a loop may change it.

    Inside `jax.shard_map` what is loaded varies over the mesh, and what a kernel
    computes of it does not.
    """
    return x + 0 if varying_axes(x) else x


class Backwards(NamedTuple):
    """Visits in descending order, whether full or not.

    Attributes:
        total: How many there are.
        lists: Full and partial blocks, ascending; None to visit every tile.
        at: The sequence, head and row whose lists they are.
        ends: How many of each.
        per: Tiles of a block.
        whole: Without lists, tiles that do not reach beyond the end; None if all.
    """

    total: Any
    lists: tuple[Any, Any] | None = None
    at: tuple[Any, ...] = ()
    ends: tuple[Any, ...] = ()
    per: int = 1
    whole: int | None = None

    def start(self) -> tuple[Any, ...]:
        """How many full and partial blocks are left, and tiles of the next."""
        return () if self.lists is None else (*self.ends, i32(self.per))

    def next(self, i: Any, left: tuple[Any, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
        """The tile of the i-th visit, whether it is full, and what is left.

        Of a call in which all are full it is not said.
        """
        if self.lists is None:
            tile = self.total - 1 - i
            return tile, None if self.whole is None else tile < self.whole, ()
        *counts, tiles = left
        full, part = (
            jnp.where(n > 0, x[(*self.at, jnp.maximum(n - 1, 0))], -1)
            for x, n in zip(self.lists, counts, strict=True)
        )
        is_full, is_last = full > part, tiles == 1
        counts = [
            jnp.where(is_last & is_next, n - 1, n)
            for n, is_next in zip(counts, (is_full, ~is_full), strict=True)
        ]
        tile = jnp.maximum(full, part) * self.per + tiles - 1
        return tile, is_full, (*counts, jnp.where(is_last, i32(self.per), tiles - 1))
