"""What the backward kernels share: the weights, and which queries see a key.

p = exp(s - maximum - log sum),   delta = sum(do o) - d lse
ds = p (do v - delta) ds/d(q k),  dq = ds k,  dk = ds' q,  dv = p' do
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from pliax.core.dataflow import is_literal

from .configs import UNIT, Config
from .mosaic_gpu import Call
from .mosaic_gpu_columns import Columns
from .mosaic_gpu_conditions import Condition, hide
from .mosaic_gpu_tiles import ModOnTile, Operands, Tile, i32
from .row_statistics import LOG2E, is_linear


_NEAR = 1024.0  # a maximum up to here is rounded by 6e-5 at most, bfloat16 by 4e-3
_TILE = 128  # rows, and columns, that are loaded at once divide it, or
_ASKED = 192  # these, where a user asks for others than the table's


@dataclass(frozen=True)
class Gradient:
    """What a backward kernel computes.

    Attributes:
        call: What is static in the call.
        config: The blocks.
        rows: What its rows are: queries, "q", or keys, "k".
        blocks: Rows and columns of a mask's block; None without a mask.
        score: `score_mod`, and its slope or what else a kernel wants of it.
        mask: `mask_mod`.
        dtype: Of the arrays.
        columns: What mods know of its columns, which comes with them.
        of_each_head: Whether rows that are keys have results for each query head.
    """

    call: Call
    config: Config
    rows: str
    blocks: tuple[int, int] | None
    score: Operands | None
    mask: Operands | None
    dtype: Any
    columns: Columns
    of_each_head: bool = False

    @property
    def is_linear(self) -> bool:
        """Whether the scale can be part of the exponent."""
        return is_linear(self.score, self.call.scale)

    @property
    def exponent_factor(self) -> float:
        """What a linear score is multiplied by, to be a power of two."""
        return self.call.scale * LOG2E

    @property
    def has_slope(self) -> bool:
        """Whether a modified score changes by more or less than the score."""
        if self.score is None or len(self.score.separated.jaxpr.outvars) == 1:
            return False
        slope = self.score.separated.jaxpr.outvars[1]
        return not (is_literal(slope) and slope.val == 1)

    @property
    def is_known_ahead(self) -> bool:
        """Whether what a mod adds is computed while the tensor cores make the scores.

        If it is the same for every score, unless `some_are_far`. One H100, parts of the
        time of a mod that is given scores: ALiBi with 64 channels 0.93 and 0.95 (4,096
        and 16,384 tokens). Not if it is looked up, 1.25, or on tiles of 64 columns,
        1.01: registers have no room for more; nor where unseen keys need care.
        Scores that it cancels are rounded as they are without a mod: those of 2.6e5
        cost 0.017 of the largest gradient, where bfloat16 products cost 0.005.
        """
        if self.score is None or self.has_slope or self.call.has_unseen:
            return False
        mod, is_wide = self.score.separated, self.config.columns > UNIT
        looks_up = any(x.is_looked_up for x in mod.hoisted)
        return mod.is_shift and is_wide and not looks_up

    @property
    def is_pipelined(self) -> bool:
        """Whether what a visit adds to dq is made beside the first product of the next.

        The warpgroups exchange their gradients of scores, and have done so long before
        then. Two H200s, 4,096 tokens, parts of the time of a visit that makes all of
        its own: no mask 0.90 (64 channels) and 0.97 (128), ALiBi 0.98 and 0.96, a table
        0.90. Registers have no room for it where a thread block takes many tiles
        (causal masks, 64 channels, 1.14) or a mod has a slope (soft cap 1.11). Masks
        without a mod were not measured where each thread block has one tile.
        """
        if not self.config.has_mover or self.call.has_unseen:
            return False
        return self.mask is None if self.is_linear else not self.has_slope

    @property
    def mods(self) -> list[Any]:
        """The arrays a kernel is given for them."""
        return [x.arrays for x in (self.score, self.mask) if x is not None]

    @property
    def repeats(self) -> int:
        """How many query heads, of how many sequences, a thread block has."""
        if self.rows == "q" or self.of_each_head:
            return 1
        sizes = self.call.sizes
        sequences = sizes["b"] if self.call.shares_keys else 1
        return sequences * sizes["h"] // self.call.key_heads

    def seen_by(self, n: Any, b: Any, h: Any) -> tuple[Any, Any]:
        """The n-th sequence and query head for the rows of one or of a key head."""
        if self.rows == "q" or self.of_each_head:
            return b, h
        group = self.call.sizes["h"] // self.call.key_heads
        if not self.call.shares_keys:
            return b, h * group + n
        return lax.div(n, i32(group)), h * group + lax.rem(n, i32(group))

    def over_heads(self, body: Any, carry: Any) -> Any:
        """`body(n, carry)` for all that see the rows."""
        if self.repeats == 1:
            return body(i32(0), carry)
        return lax.fori_loop(i32(0), i32(self.repeats), body, carry)


@dataclass(frozen=True)
class Weights:
    """The weights on a tile, once more.

    Attributes:
        gradient: What is computed.
        tile: Where.
        score: `score_mod` and its slope on this tile.
        mask: `mask_mod` on it.
    """

    gradient: Gradient
    tile: Tile
    score: ModOnTile | None
    mask: ModOnTile | None

    def __call__(
        self, scores: Any, first: Any, shifts: Any, columns: Any
    ) -> tuple[Any, Any]:
        """Weights, hidden ones too, and how much a modified score changes."""
        gradient = self.gradient
        if gradient.is_linear:
            return jnp.exp2(scores * gradient.exponent_factor - shifts[0]), None
        weights, *rest = self.of_mod(scores, first, shifts, columns)
        return weights, rest[0] if gradient.has_slope else None

    def of_mod(self, scores: Any, first: Any, shifts: Any, columns: Any) -> list[Any]:
        """Weights, and what else the mod's program finds on the tile."""
        scores, rest = scores * self.gradient.call.scale, []
        if self.score is not None:
            known = self.known(columns, self.score)
            scores, *rest = self.score(first, scores, known)
        return [jnp.exp2((scores - shifts[0]) * LOG2E - shifts[1]), *rest]

    def powers(self, first: Any, shifts: Any, columns: Any) -> Any:
        """What a mod that `is_known_ahead` adds to exponents, less what all lose."""
        log_of_all = shifts[0] + shifts[1] * (1 / LOG2E)
        assert self.score is not None
        known = self.known(columns, self.score)
        found, *_ = self.score(first, -log_of_all, known, which=(0,))
        return found * LOG2E

    def known(self, columns: Any, mod: ModOnTile | None) -> dict[int, Any]:
        """What a mod knows of columns that are in shared memory, in a slot."""
        there, slot = columns
        return self.gradient.columns.known(there, slot, mod)

    def hide(self, first: Any, weights: Any, columns: Any, met: Any = None) -> Any:
        """Weights of a partial block, or of one that reaches beyond the end."""
        return hide(weights, 0.0, self.conditions(first, columns, met))

    def conditions(self, first: Any, columns: Any, met: Any = None) -> list[Condition]:
        """What hides weights of such a block."""
        real = self.tile.is_column_real(first), self.tile.is_row_real()
        found = [Condition.of(x) for x in real if x is not None]
        if self.mask is None:
            return found
        known = self.known(columns, self.mask)
        return [*found, *self.mask.conditions(first, known, met)]


