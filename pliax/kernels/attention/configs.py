"""Block sizes of the Mosaic GPU kernels: a table, and what a user asks for instead.

Found on one H200 in bfloat16, which float16 shares: its numbers are as long and its
products as fast. Dense and coarse rows with 16 heads, 4,096 and 16,384 keys: with two
warpgroups that take turns at the tensor cores 128 channels reach 625 TFLOP/s without a
mod, without turns 573. With 64 channels the softmax takes longer than the products, and
three warpgroups that each go at their own pace reach 457 where two reach 434. Backward,
one kernel for all gradients reaches 430 with 64 channels, where a kernel for dq and one
for dk and dv reached 330, and with 128 on one H100 519, with ALiBi 448 against 387.

Fine rows with 12 documents in 4,096 tokens, batch 4, 16 heads: one warpgroup that
moves its own data, two to four thread blocks a multiprocessor. TFLOP/s, and those of
blocks of 128 in the coarse row: forward 138 (93) with 64 channels, 179 (152) with 128;
backward 93 (88) and 86 (111), where registers hold too little. The same sizes inside
blocks of 128, forward: 112 and 149. With 128 channels a third thread block fits where
one visit is in shared memory at once: where lists tell conditions 0.109 ms forward,
with two visits 0.127; where all are asked 0.127 and 0.121. Backward a kernel for dq and
one for dk and dv have room for small ones: with 64 channels 0.239 ms of both, where two
warpgroups and one that moves take 0.278 (one H100); with 128 that for dk and dv has,
0.358 instead of 0.380. `benchmarks/tune_attention.py` ranks what fits.

With 64 channels small thread blocks of all heads of some rows start together: packed
documents of 16,384 tokens take 0.974 of the time forward and 0.984 backward, of 4,096
tokens 1.00 and 1.00; with 128 it would be 1.02 and 1.03 (4,096 tokens, one H200).

Decoding (131,072 keys, 16 query and 2 key heads of 128 channels): for one
query of each of 8 sequences two warpgroups that take 64 keys in turn read keys and
values at 1.01 of the rate of a copy on the device, one warpgroup at 0.98, two with 128
keys at 1.00. Of one sequence the kernel takes 34 to 35 us, where that rate gives 33.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pliax.kernels._hopper import MULTIPROCESSORS


UNIT = 64  # rows of one instruction of the tensor cores, and columns of a square
OPTIONS = ("block_q", "block_kv", "stages")
OPTIONS += tuple(f"bwd_{name}" for name in OPTIONS)  # as torch's FlexKernelOptions have
FLAGS = ("deterministic",)  # options that are True or False
_MEMORY = 226 * 1024  # bytes of a thread block: a Hopper GPU has 227 KiB; and barriers


class Sizes(NamedTuple):
    """What a kernel's blocks are called in the table.

    Attributes:
        groups: Warpgroups that compute, of 64 rows each.
        columns: Columns of scores of a visit.
        stages: Visits whose operands are in shared memory at once. With one, the next
            keys arrive during the softmax, the next values during the next product.
    """

    groups: int
    columns: int
    stages: int = 2


ALIGNED_BYTES = 1024  # at a multiple of which each array in shared memory begins
_REDUCTIONS = 2 * 1024  # bytes in which Mosaic adds along rows
_NEXT_TILES = ALIGNED_BYTES  # what the warpgroup that moves tells the others
CAPTURED_LEAVES = 8  # of which a kernel makes sums, from a tile of slopes each
_LARGEST = Sizes(3, 256, 8)  # registers shared by more warpgroups are too few


# By kernel, channels of the wider of keys and values, and kind of mask: none is dense;
# one whose blocks have multiples of 128 of the kernel's rows is coarse, another fine,
# or told where lists tell what is met, if that makes a difference.
TABLE = {
    ("forward", 64, "dense"): Sizes(3, 128),
    ("forward", 64, "coarse"): Sizes(2, 128),
    ("forward", 64, "fine"): Sizes(1, 64),
    ("forward", 128, "dense"): Sizes(2, 128),
    ("forward", 128, "coarse"): Sizes(2, 128),
    ("forward", 128, "fine"): Sizes(1, 64),
    ("forward", 128, "told"): Sizes(1, 64, 1),
    ("forward", 256, "dense"): Sizes(2, 64),
    ("forward", 256, "coarse"): Sizes(2, 64),
    ("forward", 256, "fine"): Sizes(1, 64),
    ("backward", 64, "dense"): Sizes(2, 128),
    ("backward", 64, "coarse"): Sizes(2, 128),
    ("backward", 64, "fine"): Sizes(1, 64),
    ("backward", 128, "dense"): Sizes(2, 64),
    ("backward", 128, "coarse"): Sizes(2, 64),
    ("backward", 128, "fine"): Sizes(1, 64),
    ("dq", 64, "dense"): Sizes(2, 128),
    ("dq", 64, "coarse"): Sizes(2, 128),
    ("dq", 64, "fine"): Sizes(1, 64),
    ("dq", 128, "dense"): Sizes(2, 128),
    ("dq", 128, "coarse"): Sizes(2, 128),
    ("dq", 128, "fine"): Sizes(1, 128),
    ("dq", 256, "dense"): Sizes(1, 64),
    ("dq", 256, "coarse"): Sizes(1, 64),
    ("dq", 256, "fine"): Sizes(1, 64),
    ("dkv", 64, "dense"): Sizes(2, 64),
    ("dkv", 64, "coarse"): Sizes(2, 64),
    ("dkv", 64, "fine"): Sizes(1, 64),
    ("dkv", 128, "dense"): Sizes(2, 64),
    ("dkv", 128, "coarse"): Sizes(2, 64),
    ("dkv", 128, "fine"): Sizes(1, 64),
    ("dkv", 256, "dense"): Sizes(1, 64),
    ("dkv", 256, "coarse"): Sizes(1, 64),
    ("dkv", 256, "fine"): Sizes(1, 64),
    ("captured", 64, "dense"): Sizes(2, 128),
    ("captured", 64, "coarse"): Sizes(2, 128),
    ("captured", 64, "fine"): Sizes(1, 64),
    ("captured", 128, "dense"): Sizes(2, 64),
    ("captured", 128, "coarse"): Sizes(2, 64),
    ("captured", 128, "fine"): Sizes(1, 64),
    ("captured", 256, "dense"): Sizes(1, 64),
    ("captured", 256, "coarse"): Sizes(1, 64),
    ("captured", 256, "fine"): Sizes(1, 64),
}


_DECODING_MEMORY = 220 * 2**10  # bytes for matrices alone
_DECODING_REST = 5 * 1024  # statistics, reductions, the verdict about hidden keys
_STAGES = 8
_PART = 6  # visits that take as long as a part's beginning and end
_WAVES = 9  # more parts than this do not share multiprocessors any better


@dataclass(frozen=True)
class Config:
    """How a kernel is cut into pieces.

    Attributes:
        rows: Rows of scores of a warpgroup: one instruction takes 64.
        columns: Columns of scores of a visit.
        stages: Visits whose operands are in shared memory at once.
        groups: Warpgroups that compute.
        takes_turns: Whether one computes its softmax while the other has the tensor
            cores. For two warpgroups.
        registers: Of a thread that computes, and of one that moves data: 64K in all.
        shares_rows: Whether all warpgroups have the same rows and take visits in turn,
            each for sums of its own; else each has its own rows, and makes all visits.
        movers: Warpgroups besides that move data: one, or two, of which one loads and
            one adds to a sum in global memory. Without any a thread block is small
            enough for several to share a multiprocessor, so that one works while
            another waits: for one warpgroup that computes.
        puts_off: Whether the softmax puts off what can wait (`mosaic_gpu_softmax`).
        gathers_heads: Whether thread blocks of all heads of some rows start together.
    """

    rows: int = UNIT
    columns: int = 128
    stages: int = 2
    groups: int = 2
    takes_turns: bool = False
    registers: tuple[int, int] = (232, 40)
    shares_rows: bool = False
    movers: int = 1
    puts_off: bool = False
    gathers_heads: bool = False

    @property
    def has_mover(self) -> bool:
        """Whether those that compute leave it to others to move data."""
        return self.movers > 0

    @property
    def loads_together(self) -> bool:
        """Forward, whether keys and values of a visit start to load at the same time.

        Without a mover that is when both have been read, if two visits are in shared
        memory. If it is one, the next keys load while its values are still needed.
        """
        return not self.has_mover and self.stages > 1

    @property
    def threads(self) -> int:
        """Warpgroups of a thread block."""
        return self.groups + self.movers

    @property
    def span(self) -> int:
        """Rows of a thread block."""
        return self.rows * self.groups // self.takers

    @property
    def takers(self) -> int:
        """Warpgroups that take visits in turn."""
        return self.groups if self.shares_rows else 1


@dataclass(frozen=True)
class Kernel:
    """One kernel of a call, whose blocks are to be chosen.

    Attributes:
        name: "forward"; "backward", for all gradients at once, whose rows are keys;
            "dq" and "dkv", for one side, the second with keys as its rows; or
            "captured", for gradients of what a score_mod captured, with either.
        channels: Of keys and values, multiples of 64.
        blocks: Rows and columns of the mask's, multiples of 64; None without a mask.
        are_told: Whether lists say which conditions of the mask a block meets.
    """

    name: str
    channels: tuple[int, int]
    blocks: tuple[int, int] | None
    are_told: bool = False

    def config(self, asked: Mapping[str, int]) -> Config:
        """The blocks of the table, or those asked for; smaller ones if they do not fit.

        Args:
            asked: The `kernel_options` of the user, named by `OPTIONS`.
        """
        wanted = Sizes(*map(min, self.row()._replace(**self._named(asked)), _LARGEST))
        fitting = (sizes for sizes in _not_larger(wanted) if self.fits(sizes))
        return self.of(next(fitting, Sizes(1, UNIT, 1)))

    def row(self) -> Sizes:
        """The table's."""
        widest = max(self.channels)
        channels = min(
            n for name, n, _ in TABLE if name == self.name and n >= min(widest, 256)
        )
        kind = "dense"
        if self.blocks is not None:
            kind = "fine" if self.blocks[0] % (2 * UNIT) else "coarse"
        sizes = TABLE[self.name, channels, kind]
        if kind == "fine" and self.are_told:
            return TABLE.get((self.name, channels, "told"), sizes)
        return sizes

    def _named(self, asked: Mapping[str, int]) -> dict[str, int]:
        """What a user calls by queries and keys, by rows and columns."""
        prefix = "" if self.name == "forward" else "bwd_"
        sides = ("kv", "q") if self.name in ("backward", "dkv") else ("q", "kv")
        rows, columns = (f"{prefix}block_{side}" for side in sides)
        names = {"groups": rows, "columns": columns, "stages": f"{prefix}stages"}
        found = {ours: asked[name] for ours, name in names.items() if name in asked}
        if "groups" in found:
            found["groups"] //= UNIT
        return found

    def of(self, sizes: Sizes) -> Config:
        """The rest follows from the sizes."""
        groups, columns, stages = sizes
        widest = UNIT if self.name == "dq" else 128
        movers = int(groups > 1 or max(self.channels) > widest)
        if movers and self.name == "backward":
            movers = 2
        registers = (160, 24) if groups > 2 else (232, 40)
        if movers == 2:
            registers = (152, 24) if groups > 2 else (232, 24)
        return Config(
            columns=columns,
            stages=stages,
            groups=groups,
            takes_turns=self.name == "forward" and groups == 2,
            registers=registers,
            movers=movers,
            puts_off=self.name == "forward" and self._puts_off(movers),
            gathers_heads=movers == 0 and max(self.channels) <= UNIT,
        )

    def _puts_off(self, movers: int) -> bool:
        """Whether registers have room for what the softmax puts off.

        With 16,384 tokens on one H200 it takes 0.93 of the time without a mask and 0.96
        with a causal one (128 channels), 0.98 for documents (64); but 1.05 for a causal
        mask and 1.12 for ALiBi with 64, whose kernels have a mover.
        """
        return movers == 0 or max(self.channels) > UNIT

    def fits(self, sizes: Sizes) -> bool:
        """Whether registers, shared memory and the mask's blocks have room for them."""
        config = self.of(sizes)
        if self.blocks is not None:
            rows, columns = self.blocks
            if rows % config.span or columns % config.columns:
                return False
        if self.name == "backward" and self._squares(config) % config.groups:
            return False
        most = config.registers[0] if config.has_mover else 255
        is_enough = self._registers(config) <= most
        return is_enough and self._bytes(config) <= _MEMORY

    def room(self, config: Config) -> int:
        """Bytes of shared memory that are left."""
        return max(0, _MEMORY - self._bytes(config))

    def _squares(self, config: Config) -> int:
        """Of dq, in the kernel for all gradients."""
        return config.columns // UNIT * (self.channels[0] // UNIT)

    def _registers(self, config: Config) -> float:
        """Of a thread, at least: sums, and what becomes part of them."""
        (D, V), columns = self.channels, config.columns
        if self.name == "forward":  # a quarter more for the softmax
            return 1.25 * (V / 2 + columns * 3 / 4)
        if self.name == "backward":
            together = self._squares(config) / config.groups if config.has_mover else 1
            return (D + V) / 2 + columns + 32 * together
        width = D if self.name == "dq" else D + V if max(D, V) <= 128 else max(D, V)
        width = 0 if self.name == "captured" else width
        return width / 2 + columns * 5 / 4

    def _bytes(self, config: Config) -> int:
        """Of shared memory, at most."""
        (D, V), rows, columns = self.channels, config.span, config.columns
        visited = config.stages * columns * (D + V) * 2
        if self.name == "forward":
            output = V if V != D else 0
            kept = rows * (D + output) * 2 + 2 * rows * 4
            return visited + kept + _REDUCTIONS + _NEXT_TILES
        kept = rows * (D + V) * 2
        known = config.stages * columns * 3 * 4
        if self.name == "dq":  # delta, which it sums, and what warpgroups agree on
            known = 2 * ALIGNED_BYTES + _REDUCTIONS
        if self.name == "captured":  # and a tile whose diagonals are added
            known += rows * (columns + 8 + CAPTURED_LEAVES) * 4 + 2 * ALIGNED_BYTES
            known += _REDUCTIONS
        if self.name != "backward":
            return visited + kept + known
        d_scores = min(config.groups, 2) * rows * columns * 2
        squares = self._squares(config) * UNIT * UNIT * 4
        return visited + kept + rows * D * 2 + known + d_scores + squares


