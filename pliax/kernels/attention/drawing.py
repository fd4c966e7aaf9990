"""Block masks as pictures: text for the terminal, matplotlib for papers.

Both draw the states of the blocks, a NumPy array (rows, columns) of EMPTY, PARTIAL
and FULL. Nothing here knows what a BlockMask is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int


EMPTY, PARTIAL, FULL = range(3)
_GLYPHS = "  ", "░░", "██"  # two characters make a cell about as wide as it is high
_CELLS = 20  # rows and columns of a drawing: 40 characters fit beside other output
_LABELS = "empty", "partial", "full"
# White, and two of the palette that readers with colour-blindness tell apart. The
# lightness falls from empty to full, so that a printout in grey says the same.
# Okabe and Ito, "Color Universal Design", 2008.
_COLOURS = "#FFFFFF", "#E69F00", "#0072B2"


def draw(
    pictures: Sequence[tuple[str, Int[np.ndarray, "R C"]]], block_size: tuple[int, int]
) -> str:
    """States of blocks as text, one picture under the other, and a legend.

    Args:
        pictures: Title and states of each; all of one shape.
        block_size: Queries and keys of a block, for the legend.

    Examples:
        >>> import numpy as np
        >>> print(draw([("causal", np.tril(np.full((3, 3), 2)) - np.eye(3, dtype=int))],
        ...            (128, 128)))
        causal
        ░░
        ██░░
        ████░░
        ██ full, ░░ partial, blank empty: each cell a block of 128 x 128
    """
    steps = _steps(pictures[0][1].shape)
    lines = []
    for title, states in pictures:
        rows = ("".join(_GLYPHS[s] for s in row) for row in _downsampled(states, steps))
        lines += [title, *(row.rstrip() for row in rows)]
    size = f"{block_size[0]} x {block_size[1]}"
    each = "a block" if steps == (1, 1) else f"{steps[0]} x {steps[1]} blocks"
    legend = f"██ full, ░░ partial, blank empty: each cell {each} of {size}"
    return "\n".join([*lines, legend])


def plot(
    states: Int[np.ndarray, "R C"],
    *,
    title: str,
    block_size: tuple[int, int],
    ax: Any = None,
) -> Any:
    """States of blocks as an image with a legend, on `ax` or on a figure of its own.

    Raises:
        ImportError: Without matplotlib.
    """
    try:
        import matplotlib.pyplot as plt
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError(
            "BlockMask.plot draws with matplotlib, which is not installed.\n"
            "Install it with: pip install pliax[plots]"
        ) from error
    ax = plt.subplots(layout="constrained")[1] if ax is None else ax
    aspect = block_size[0] / block_size[1]
    ax.imshow(
        states,
        cmap=ListedColormap(_COLOURS),
        vmin=EMPTY,
        vmax=FULL,
        interpolation="nearest",
        aspect=aspect,
    )
    ax.set(title=title, xlabel="key block", ylabel="query block")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    _separate_blocks(ax, states.shape)
    patches = [
        Patch(facecolor=colour, edgecolor="0.6", label=label)
        for colour, label in zip(_COLOURS, _LABELS, strict=True)
    ]
    ax.legend(
        handles=patches[::-1],
        loc="upper left",
        bbox_to_anchor=(1.02, 1.0),
        borderaxespad=0.0,
        frameon=False,
    )
    return ax


def _steps(shape: tuple[int, ...]) -> tuple[int, int]:
    """Blocks of a cell, so that the drawing has at most `_CELLS` rows and columns."""
    rows, columns = (-(-n // _CELLS) for n in shape)
    return rows, columns


def _downsampled(
    states: Int[np.ndarray, "R C"], steps: tuple[int, int]
) -> Int[np.ndarray, "r c"]:
    """A cell is full (empty) where all its blocks are, else partial."""
    starts = [
        np.arange(0, n, step) for n, step in zip(states.shape, steps, strict=True)
    ]

    def fold(ufunc: Any) -> np.ndarray:
        return ufunc.reduceat(ufunc.reduceat(states, starts[0], axis=0), starts[1], 1)

    least, most = fold(np.minimum), fold(np.maximum)
    return np.where(least == most, least, PARTIAL)


def _separate_blocks(ax: Any, shape: tuple[int, ...]) -> None:
    """Thin lines between blocks, where there are few enough to leave room for them."""
    if max(shape) > 64:
        return
    for ticks, n in ((ax.set_xticks, shape[1]), (ax.set_yticks, shape[0])):
        ticks(np.arange(n + 1) - 0.5, minor=True)
    ax.grid(which="minor", color="0.85", linewidth=0.5)
    ax.tick_params(which="minor", length=0)