def with_slope_of_hidden(weights: Any, d_scores: Any, slope: Any) -> Any:
    """Of what is hidden the slope may be infinite."""
    if slope is None:
        return d_scores
    return jnp.where(weights == 0, 0.0, d_scores * slope)


def blind_tiles(
    known: tuple[Array, ...], length: int, queries: int
) -> tuple[Int[Array, "1"], Int[Array, "B H C"]]:
    """Whether some query sees nothing, and may hold anything, and which tiles have one.

    Args:
        known: Of `statistics`.
        length: How many queries there are.
        queries: Of a tile.
    """
    is_real = lax.broadcasted_iota(jnp.int32, known[0].shape, 2) < length
    is_blind = (known[0] == jnp.inf) & is_real
    tiles = is_blind.reshape(*is_blind.shape[:2], -1, queries)
    some, which = jnp.any(is_blind), jnp.any(tiles, axis=-1)
    return some.astype(jnp.int32)[None], which.astype(jnp.int32)


def some_are_far(known: tuple[Array, ...]) -> Int[Array, "1"]:
    """Whether a maximum is so large that rounding is a part of what was computed.

    The forward kernel rounds a score of -1e9 to a multiple of 64: weights that sum up
    to 1 are made of the same.

    Args:
        known: Of `statistics`.
    """
    is_far = (jnp.abs(known[0]) > _NEAR) & (known[0] < jnp.inf)
    return jnp.any(is_far).astype(jnp.int32)[None]


def whole_tiles(call: Call) -> int:
    """Queries that are a whole number of tiles, and of blocks of a mask."""
    asked = _ASKED if "bwd_block_q" in call.asked else 1
    return math.lcm(_TILE, asked, call.blocks[0] if call.blocks else 1)
