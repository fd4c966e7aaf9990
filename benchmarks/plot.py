"""Draw docs/assets/bench_muon.png from the committed benchmarks/results/muon_cpu.json.

uv run --group bench benchmarks/plot.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np


ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "muon_cpu.json"
PICTURE = ROOT / "docs" / "assets" / "bench_muon.png"
COLOURS = ("#2f6f9f", "#d98032", "#9a9a9a")  # ours first


def main(result: Path = RESULT, picture: Path = PICTURE) -> None:
    record = json.loads(result.read_text())
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    figure, axes = plt.subplots(
        1, len(cases), figsize=(4.2 * len(cases), 2.8), squeeze=False
    )
    for axis, case in zip(axes[0], cases, strict=True):
        _bars(axis, case, [row for row in record["rows"] if row["case"] == case])
    figure.suptitle("One Muon update, 12 layers, CPU: median and samples", fontsize=10)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150, metadata={"Software": ""})
    print(f"wrote {picture}")


def _bars(axis: Any, case: str, rows: list[dict[str, Any]]) -> None:
    """One bar a rival, its samples as dots, its error written beside it."""
    heights = np.arange(len(rows))[::-1]
    medians = [row["median_ms"] for row in rows]
    axis.barh(heights, medians, color=COLOURS[: len(rows)], height=0.6)
    for height, row in zip(heights, rows, strict=True):
        samples = row["samples_ms"]
        axis.plot(samples, [height] * len(samples), "k.", markersize=2, alpha=0.5)
        label = f" {row['median_ms']:.0f} ms, error {row['max_error']:.0e}"
        axis.text(0, height + 0.33, label, fontsize=7, va="bottom")
    axis.set_yticks(heights, [row["rival"].replace(", ", ",\n") for row in rows])
    axis.set_ylim(-0.5, len(rows) - 0.3)
    axis.set_title(case, fontsize=9)
    axis.set_xlabel("milliseconds", fontsize=8)
    axis.locator_params(axis="x", nbins=5)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
