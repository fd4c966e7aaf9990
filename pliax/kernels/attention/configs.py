"""Block sizes of the Mosaic GPU kernels.

Found on one H200 (bfloat16, 16 heads, 4,096 and 16,384 keys): with two warpgroups that
take turns at the tensor cores 128 channels reach 625 TFLOP/s without a mod, without
turns 573. With 64 channels the softmax takes longer than the products, and three
warpgroups that each go at their own pace reach 457 where two reach 434. Backward, one
kernel for all gradients reaches 430 with 64 channels, where a kernel for dq and one for
dk and dv reached 330, and 462 with 128; 64 channels gain 5% by more registers. With a
`score_mod` and 128 channels two kernels are faster: ALiBi 350 against 302.

Decoding (the same, 131,072 keys, 16 query and 2 key heads of 128 channels): for one
query of each of 8 sequences two warpgroups that take 64 keys in turn read keys and
values at 1.01 of the rate of a copy on the device, one warpgroup at 0.98, two with 128
keys at 1.00. Of one sequence the kernel takes 34 to 35 us, where that rate gives 33.
"""

from dataclasses import dataclass


_ROWS = 64
_SHARED_MEMORY = 220 * 2**10  # bytes for matrices, of the 227 KiB of a thread block
_STAGES = 8
_MULTIPROCESSORS = 132  # of an H100 or H200
_PART = 6  # visits that take as long as a part's beginning and end
_WAVES = 9  # more parts than this do not share multiprocessors any better


@dataclass(frozen=True)
class Config:
    """How a kernel is cut into pieces.

    Attributes:
        rows: Rows of scores of a warpgroup: one instruction takes 64.
        columns: Columns of scores of a visit.
        stages: Visits whose operands are in shared memory at once.
        groups: Warpgroups that compute; one more moves data.
        takes_turns: Whether one computes its softmax while the other has the tensor
            cores. For two warpgroups.
        registers: Of a thread that computes, and of one that moves data: 64K in all.
        shares_rows: Whether all warpgroups have the same rows and take visits in turn,
            each for sums of its own; else each has its own rows, and makes all visits.
    """

    rows: int = 64
    columns: int = 128
    stages: int = 2
    groups: int = 2
    takes_turns: bool = False
    registers: tuple[int, int] = (232, 40)
    shares_rows: bool = False

    @property
    def span(self) -> int:
        """Rows of a thread block."""
        return self.rows * self.groups // self.takers

    @property
    def takers(self) -> int:
        """Warpgroups that take visits in turn."""
        return self.groups if self.shares_rows else 1


def forward_config(channels: int, blocks: tuple[int, int] | None) -> Config:
    """The blocks of a forward pass.

    Args:
        channels: The larger of key's and value's, a multiple of 64.
        blocks: The mask's, multiples of 64; None without a mask.
    """
    columns = 64 if channels > 128 or (blocks and blocks[1] % 128) else 128
    if blocks is None and channels == 64:
        return Config(columns=columns, groups=3, registers=(160, 24))
    groups = 1 if blocks and blocks[0] % 128 else 2
    return Config(columns=columns, groups=groups, takes_turns=groups == 2)


def decoding_config(
    rows: int, channels: tuple[int, int], blocks: tuple[int, int] | None
) -> Config:
    """The blocks of a forward pass of few queries, whose sums are float32.

    Args:
        rows: Of a key head.
        channels: Of keys and values, multiples of 64.
        blocks: The mask's, multiples of 64; None without a mask.
    """
    shares = rows <= _ROWS or bool(blocks and blocks[0] % (2 * _ROWS))
    is_wide = not shares and max(channels) <= 128 and not (blocks and blocks[1] % 128)
    columns = 128 if is_wide else 64
    for groups in (2, 1):
        D, V = channels
        held = groups * _ROWS * (4 * V if D == V else 2 * D + 4 * V)
        stages = (_SHARED_MEMORY - held) // (2 * columns * sum(channels))
        takers = groups if shares else 1
        if stages >= 2 * takers:
            break
    turns = groups == 2 and not shares
    stages = min(stages, _STAGES) // takers * takers
    return Config(_ROWS, columns, stages, groups, turns, shares_rows=shares)


def splits(blocks: int, visits: int) -> int:
    """Parts that the visits of a thread block are cut into, to keep the GPU busy.

    The multiprocessor with most to do has `ceil(blocks n / 132)` of the parts, each of
    `ceil(visits / n)` visits and what it costs to begin and to end.

    Args:
        blocks: Thread blocks without parts.
        visits: How many one of them makes, at most.
    """

    def longest(n: int) -> int:
        return -(-blocks * n // _MULTIPROCESSORS) * (-(-visits // n) + _PART)

    return min(range(1, _WAVES + 2 * _MULTIPROCESSORS // blocks), key=longest)


def backward_config(
    channels: tuple[int, int], blocks: tuple[int, int] | None
) -> Config:
    """The blocks of the backward pass that makes all gradients at once.

    Its rows are keys. The sums of dq are cut into squares of 64, shared out evenly.

    Args:
        channels: Of keys and values, 64 or 128.
        blocks: Keys and queries of the mask's, multiples of 64; None without a mask.
    """
    is_narrow = max(channels) == 64 and not (blocks and blocks[1] % 128)
    columns = 128 if is_narrow else 64
    squares = columns // 64 * (channels[0] // 64)
    groups = 1 if squares % 2 or (blocks and blocks[0] % 128) else 2
    registers = (240, 24) if is_narrow else (232, 40)
    return Config(columns=columns, groups=groups, registers=registers)


def split_backward_config(
    rows: str, channels: int, blocks: tuple[int, int] | None
) -> Config:
    """The blocks of a backward pass for one side.

    Args:
        rows: What its rows are: queries, "q", or keys, "k".
        channels: The larger of key's and value's, a multiple of 64.
        blocks: Rows and columns of the mask's, multiples of 64; None without a mask.
    """
    wide = rows == "q" and channels <= 128 and not (blocks and blocks[1] % 128)
    groups = 1 if channels > 128 or (blocks and blocks[0] % 128) else 2
    return Config(columns=128 if wide else 64, groups=groups)
