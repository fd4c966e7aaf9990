"""Draw docs/assets/waste.png: how much of the buckets is padding, by their number.

uv run --group bench benchmarks/plot_waste.py

Nothing is measured: the buckets and their waste come from the functions that px.compile
places them with, for lengths of documents between 16 and 1024.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from pliax.transforms.specialization import (
    Buckets,
    expected_waste,
    geometric,
    listed,
)


PICTURE = Path(__file__).parent.parent / "docs" / "assets" / "waste.png"
COLOURS = ("#2f6f9f", "#d98032", "#9a9a9a")
SHORTEST, LONGEST = 16, 1024
MEDIAN, SPREAD = 160, 0.9  # of the lengths, and of their logarithm
STEPS = range(1, 25)


def main() -> None:
    figure = draw(lengths())
    figure.savefig(PICTURE, dpi=150, facecolor="white", metadata={"Software": ""})
    print(f"wrote {PICTURE}")


def lengths() -> dict[int, int]:
    """How many of a million documents have each length, log-normal as texts' are."""
    n = np.arange(SHORTEST, LONGEST + 1)
    density = np.exp(-((np.log(n / MEDIAN) / SPREAD) ** 2) / 2) / n
    counts = np.rint(1e6 * density / density.sum()).astype(int)
    return {int(length): int(count) for length, count in zip(n, counts, strict=True)}


def curves(histogram: Mapping[int, int]) -> dict[str, list[tuple[int, float]]]:
    """The number of buckets and the expected waste, by how they are placed."""
    placed = {
        "geometric": [geometric(SHORTEST, LONGEST, None, steps=k) for k in STEPS],
        "placed by the histogram": [
            geometric(SHORTEST, LONGEST, histogram, steps=k) for k in STEPS
        ],
        "powers of two": [listed([2**k for k in range(4, 11)])],
        "multiples of 64": [listed(range(64, LONGEST + 1, 64))],
        "growing by a quarter": [geometric(SHORTEST, None, None)],
    }
    return {
        name: [
            (used(buckets, histogram), expected_waste(buckets, histogram))
            for buckets in tables
        ]
        for name, tables in placed.items()
    }


def used(buckets: Buckets, histogram: Mapping[int, int]) -> int:
    """How many buckets the sizes of a histogram take."""
    return len({buckets.choose(n) for n, count in histogram.items() if count})


def draw(histogram: Mapping[int, int]) -> Any:
    """The lengths on the left, the waste on the right; 14 buckets are the default."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(2, 3))
    left.fill_between(list(histogram), list(histogram.values()), color=COLOURS[2])
    left.set_xlabel("length of a document", fontsize=8)
    left.set_yticks([])
    left.set_ylim(bottom=0)
    for name, points in curves(histogram).items():
        _line(right, name, points)
    right.axvline(14, color="black", linewidth=0.6, linestyle=":")
    right.set_xlabel("number of buckets, each one executable", fontsize=8)
    right.set_title("expected waste: share of elements that are padding", fontsize=9)
    right.set_ylim(0, 0.6)
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.legend(fontsize=7, frameon=False)
    for axis in (left, right):
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def _line(axis: Any, name: str, points: list[tuple[int, float]]) -> None:
    """A curve over the number of buckets, or a mark where there is one number alone."""
    colours = {"placed by the histogram": COLOURS[0], "geometric": COLOURS[1]}
    marks = {"powers of two": "s", "multiples of 64": "^", "growing by a quarter": "D"}
    style = {
        "color": colours.get(name, "black"),
        "marker": marks.get(name, "."),
        "markersize": 4,
    }
    axis.plot(*zip(*points, strict=True), linewidth=1.2, label=name, **style)


if __name__ == "__main__":
    main()