def _not_larger(wanted: Sizes) -> Iterator[Sizes]:
    """The wanted sizes, then smaller ones: fewer stages first, one stage last."""
    for least in (2, 1):
        for groups in range(wanted.groups, 0, -1):
            for columns in range(wanted.columns, 0, -UNIT):
                for stages in range(wanted.stages, least - 1, -1):
                    yield Sizes(groups, columns, stages)


# --- few queries ----------------------------------------------------------------------


def decoding_config(
    rows: int, channels: tuple[int, int], blocks: tuple[int, int] | None
) -> Config:
    """The blocks of a forward pass of few queries, whose sums are float32.

    Warpgroups with rows of their own put off what can wait: 16 queries of 8 sequences,
    8 to a key head, of 128 channels, take 0.94 of the time without a mod, 0.96 under
    ALiBi and 0.97 under a soft cap; those that share rows, as of 4 queries, 1.01.

    Args:
        rows: Of a key head.
        channels: Of keys and values, multiples of 64.
        blocks: The mask's, multiples of 64; None without a mask.
    """
    shares = rows <= UNIT or bool(blocks and blocks[0] % (2 * UNIT))
    is_wide = not shares and max(channels) <= 128 and not (blocks and blocks[1] % 128)
    columns = 128 if is_wide else 64
    for groups in (2, 1):
        held = _held(groups, channels)
        stages = (_DECODING_MEMORY - held) // (2 * columns * sum(channels))
        takers = groups if shares else 1
        if stages >= 2 * takers:
            break
    turns = groups == 2 and not shares
    stages = min(stages, _STAGES) // takers * takers
    return Config(
        UNIT, columns, stages, groups, turns, shares_rows=shares, puts_off=not shares
    )


def _held(groups: int, channels: tuple[int, int]) -> int:
    """Bytes of the queries and sums of so many warpgroups, in shared memory."""
    D, V = channels
    return groups * UNIT * (4 * V if D == V else 2 * D + 4 * V)


def decoding_room(config: Config, channels: tuple[int, int]) -> int:
    """Bytes of shared memory that such a kernel leaves."""
    visited = config.stages * config.columns * sum(channels) * 2
    taken = _held(config.groups, channels) + visited + _DECODING_REST
    return max(0, _MEMORY - taken)


def splits(blocks: int, visits: int) -> int:
    """Parts that the visits of a thread block are cut into, to keep the GPU busy.

    The multiprocessor with most to do has `ceil(blocks n / 132)` of the parts, each of
    `ceil(visits / n)` visits and what it costs to begin and to end.

    Args:
        blocks: Thread blocks without parts.
        visits: How many one of them makes, at most.
    """

    def longest(n: int) -> int:
        return -(-blocks * n // MULTIPROCESSORS) * (-(-visits // n) + _PART)

    return min(range(1, _WAVES + 2 * MULTIPROCESSORS // blocks), key=longest)
