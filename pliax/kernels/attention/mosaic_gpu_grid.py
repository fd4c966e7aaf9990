"""Which thread block of a kernel has which tile of rows."""

from dataclasses import dataclass
from typing import Any

from jax import lax

from .mosaic_gpu_tiles import i32


@dataclass(frozen=True)
class Grid:
    """Thread blocks that have one tile each; sequences change fastest.

    Attributes:
        batch: Sequences.
        heads: Of each.
        tiles: Of each head.
        gathers_heads: Whether those of all heads of some rows start together, then, by
            one number; else those of a head.
    """

    batch: int
    heads: int
    tiles: int
    gathers_heads: bool

    @property
    def sizes(self) -> dict[str, int]:
        """By name, the last one changes fastest."""
        if self.gathers_heads:
            return {"blocks": self.tiles * self.heads * self.batch}
        return {"heads": self.heads, "tiles": self.tiles, "batch": self.batch}

    def place(self) -> tuple[Any, Any, Any]:
        """Of this thread block: sequence, head and tile."""
        if not self.gathers_heads:
            b, h, tile = map(lax.axis_index, ("batch", "heads", "tiles"))
            return b, h, tile
        n, (B, H) = lax.axis_index("blocks"), map(i32, (self.batch, self.heads))
        rows = lax.div(n, B)
        return lax.rem(n, B), lax.rem(rows, H), lax.div(rows, H)
